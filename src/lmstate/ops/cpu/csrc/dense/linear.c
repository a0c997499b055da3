/* y = residual + scale * norm(prologue(x) w^T + bias), for up to some tens of rows.
 *
 * A thread takes whole outputs, reads their weights once and multiplies them with every row, a tile of rows at a time.
 * An output of a row is summed along the inputs in one order, whatever the tile, the rows beside it and the threads. */
#include "dense/linear.h"

#include <omp.h>
#include <stdlib.h>

#include "dense/dequantize.h"
#include "dense/prologue.h"
#include "dense/bfloat12.h"
#include "layout.h"

enum { GROUP = 32, BYTES4 = 320, BYTES8 = 544 };

/* A group of 32 activations rounded to int8: x = scale * q, a scale for each part of them. [groups][rows], so that a
 * tile of rows is contiguous. */
enum { PARTS = GROUP / PART };
typedef struct {
  int8_t q[GROUP];
  float scale[PARTS];
  float scaled_sum; /* of scale * q over the group: what the weights' minimum multiplies */
  int32_t sum[PARTS];
} rounded;

static int grouped(const linear_args *a) { return a->kind == INT4 || a->kind == INT8; }

static void round_row(const float *x, rounded *to, int64_t rows, int64_t groups) {
  for (int64_t g = 0; g < groups; g++, to += rows) {
    to->scaled_sum = 0;
    for (int part = 0; part < PARTS; part++, x += PART) {
      int8_t *q = to->q + part * PART;
      vf largest = vf_zero(), total = vf_zero();
      for (int i = 0; i < PART; i += VL) {
        vf v = vf_load(x + i);
        largest = vf_max(largest, vf_abs(v));
        total = vf_add(total, v);
      }
      float m = vf_largest(largest);
      vf inverse = vf_set1(m > 0 ? 127.0f / m : 0.0f);
      for (int i = 0; i < PART; i += VL) vf_round_to_int8(q + i, vf_mul(vf_load(x + i), inverse));
      int32_t sum = 0;
      for (int i = 0; i < PART; i++) sum += q[i];
      to->sum[part] = sum;
      to->scale[part] = m / 127.0f + 0.0f * vf_sum(total); /* a NaN or an infinity must not vanish in the rounding */
      to->scaled_sum += to->scale[part] * (float)sum;
    }
  }
}

/* The products of a group: for each output, the sum over the parts of their scale times their integers' products. */
INLINE f16x scaled_dot(const group *w, const rounded *x, int bits) {
  f16x dot = lanes_zero();
  UNROLL for (int part = 0; part < PARTS; part++) {
    const int32_t initial = bits == 4 ? 0 : -128 * x->sum[part];
    dot = lanes_fma1(part_dot(w, part, x->q + part * PART, initial, bits), x->scale[part], dot);
  }
  return dot;
}

/* The row that the product multiplies: x itself, or what the norm or the gate makes of it in `scratch`. */
static const float *prologue(const linear_args *a, int64_t row, float *scratch) {
  const int64_t n = a->inputs;
  if (a->gate != NO_GATE) gate_run((int)a->gate, a->x + row * 2 * n, a->x + row * 2 * n + n, scratch, n);
  else if (a->norm) rms_norm_row(a->x + row * n, a->norm, scratch, n, a->eps);
  else return a->x + row * n;
  return scratch;
}

/* The outputs first..first + count of `rows` rows from `row` on, of which `tile` has `width` each. Not inlined: a copy in
 * every tile below is most of what this file takes to compile. */
static __attribute__((noinline)) void finish(const linear_args *a, const float *tile, int64_t width, int64_t row, int rows,
                                             int64_t first, int64_t count) {
  for (int64_t m = row; m < row + rows; m++, tile += width) {
    float *y = a->y + m * a->outputs + first;
    for (int64_t n = 0; n < count; n++) {
      float v = tile[n];
      if (a->bias) v += a->bias[first + n];
      if (a->factors) v *= a->factors[first + n];
      if (!a->after) {
        if (a->scale != 0) v *= (float)a->scale;
        if (a->residual) v += a->residual[m * a->outputs + first + n];
      }
      y[n] = v;
    }
  }
}

