/* y = residual + scale * norm(prologue(x) w^T + bias), for one row and for thousands.
 *
 * A thread takes whole outputs, reads their weights once and multiplies them with every row, a tile of rows at a time.
 * An output of a row is rounded and summed along the inputs in one way, whatever the tile, the rows beside it and the
 * threads. */
#include "dense/linear.h"

#include <omp.h>
#include <stdlib.h>

#include "dense/dequantize.h"
#include "dense/linear_tile.h"
#include "dense/prologue.h"
#include "dense/bfloat12.h"
#include "layout.h"
#include "simd/amx.h"
#include "team.h"

/* Tiles of up to TALL rows lie together, group after group, so that a product walks through them in order. */
enum { TALL = 8 };

/* The first group of a row, and from there to its next one. */
static int64_t tile_rows(const linear_args *a, int64_t row) {
  const int64_t left = a->rows - row / TALL * TALL;
  return left < TALL ? left : TALL;
}
static int64_t first_group(const linear_args *a, int64_t row) {
  return row / TALL * TALL * (a->inputs / GROUP) + row % TALL;
}

static int grouped(const linear_args *a) { return a->kind == INT4 || a->kind == INT8; }

static void round_row(const float *x, rounded *to, int64_t rows, int64_t groups) {
  for (int64_t g = 0; g < groups; g++, to += rows, x += GROUP) {
    vf largest = vf_zero(), total = vf_zero();
    for (int i = 0; i < GROUP; i += VL) {
      const vf v = vf_load(x + i);
      largest = vf_max(largest, vf_abs(v));
      total = vf_add(total, v);
    }
    const float m = vf_largest(largest);
    const vf inverse = vf_set1(m > 0 ? 127.0f / m : 0.0f);
    vf sum = vf_zero(); /* of integers below 2^24: exact */
    for (int i = 0; i < GROUP; i += VL) {
      const vf v = vf_mul(vf_load(x + i), inverse);
      const vf high = vf_round_to_int8(to->q[0] + i, v), rest = vf_mul(vf_sub(v, high), vf_set1(256));
      const vf low = vf_round_to_int8(to->q[1] + i, rest);
      sum = vf_add(vf_fma(high, vf_set1(256), low), sum);
    }
    join_parts(to);
    to->sum = (int32_t)vf_sum(sum);
    /* a NaN or an infinity must not vanish in the rounding */
    to->scale = m * (1.0f / (127 * 256)) + 0.0f * vf_sum(total);
    to->scaled_sum = to->scale * (float)to->sum;
  }
}

/* The row that the product multiplies: x itself, or what the norm or the gate makes of it in `scratch`. */
static const float *prologue(const linear_args *a, int64_t row, float *scratch) {
  const int64_t n = a->inputs;
  if (a->gate != NO_GATE) gate_run((int)a->gate, a->x + row * 2 * n, a->x + row * 2 * n + n, scratch, n);
  else if (a->norm) rms_norm_row(a->x + row * n, a->norm, scratch, n, a->eps);
  else return a->x + row * n;
  return scratch;
}

/* The norm of whole rows, and what `linear_finish` left for after it. */
static void finish_rows(const linear_args *a) {
#pragma omp for schedule(static) nowait
  for (int64_t m = 0; m < a->rows; m++) {
    float *y = a->y + m * a->outputs;
    rms_norm_row(y, a->after, y, a->outputs, a->after_eps);
    if (a->scale != 0)
      for (int64_t n = 0; n < a->outputs; n++) y[n] *= (float)a->scale;
    if (a->residual)
      for (int64_t n = 0; n < a->outputs; n++) y[n] += a->residual[m * a->outputs + n];
  }
  team_barrier();
}

/* One block of 16 outputs for `rows` rows from `row` on. `rows` and `bits` are constants where this is called. */
INLINE void grouped_tile(const linear_args *a, const rounded *x, const uint8_t *p, int64_t block, int64_t row, int rows,
                         int bits) {
  f16x acc[TALL];
  UNROLL_ROWS for (int m = 0; m < rows; m++) acc[m] = f16x_zero();
  x += first_group(a, row);
  for (int64_t g = 0; g < a->inputs / GROUP; g++, x += rows) {
    f16x dots[TALL];
    for (int l = 0; l < (bits == 4 ? BYTES4 : BYTES8); l += 64) __builtin_prefetch(p + AHEAD + l, 0, 1);
    const group w = bits == 4 ? unpack4(p) : unpack8(p);
    const f16x scale = f16x_load_f16(p + (bits == 4 ? 256 : 512));
    /* Where registers are few, the sums of some rows wait in memory: GCC would move them and the products' about. */
    if (VL == 8 && rows > 3 && rows < TALL) UNROLL_ROWS for (int m = 0; m < rows; m++) __asm__("" : "+m"(acc[m]));
    group_dots(&w, x, rows, bits, dots);
    UNROLL_ROWS for (int m = 0; m < rows; m++)
      acc[m] = f16x_fma(dots[m], f16x_fma1(scale, x[m].scale, f16x_zero()), acc[m]);
    if (bits == 4) {
      const f16x minimum = f16x_load_f16(p + 288);
      UNROLL_ROWS for (int m = 0; m < rows; m++) acc[m] = f16x_fma1(minimum, x[m].scaled_sum, acc[m]);
    }
    p += bits == 4 ? BYTES4 : BYTES8;
  }
  const int64_t first = block * BLOCK, left = a->outputs - first;
  float tile[TALL][BLOCK];
  UNROLL_ROWS for (int m = 0; m < rows; m++) f16x_store(tile[m], acc[m]);
  linear_finish(a, tile[0], BLOCK, row, rows, first, left < BLOCK ? left : BLOCK);
}

INLINE void grouped_block(const linear_args *a, const rounded *x, int64_t block, span_of_rows of, int bits) {
  const uint8_t *p = (const uint8_t *)a->weight + block * (a->inputs / GROUP) * (bits == 4 ? BYTES4 : BYTES8);
  int64_t row = of.first;
  for (; row + TALL <= of.last; row += TALL) grouped_tile(a, x, p, block, row, TALL, bits);
  switch (of.last - row) {
    case 1: grouped_tile(a, x, p, block, row, 1, bits); break;
    case 2: grouped_tile(a, x, p, block, row, 2, bits); break;
    case 3: grouped_tile(a, x, p, block, row, 3, bits); break;
    case 4: grouped_tile(a, x, p, block, row, 4, bits); break;
    case 5: grouped_tile(a, x, p, block, row, 5, bits); break;
    case 6: grouped_tile(a, x, p, block, row, 6, bits); break;
    case 7: grouped_tile(a, x, p, block, row, 7, bits); break;
    default: break;
  }
}

static void grouped_block4(const linear_args *a, const rounded *x, int64_t block, span_of_rows of) {
  grouped_block(a, x, block, of, 4);
}
static void grouped_block8(const linear_args *a, const rounded *x, int64_t block, span_of_rows of) {
  grouped_block(a, x, block, of, 8);
}

/* Inputs of which tiles share the rows, in floats or pairs of bfloat16. Tiles that share a part of the weights while
 * that is in the first cache, where rows are of no more than NARROW inputs: of longer ones the cache holds those of one
 * tile. */
enum { DEEP = 1024, SHARE = 2, NARROW = 640 };
/* More rows than these share packed weights. */
static int64_t few_rows(const linear_args *a) { return bf16_applies(a) ? HIGH : VL == 16 ? 40 : 20; }

/* How many rows of pairs lie together, 32 inputs of each beside each other, as a tile of packed weights reads them; and
 * of such rows from `row` on, how far it is to the next inputs of a row. */
static int64_t rows_beside(const linear_args *a) {
  return bf16_applies(a) && !bf16_in_tiles(a) && a->rows > few_rows(a) ? HIGH : 1;
}
static int64_t step_of(const linear_args *a, int64_t row, int64_t beside) {
  return 32 * (a->rows - row < beside ? a->rows - row : beside);
}

/* Outputs that share the rows of a tile: as many as the second cache holds packed weights of, beside the rows. */
static int64_t panel_of(const linear_args *a) { return bf16_applies(a) && a->inputs <= 4096 ? PANEL : PANEL / 2; }