/* The norm of whole rows, and what `finish` left for after it. */
static void finish_rows(const linear_args *a) {
#pragma omp for schedule(static)
  for (int64_t m = 0; m < a->rows; m++) {
    float *y = a->y + m * a->outputs;
    rms_norm_row(y, a->after, y, a->outputs, a->after_eps);
    if (a->scale != 0)
      for (int64_t n = 0; n < a->outputs; n++) y[n] *= (float)a->scale;
    if (a->residual)
      for (int64_t n = 0; n < a->outputs; n++) y[n] += a->residual[m * a->outputs + n];
  }
}

/* One block of 16 outputs for `rows` rows from `row` on. `rows` and `bits` are constants where this is called. */
INLINE void grouped_tile(const linear_args *a, const rounded *x, const uint8_t *p, int64_t block, int64_t row, int rows,
                         int bits) {
  f16x acc[8];
  UNROLL_ROWS for (int m = 0; m < rows; m++) acc[m] = lanes_zero();
  x += row;
  for (int64_t g = 0; g < a->inputs / GROUP; g++, x += a->rows) {
    if (rows > 3)
      for (int l = 0; l < (bits == 4 ? BYTES4 : BYTES8); l += 64) __builtin_prefetch(p + AHEAD + l, 0, 1);
    if (bits == 4) {
      const group w = unpack4(p);
      const f16x scale = lanes_load_f16(p + 256), minimum = lanes_load_f16(p + 288);
      UNROLL_ROWS for (int m = 0; m < rows; m++) {
        acc[m] = lanes_fma(scaled_dot(&w, x + m, 4), scale, acc[m]);
        acc[m] = lanes_fma1(minimum, x[m].scaled_sum, acc[m]);
      }
      p += BYTES4;
    } else {
      const group w = unpack8(p);
      const f16x scale = lanes_load_f16(p + 512);
      UNROLL_ROWS for (int m = 0; m < rows; m++) acc[m] = lanes_fma(scaled_dot(&w, x + m, 8), scale, acc[m]);
      p += BYTES8;
    }
  }
  const int64_t first = block * BLOCK, left = a->outputs - first;
  float tile[8][BLOCK];
  UNROLL_ROWS for (int m = 0; m < rows; m++) lanes_store(tile[m], acc[m]);
  finish(a, tile[0], BLOCK, row, rows, first, left < BLOCK ? left : BLOCK);
}

INLINE void grouped_block(const linear_args *a, const rounded *x, int64_t block, int bits) {
  const uint8_t *p = (const uint8_t *)a->weight + block * (a->inputs / GROUP) * (bits == 4 ? BYTES4 : BYTES8);
  int64_t row = 0;
  for (; row + 8 <= a->rows; row += 8) grouped_tile(a, x, p, block, row, 8, bits);
  switch (a->rows - row) {
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

static void grouped_block4(const linear_args *a, const rounded *x, int64_t block) { grouped_block(a, x, block, 4); }
static void grouped_block8(const linear_args *a, const rounded *x, int64_t block) { grouped_block(a, x, block, 8); }

/* Four outputs from `first` on, for `rows` rows. The last outputs again where fewer than four are left. */
INLINE void float_tile(const linear_args *a, const float *x, int64_t first, int64_t row, int rows, int kind) {
  const int64_t k = a->inputs, last = a->outputs - 1;
  int64_t at[4];
  UNROLL for (int n = 0; n < 4; n++) at[n] = (first + n < last ? first + n : last) * k;
  vf acc[4][4];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < 4; n++) acc[m][n] = vf_zero();
  const float *xr = x + row * k;
  int64_t i = 0;
  for (; i + VL <= k; i += VL) {
    vf w[4];
    UNROLL for (int n = 0; n < 4; n++) w[n] = load(kind, a->weight, at[n] + i);
    /* Rows are short runs for the processor's own prefetch: ask for the same place of the next four. Into the second
     * cache: the first has room for few requests at a time, and waiting for them halves what a core can read. */
    UNROLL for (int n = 0; n < 4; n++)
      __builtin_prefetch((const char *)a->weight + (at[n] + 4 * k + i) * (kind == F32 ? 4 : 2), 0, 1);
    UNROLL for (int m = 0; m < rows; m++) {
      vf v = vf_load(xr + m * k + i);
      UNROLL for (int n = 0; n < 4; n++) acc[m][n] = vf_fma(v, w[n], acc[m][n]);
    }
  }
  if (i < k) {
    const int part = (int)(k - i);
    UNROLL for (int m = 0; m < rows; m++) {
      vf v = load_part(F32, xr + m * k, i, part);
      UNROLL for (int n = 0; n < 4; n++) acc[m][n] = vf_fma(v, load_part(kind, a->weight, at[n] + i, part), acc[m][n]);
    }
  }
  const int64_t left = a->outputs - first;
  float tile[4][4];
  UNROLL for (int m = 0; m < rows; m++) vf_sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], tile[m]);
  finish(a, tile[0], 4, row, rows, first, left < 4 ? left : 4);
}