static int64_t padded_inputs(int64_t k) { return (k + 15) / 16 * 16; }

/* The products of VL inputs of rows of x with the weights of output n, which `weights` loads, to the sums `acc`. Beside
 * the sums, registers have the weights of all outputs where there are 32, else the inputs of all rows. */
#if VL == 16
#define ADD_PRODUCTS(weights) { \
    vf v[OUTPUTS]; \
    UNROLL for (int n = 0; n < OUTPUTS; n++) v[n] = weights; \
    UNROLL for (int m = 0; m < rows; m++) { \
      const vf u = vf_in_register(vf_load(x + m * k + i)); \
      UNROLL for (int n = 0; n < OUTPUTS; n++) acc[m][n] = vf_fma(u, v[n], acc[m][n]); \
    } \
  }
#else
#define ADD_PRODUCTS(weights) { \
    vf u[HIGH]; \
    UNROLL for (int m = 0; m < rows; m++) u[m] = vf_in_register(vf_load(x + m * k + i)); \
    UNROLL for (int n = 0; n < OUTPUTS; n++) { \
      const vf v = vf_in_register(weights); \
      UNROLL for (int m = 0; m < rows; m++) acc[m][n] = vf_fma(u[m], v, acc[m][n]); \
    } \
  }
#endif

/* Four outputs, whose weights are the rows at[..] of w, for `rows` rows. `rows` and `kind` are constants where this is
 * called. */
INLINE void float_tile(const float *x, const void *w, const int64_t *at, int64_t k, int rows, int kind,
                       float (*sums)[PANEL]) {
  vf acc[HIGH][OUTPUTS];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < OUTPUTS; n++) acc[m][n] = vf_zero();
  int64_t i = 0;
  for (; i + VL <= k; i += VL) {
    /* Rows are short runs for the processor's own prefetch: ask for the same place of the next four. Into the second
     * cache: the first has room for few requests at a time, and waiting for them halves what a core can read. */
    UNROLL for (int n = 0; n < OUTPUTS; n++)
      __builtin_prefetch((const char *)w + (at[n] + OUTPUTS * k + i) * size_of(kind), 0, 1);
    ADD_PRODUCTS(load(kind, w, at[n] + i))
  }
  if (i < k) {
    const int part = (int)(k - i);
    UNROLL for (int m = 0; m < rows; m++) {
      const vf u = load_part(F32, x + m * k, i, part);
      UNROLL for (int n = 0; n < OUTPUTS; n++) acc[m][n] = vf_fma(u, load_part(kind, w, at[n] + i, part), acc[m][n]);
    }
  }
  UNROLL for (int m = 0; m < rows; m++) vf_sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], sums[m]);
}

/* The same for inputs begin..end of outputs that lie in `w` as `pack_outputs` put them. */
INLINE void packed_tile(const float *x, const float *w, int64_t k, int64_t begin, int64_t end, int rows,
                        open_sums before, float (*sums)[PANEL]) {
  open_sums acc;
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < OUTPUTS; n++) acc[m][n] = begin ? before[m][n] : vf_zero();
  int64_t i = begin;
  w += begin * OUTPUTS;
  for (; i + VL <= end; i += VL, w += OUTPUTS * VL) {
    ADD_PRODUCTS(vf_load(w + n * VL))
  }
  if (i < end)
    UNROLL for (int m = 0; m < rows; m++) {
      const vf u = load_part(F32, x + m * k, i, (int)(end - i));
      UNROLL for (int n = 0; n < OUTPUTS; n++) acc[m][n] = vf_fma(u, vf_load(w + n * VL), acc[m][n]);
    }
  if (end < k)
    UNROLL for (int m = 0; m < rows; m++)
      UNROLL for (int n = 0; n < OUTPUTS; n++) before[m][n] = acc[m][n];
  else
    UNROLL for (int m = 0; m < rows; m++) vf_sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], sums[m]);
}

#if VL == 16
#define EACH_HEIGHT CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
#else
#define EACH_HEIGHT CASE(1) CASE(2) CASE(3)
#endif
typedef void float_tile_of(const float *x, const void *w, const int64_t *at, int64_t k, int64_t rows,
    float (*sums)[PANEL]);
#define FLOAT_TILE(name) \
  static void name(const float *x, const void *w, const int64_t *at, int64_t k, int64_t rows, float (*sums)[PANEL]) { \
    switch (rows) { EACH_HEIGHT default: break; } \
  }
#define CASE(high) case high: float_tile(x, w, at, k, high, F32, sums); break;
FLOAT_TILE(float_tile_f32)
#undef CASE
#define CASE(high) case high: float_tile(x, w, at, k, high, BF16, sums); break;
FLOAT_TILE(float_tile_bf16)
#undef CASE
#define CASE(high) case high: float_tile(x, w, at, k, high, F16, sums); break;
FLOAT_TILE(float_tile_f16)
#undef CASE
static void packed_tiles(const float *x, const float *w, int64_t k, int64_t begin, int64_t end, int64_t rows,
                         open_sums before, float (*sums)[PANEL]) {
#define CASE(high) case high: packed_tile(x, w, k, begin, end, high, before, sums); break;
  switch (rows) { EACH_HEIGHT default: break; }
#undef CASE
}

/* Rows that share the numbers of a 12-bit weight while they are taken apart. */
enum { HIGH12 = HIGH < 4 ? HIGH : 4 };

/* The outputs of a 12-bit weight that lie together from `first` on, for `rows` rows, a constant where this is called,
 * as they are stored. */
INLINE void bfloat12_tile(const bfloat12 *w, const float *x, int64_t k, int64_t first, int rows, float (*sums)[PANEL]) {
  const uint8_t *p = span_of(w, first, k, 0);
  vf acc[HIGH12][BESIDE];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < BESIDE; n++) acc[m][n] = vf_zero();
  for (int64_t i = 0; i < k; i += SPAN, p += SPAN_BYTES) {
    UNROLL for (int l = 0; l < SPAN_BYTES; l += 64) __builtin_prefetch(p + AHEAD + l, 0, 1);
    UNROLL for (int n = 0; n < BESIDE; n++) {
      vf numbers[SPAN / VL];
      vf_load_bfloat12(p + lows_at(n), p + codes_at(n), w->table, numbers);
      UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int j = 0; j < SPAN / VL; j++)
          acc[m][n] = vf_fma(vf_load(x + m * k + i + j * VL), numbers[j], acc[m][n]);
    }
  }
  UNROLL for (int m = 0; m < rows; m++) vf_sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], sums[m]);
}

static void bfloat12_tiles(const bfloat12 *w, const float *x, int64_t k, int64_t first, int64_t rows,
    float (*sums)[PANEL]) {
  switch (rows) {
    case 1: bfloat12_tile(w, x, k, first, 1, sums); break;
    case 2: bfloat12_tile(w, x, k, first, 2, sums); break;
    case 3: bfloat12_tile(w, x, k, first, 3, sums); break;
    default: bfloat12_tile(w, x, k, first, HIGH12, sums); break;
  }
}

/* Outputs first..first + count as float32, each OUTPUTS of them beside each other by VL inputs, zeros behind the
 * last ones; without the rare numbers of a 12-bit weight. The last output again where there are fewer. */
static void pack_outputs(const linear_args *a, const bfloat12 *w, int64_t first, int64_t count, float *to) {
  const int64_t k = a->inputs, padded = padded_inputs(k), last = a->outputs - 1;
  for (int64_t n = 0; n < (count + OUTPUTS - 1) / OUTPUTS * OUTPUTS; n++) {
    const int64_t output = first + n < last ? first + n : last, at = output * k;
    float *own = to + n / OUTPUTS * OUTPUTS * padded + n % OUTPUTS * VL;
    int64_t i = 0;
    if (a->kind != BFLOAT12) {
      for (; i + VL <= k; i += VL) vf_store(own + i * OUTPUTS, load((int)a->kind, a->weight, at + i));
      if (i < k) vf_store(own + i * OUTPUTS, load_part((int)a->kind, a->weight, at + i, (int)(k - i)));
      continue;
    }
    const uint8_t *p = span_of(w, output, k, 0);
    for (; i < k; i += SPAN, p += SPAN_BYTES) {
      vf numbers[SPAN / VL];
      vf_load_bfloat12(p + lows_at(output % BESIDE), p + codes_at(output % BESIDE), w->table, numbers);
      UNROLL for (int j = 0; j < SPAN / VL; j++) vf_store(own + (i + j * VL) * OUTPUTS, numbers[j]);
    }
  }
}