INLINE void float_block(const linear_args *a, const float *x, int64_t first, int kind) {
  int64_t row = 0;
  for (; row + 4 <= a->rows; row += 4) float_tile(a, x, first, row, 4, kind);
  switch (a->rows - row) {
    case 1: float_tile(a, x, first, row, 1, kind); break;
    case 2: float_tile(a, x, first, row, 2, kind); break;
    case 3: float_tile(a, x, first, row, 3, kind); break;
    default: break;
  }
}

static void float_block_f32(const linear_args *a, const float *x, int64_t first) { float_block(a, x, first, F32); }
static void float_block_bf16(const linear_args *a, const float *x, int64_t first) { float_block(a, x, first, BF16); }
static void float_block_f16(const linear_args *a, const float *x, int64_t first) { float_block(a, x, first, F16); }

/* The outputs that lie together from `first` on, for `rows` rows. */
INLINE void bfloat12_tile(const linear_args *a, const bfloat12 *w, const float *x, int64_t first, int64_t row, int rows) {
  const int64_t k = a->inputs, left = a->outputs - first;
  const uint8_t *p = span_of(w, first, k, 0);
  const float *xr = x + row * k;
  vf acc[4][BESIDE];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < BESIDE; n++) acc[m][n] = vf_zero();
  for (int64_t i = 0; i < k; i += SPAN, p += SPAN_BYTES) {
    UNROLL for (int l = 0; l < SPAN_BYTES; l += 64) __builtin_prefetch(p + AHEAD + l, 0, 1);
    UNROLL for (int n = 0; n < BESIDE; n++) {
      vf numbers[SPAN / VL];
      vf_load_bfloat12(p + lows_at(n), p + codes_at(n), w->table, numbers);
      UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int j = 0; j < SPAN / VL; j++)
          acc[m][n] = vf_fma(vf_load(xr + m * k + i + j * VL), numbers[j], acc[m][n]);
    }
  }
  float tile[4][BESIDE];
  UNROLL for (int m = 0; m < rows; m++) vf_sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], tile[m]);
  for (int m = 0; m < rows; m++)
    for (int64_t n = 0; n < BESIDE && n < left; n++)
      for (int32_t r = w->first[first + n]; r < w->first[first + n + 1]; r++)
        tile[m][n] += w->rares[r].value * xr[m * k + w->rares[r].column];
  finish(a, tile[0], BESIDE, row, rows, first, left < BESIDE ? left : BESIDE);
}

static void bfloat12_block(const linear_args *a, const bfloat12 *w, const float *x, int64_t first) {
  int64_t row = 0;
  for (; row + 4 <= a->rows; row += 4) bfloat12_tile(a, w, x, first, row, 4);
  switch (a->rows - row) {
    case 1: bfloat12_tile(a, w, x, first, row, 1); break;
    case 2: bfloat12_tile(a, w, x, first, row, 2); break;
    case 3: bfloat12_tile(a, w, x, first, row, 3); break;
    default: break;
  }
}