/* What the rare numbers of a 12-bit weight add to the sums. */
static void add_rares(const linear_args *a, const bfloat12 *w, const void *x, float (*sums)[PANEL], int64_t row,
                      int64_t rows, int64_t first, int64_t count) {
  if (w->first[first] == w->first[first + count]) return;
  const int64_t k = a->inputs;
  const int pairs = bf16_applies(a);
  const int64_t high = rows_beside(a);
  for (int32_t r = w->first[first]; r < w->first[first + count]; r++) {
    const int64_t n = w->rares[r].output - first, column = w->rares[r].column;
    const float value = w->rares[r].value;
    if (!pairs) {
      const float *own = (const float *)x + row * k + column;
      for (int64_t m = 0; m < rows; m++) sums[m][n] += value * own[m * k];
      continue;
    }
    const int64_t place = bf16_place_in_row(column);
    for (int64_t m = 0; m < rows; m += high) {
      const uint16_t *own = (const uint16_t *)x + (row + m) * k + place / 32 * step_of(a, row + m, high) + place % 32;
      for (int64_t j = m; j < rows && j < m + high; j++, own += 32) sums[j][n] += value * bf16_to_float(*own);
    }
  }
}

/* The end of a product, from sums without those of rare numbers. */
static void finish_panel(const linear_args *a, const bfloat12 *w, const void *x, float (*sums)[PANEL], int64_t row,
                         int64_t rows, int64_t first, int64_t count) {
  const int64_t half = a->outputs / 2;
  if (a->kind == BFLOAT12) add_rares(a, w, x, sums, row, rows, first, count);
  if (!a->glu) {
    linear_finish(a, sums[0], PANEL, row, rows, first, count);
    return;
  }
  if (a->kind == BFLOAT12) add_rares(a, w, x, (float(*)[PANEL])(sums[0] + count), row, rows, half + first, count);
  for (int64_t m = 0; m < rows; m++)
    gate_run((int)a->glu, sums[m], sums[m] + count, a->y + (row + m) * half + first, count);
}

/* Up to PANEL outputs from `first` on, of weights as they are stored. */
static void stored_panel(const linear_args *a, const bfloat12 *w, const void *x, int64_t first, int64_t count,
                         span_of_rows of) {
  static float_tile_of *const tiles[] = {float_tile_f32, float_tile_bf16, float_tile_f16};
  const int64_t k = a->inputs, last = a->outputs - 1, pairs = bf16_applies(a);
  const int64_t high = a->kind == BFLOAT12 && !pairs ? HIGH12 : HIGH;
  int64_t at[PANEL];
  for (int64_t n = 0; n < PANEL; n++) at[n] = (first + n < last ? first + n : last) * k;
  for (int64_t row = of.first, rows; row < of.last; row += rows) {
    float sums[HIGH][PANEL];
    rows = of.last - row < high ? of.last - row : high;
    for (int64_t n = 0, made; n < count; n += made) {
      float(*own)[PANEL] = (float(*)[PANEL])(sums[0] + n);
      made = OUTPUTS;
      if (pairs) made = bf16_tile(a, w, (const uint16_t *)x + row * k, first + n, count - n, rows, own);
      else if (a->kind == BFLOAT12) bfloat12_tiles(w, (const float *)x + row * k, k, first + n, rows, own);
      else tiles[a->kind]((const float *)x + row * k, a->weight, at + n, k, rows, own);
    }
    finish_panel(a, w, x, sums, row, rows, first, count);
  }
}

/* Ask for `lines` lines of memory from `at` on, into the second cache; returns what follows them. */
INLINE const char *ask_lines(const char *at, int64_t lines) {
  for (; lines > 0; lines--, at += 64) __builtin_prefetch(at, 0, 1);
  return at;
}

/* The same for many rows, packed into `scratch` first; of halves that are multiplied with each other, up to half as
 * many outputs of each. Some tiles of rows share a part of four outputs while it is in the first cache, and each finds
 * its own rows there for all outputs of the panel. Meanwhile it asks for the weights of the next panel, a few lines at
 * each tile: packing them would wait for the memory. */
static void packed_panel(const linear_args *a, const bfloat12 *w, const void *x, int64_t first, int64_t count,
                         span_of_rows of, float *scratch) {
  const int pairs = bf16_applies(a);
  const int64_t k = pairs ? a->inputs / 2 : a->inputs, padded = padded_inputs(k), parts = (k + DEEP - 1) / DEEP;
  const int64_t deep = padded_inputs((k + parts - 1) / parts), next = first + count;
  const int64_t halves = a->glu ? 2 : 1, half = a->outputs / 2, all = halves * count;
  const int64_t high = k > NARROW ? HIGH : SHARE * HIGH;
  const int64_t row_bytes = a->kind == BFLOAT12 ? SPAN_BYTES / BESIDE * (a->inputs / SPAN)
                                                : a->inputs * size_of((int)a->kind);
  const char *ahead[2];
  for (int64_t h = 0; h < halves; h++) {
    const int64_t own = h * half + next;
    ahead[h] = (const char *)a->weight + own * row_bytes;
    if (a->kind == BFLOAT12) ahead[h] = (const char *)span_of(w, own, a->inputs, 0);
    if (pairs) bf16_pack(a, w, h * half + first, count, (uint16_t *)scratch + h * count * a->inputs);
    else pack_outputs(a, w, first, count, scratch);
  }
  const int64_t tiles = (of.last - of.first + HIGH - 1) / HIGH * parts * ((count + OUTPUTS - 1) / OUTPUTS);
  const int64_t lines = (count * row_bytes / 64 + tiles - 1) / tiles;
  for (int64_t row = of.first, rows; row < of.last; row += rows) {
    float sums[SHARE * HIGH][PANEL];
    open_sums before[SHARE][PANEL / OUTPUTS];
    rows = of.last - row < high ? of.last - row : high;
    for (int64_t begin = 0; begin < k; begin += deep)
      for (int64_t n = 0; n < all; n += OUTPUTS)
        for (int64_t m = 0; m < rows; m += HIGH) {
          const int later = n >= count;
          ahead[later] = ask_lines(ahead[later], lines);
          (pairs ? bf16_packed_tile : packed_tiles)(
            (const float *)x + (row + m) * k, scratch + n * padded, k, begin, begin + deep < k ? begin + deep : k,
            rows - m < HIGH ? rows - m : HIGH, before[m / HIGH][n / OUTPUTS], (float(*)[PANEL])(sums[m] + n));
        }
    finish_panel(a, w, x, sums, row, rows, first, count);
  }
}

/* The most threads that share a parallel region, each of which makes rows in memory of its own. */
static int64_t most_threads(const linear_args *a) { return a->threads > 1 ? a->threads : 1; }

/* Bytes of a row as it is multiplied, of those that are made first; of all rows. */
static size_t row_bytes(const linear_args *a) {
  const size_t k = (size_t)a->inputs;
  return grouped(a) ? k / GROUP * sizeof(rounded) : k * (bf16_applies(a) ? sizeof(uint16_t) : sizeof(float));
}
static size_t rows_bytes(const linear_args *a) {
  const size_t bytes = (size_t)a->rows * row_bytes(a) + (bf16_in_tiles(a) ? BF16_BEHIND : 0);
  return amx_applies(a) ? amx_rows_bytes(a) : (bytes + 63) / 64 * 64;
}