/* The most threads that share a parallel region, each of which makes rows in memory of its own. */
static int64_t most_threads(const linear_args *a) { return a->threads > 1 ? a->threads : 1; }

size_t linear_memory(const linear_args *a) {
  const size_t k = (size_t)a->inputs;
  if (!grouped(a)) return (size_t)a->rows * k * sizeof(float);
  return (size_t)a->rows * (k / GROUP) * sizeof(rounded) + (size_t)most_threads(a) * k * sizeof(float);
}

/* Whether the rows that it multiplies are made first, and by blocks of how many outputs it goes. */
static int prepares(const linear_args *a) { return grouped(a) || a->gate != NO_GATE || a->norm; }
static int64_t block_of(const linear_args *a) { return grouped(a) ? BLOCK : 4; }
static int64_t blocks_of(const linear_args *a) { return (a->outputs + block_of(a) - 1) / block_of(a); }

static void prepare(const linear_args *a, int64_t row, char *memory) {
  const int64_t k = a->inputs, groups = k / GROUP;
  if (!grouped(a)) {
    prologue(a, row, (float *)memory + row * k);
    return;
  }
  rounded *x = (rounded *)memory;
  float *scratch = (float *)(x + a->rows * groups) + omp_get_thread_num() * k;
  round_row(prologue(a, row, scratch), x + row, a->rows, groups);
}

static void multiply(const linear_args *a, int64_t begin, int64_t end, const char *memory) {
  if (grouped(a)) {
    const rounded *x = (const rounded *)memory;
    if (a->kind == INT4)
      for (int64_t b = begin; b < end; b++) grouped_block4(a, x, b);
    else
      for (int64_t b = begin; b < end; b++) grouped_block8(a, x, b);
    return;
  }
  const float *x = prepares(a) ? (const float *)memory : a->x;
  const bfloat12 w = bfloat12_at(a->weight, a->outputs, a->inputs); /* where it is one */
  for (int64_t b = begin; b < end; b++) {
    if (a->kind == BFLOAT12) bfloat12_block(a, &w, x, 4 * b);
    else if (a->kind == F32) float_block_f32(a, x, 4 * b);
    else if (a->kind == BF16) float_block_bf16(a, x, 4 * b);
    else float_block_f16(a, x, 4 * b);
  }
}

/* What of `total` units, of which `before` come before these `count`, this thread takes of these: as in a static loop, so
 * that a row alone is the first thread's, which has most of what it is made of. */
typedef struct {
  int64_t begin, end;
} part;
static part part_of(int64_t total, int64_t before, int64_t count) {
  const int64_t id = omp_get_thread_num(), threads = omp_get_num_threads(), each = total / threads, more = total % threads;
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
  char *at = memory;
  if (rows) {
    for (int64_t i = 0; i < count; at += linear_memory(each + i++)) {
      if (!prepares(each + i)) continue;
      const part p = part_of(rows, before, each[i].rows);
      for (int64_t m = p.begin; m < p.end; m++) prepare(each + i, m, at);
      before += each[i].rows;
    }
#pragma omp barrier
  }
  at = memory, before = 0;
  for (int64_t i = 0; i < count; at += linear_memory(each + i++)) {
    const int64_t own = blocks_of(each + i);
    const part p = part_of(blocks, before, own);
    if (p.begin < p.end) multiply(each + i, p.begin, p.end, at);
    before += own;
  }
#pragma omp barrier
  for (int64_t i = 0; i < count; i++)
    if (each[i].after) finish_rows(each + i);
}

void linear_run(const linear_args *a, void *memory) { linear_run_all(a, 1, memory); }

/* 0, or -1 where there was no memory. */
int64_t lmstate_linear(const linear_args *a) {
  if (a->rows == 0 || a->outputs == 0) return 0;
  void *memory = malloc(linear_memory(a));
  if (!memory) return -1;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  linear_run(a, memory);
  free(memory);
  return 0;
}

EXPORT_SIZE(linear_args);