/* Whether the rows that it multiplies are made first, and by blocks of how many outputs it goes. */
static int prepares(const linear_args *a) { return grouped(a) || bf16_applies(a) || a->gate != NO_GATE || a->norm; }
static int64_t block_of(const linear_args *a) { return grouped(a) || bf16_in_tiles(a) ? BLOCK : OUTPUTS; }
static int64_t first_block(const linear_args *a) { return a->begin / block_of(a); }
static int64_t blocks_of(const linear_args *a) {
  const int64_t end = a->end ? a->end : a->glu ? a->outputs / 2 : a->outputs;
  return (end + block_of(a) - 1) / block_of(a) - first_block(a);
}

int linear_gates(const linear_args *a) {
  return rows_beside(a) > 1 && a->outputs % (2 * OUTPUTS) == 0 && !a->bias && !a->factors;
}

/* Floats that a thread has for itself: a row before it is rounded, or a panel of weights. */
static int64_t scratch_of(const linear_args *a) {
  if (bf16_in_tiles(a)) return padded_inputs(a->inputs) * LINEAR_SCRATCH + LINEAR_ROOM;
  const int64_t panel = bf16_applies(a) ? panel_of(a) / 2 : panel_of(a); /* of packed weights */
  const int64_t each = grouped(a) || a->rows <= few_rows(a) ? 1 : panel;
  return padded_inputs(a->inputs) * (amx_applies(a) ? AMX_SCRATCH : each);
}

size_t linear_memory(const linear_args *a) {
  return rows_bytes(a) + (size_t)(most_threads(a) * scratch_of(a)) * sizeof(float);
}

static void prepare(const linear_args *a, int64_t row, char *memory, float *scratch) {
  const int64_t k = a->inputs;
  if (grouped(a)) {
    const float *x = prologue(a, row, scratch);
    if (amx_applies(a)) {
      rounded *own = (rounded *)(scratch + k);
      round_row(x, own, 1, k / GROUP);
      amx_lay_row(a, own, row, memory);
    } else {
      round_row(x, (rounded *)memory + first_group(a, row), tile_rows(a, row), k / GROUP);
    }
  } else if (bf16_applies(a)) {
    const int64_t beside = rows_beside(a), first = row / beside * beside;
    uint16_t *own = (uint16_t *)memory + first * k + (row - first) * 32;
    bf16_round(a, prologue(a, row, scratch), own, step_of(a, first, beside));
  } else {
    prologue(a, row, (float *)memory + row * k);
  }
}

static void prepare_rows(const linear_args *a, int64_t begin, int64_t end, char *memory, float *scratch) {
  const int64_t k = a->inputs;
  if (!bf16_in_tiles(a)) {
    for (int64_t m = begin; m < end; m++) prepare(a, m, memory, scratch);
    return;
  }
  uint16_t *const made = (uint16_t *)(scratch + k);
  for (int64_t row = begin, next; row < end; row = next) { /* as many as go into one tile */
    next = row / BLOCK * BLOCK + BLOCK < end ? row / BLOCK * BLOCK + BLOCK : end;
    for (int64_t m = row; m < next; m++) bf16_round(a, prologue(a, m, scratch), made + (m - row) * k, 32);
    bf16_lay_rows(a, made, row, next - row, (uint16_t *)memory);
  }
}

/* Rows that are multiplied with one block after another, a multiple of every tile. Those of quantized weights stay in
 * the second cache meanwhile; others may come from the third, since a tile of them reads them for more outputs. They
 * are at least enough to pay for packing weights. */
static int64_t rows_together(const linear_args *a) {
  if (bf16_in_tiles(a)) return BF16_TILES * BLOCK;
  const int64_t fit = (int64_t)((grouped(a) ? 512 << 10 : 8 << 20) / row_bytes(a)) / 48 * 48;
  const int64_t least = grouped(a) || bf16_applies(a) ? 48 : a->inputs <= 4096 ? 192 : 384;
  return fit < least ? least : fit;
}

static void multiply(const linear_args *a, int64_t begin, int64_t end, const char *memory, float *scratch) {
  const bfloat12 w = bfloat12_at(a->weight, a->outputs, a->inputs); /* where it is one */
  const void *x = prepares(a) ? (const void *)memory : a->x;
  const int bytes = amx_applies(a), pairs_in_tiles = bf16_in_tiles(a);
  const int64_t step = rows_together(a), beside = rows_beside(a), panel = panel_of(a) / (a->glu ? 2 : 1);
  if (bytes || pairs_in_tiles) begin_tiles(bytes ? GROUP : 2 * GROUP);
  for (int64_t row = 0; row < a->rows; row += step) {
    const span_of_rows of = {row, row + step < a->rows ? row + step : a->rows};
    if (!grouped(a) && !pairs_in_tiles) {
      const int64_t last = OUTPUTS * end < a->outputs ? OUTPUTS * end : a->outputs;
      for (int64_t n = OUTPUTS * begin; n < last; n += panel) {
        const int64_t count = last - n < panel ? last - n : panel;
        if (beside > 1 || of.last - of.first > few_rows(a)) packed_panel(a, &w, x, n, count, of, scratch);
        else stored_panel(a, &w, x, n, count, of);
      }
      continue;
    }
    if (bytes || pairs_in_tiles) {
      if (bytes) amx_blocks(a, memory, begin, end, of, scratch);
      else bf16_blocks(a, (const uint16_t *)memory, begin, end, of, scratch);
      continue;
    }
    for (int64_t b = begin; b < end; b++) {
      if (a->kind == INT4) grouped_block4(a, (const rounded *)memory, b, of);
      else grouped_block8(a, (const rounded *)memory, b, of);
    }
  }
  if (bytes || pairs_in_tiles) end_tiles();
}

/* What of `total` units, of which `before` come before these `count`, this thread takes of these: as in a static loop,
 * so that a row alone is the first thread's, which has most of what it is made of. */
typedef struct {
  int64_t begin, end;
} part;
static part part_of(int64_t total, int64_t before, int64_t count) {
  const int64_t id = omp_get_thread_num(), threads = omp_get_num_threads();
  const int64_t each = total / threads, more = total % threads;
  const int64_t begin = id * each + (id < more ? id : more) - before, end = begin + each + (id < more);
  const part p = {begin > 0 ? begin : 0, end < count ? end : count};
  return p;
}

void linear_run_all(const linear_args *each, int64_t count, void *memory) {
  int64_t rows = 0, blocks = 0, before = 0;
  for (int64_t i = 0; i < count; i++) {
    if (prepares(each + i)) rows += each[i].rows;
    blocks += blocks_of(each + i);
  }
  /* The threads' own memory comes first: they need that of one product at a time. */
  int64_t own = 0;
  for (int64_t i = 0; i < count; i++) own = own > scratch_of(each + i) ? own : scratch_of(each + i);
  float *const scratch = (float *)memory + omp_get_thread_num() * own;
  char *const first = (char *)((float *)memory + most_threads(each) * own), *at = first;
  if (rows) {
    for (int64_t i = 0; i < count; at += rows_bytes(each + i++)) {
      if (!prepares(each + i)) continue;
      const part p = part_of(rows, before, each[i].rows);
      prepare_rows(each + i, p.begin, p.end, at, scratch);
      before += each[i].rows;
    }
    team_barrier();
  }
  at = first, before = 0;
  for (int64_t i = 0; i < count; at += rows_bytes(each + i++)) {
    const int64_t blocks_own = blocks_of(each + i), from = first_block(each + i);
    const part p = part_of(blocks, before, blocks_own);
    if (p.begin < p.end) multiply(each + i, from + p.begin, from + p.end, at, scratch);
    before += blocks_own;
  }
  team_barrier();
  for (int64_t i = 0; i < count; i++)
    if (each[i].after) finish_rows(each + i);
}

void linear_run(const linear_args *a, void *memory) { linear_run_all(a, 1, memory); }

/* 0, or -1 where there was no memory. */
int64_t lmstate_linear(const linear_args *a) {
  if (a->rows == 0 || a->outputs == 0) return 0;
  void *memory = aligned_alloc(64, (linear_memory(a) + 63) / 64 * 64);
  if (!memory) return -1;
  team together = {0};
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    team_begin(&together);
    linear_run(a, memory);
    team_end();
  }
  free(memory);
  return 0;
}

EXPORT_SIZE(linear_args);
