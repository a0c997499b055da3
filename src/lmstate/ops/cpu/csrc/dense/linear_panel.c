/* Products with weights of floats, by panels of outputs: float32, float16, and bfloat16 in 16 bits or 12, as they are
 * stored for few rows, and packed for many. */
#include "dense/linear_tile.h"
#include "dense/prologue.h"

/* Inputs of which tiles share the rows, in floats or pairs of bfloat16. Tiles that share a part of the weights while
 * that is in the first cache, where rows are of no more than NARROW inputs: of longer ones the cache holds those of one
 * tile. */
enum { DEEP = 1024, SHARE = 2, NARROW = 640 };

int64_t few_rows(const linear_args *a) { return bf16_applies(a) ? 2 * HIGH : VL == 16 ? 40 : 20; }

int64_t rows_interleaved(const linear_args *a) {
  return bf16_applies(a) && !bf16_in_tiles(a) && a->rows > few_rows(a) ? HIGH : 1;
}

int64_t step_of(const linear_args *a, int64_t row, int64_t beside) {
  return 32 * (a->rows - row < beside ? a->rows - row : beside);
}

int64_t panel_of(const linear_args *a) { return bf16_applies(a) && a->inputs <= 4096 ? PANEL : PANEL / 2; }

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

/* The same for inputs begin..end of outputs that are in `w` as `pack_outputs` put them. */
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

/* The outputs of a 12-bit weight that are stored together from `first` on, for `rows` rows, a constant where this is
 * called, as they are stored. */
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

/* What a rare number adds to the sums of its output, of `rows` rows from `own` on, `each` numbers apart. */
INLINE void add_rare(const uint16_t *own, float value, int64_t rows, int64_t each, float *to) {
  for (int64_t m = 0; m < rows; m++, own += each, to += PANEL) *to += value * bf16_to_float(*own);
}

/* What the rare numbers of a 12-bit weight add to the sums. */
static void add_rares(const linear_args *a, const bfloat12 *w, const void *x, float (*sums)[PANEL], int64_t row,
                      int64_t rows, int64_t first, int64_t count) {
  const rare *r = w->rares + w->first[first], *const last = w->rares + w->first[first + count];
  if (r == last) return;
  const int64_t k = a->inputs, beside = rows_interleaved(a);
  const int pairs = bf16_applies(a);
  for (; r < last; r++) {
    float *const to = sums[0] + r->output - first;
    if (!pairs) {
      const float *own = (const float *)x + row * k + r->column;
      for (int64_t m = 0; m < rows; m++) to[m * PANEL] += r->value * own[m * k];
      continue;
    }
    const int64_t place = bf16_place_in_row(r->column);
    for (int64_t m = 0; m < rows; m += beside) {
      const uint16_t *own = (const uint16_t *)x + (row + m) * k + (place & 31);
      const int64_t some = rows - m < beside ? rows - m : beside;
      if (some == HIGH) add_rare(own + (place >> 5) * (32 * HIGH), r->value, HIGH, 32, to + m * PANEL);
      else add_rare(own + (place >> 5) * step_of(a, row + m, beside), r->value, some, 32, to + m * PANEL);
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

void stored_panel(const linear_args *a, const bfloat12 *w, const void *x, int64_t first, int64_t count,
                  span_of_rows of) {
  static float_tile_of *const kinds[] = {float_tile_f32, float_tile_bf16, float_tile_f16};
  const int64_t k = a->inputs, last = a->outputs - 1, pairs = bf16_applies(a);
  const int64_t high = a->kind == BFLOAT12 && !pairs ? HIGH12 : HIGH;
  int64_t at[PANEL];
  for (int64_t n = 0; n < PANEL; n++) at[n] = (first + n < last ? first + n : last) * k;
  for (int64_t row = of.first, rows; row < of.last; row += rows) {
    float sums[HIGH][PANEL];
    const int64_t left = of.last - row, tiles = (left + high - 1) / high;
    rows = (left + tiles - 1) / tiles; /* evenly: a low tile takes as long to read its weights as a high one */
    for (int64_t n = 0, made; n < count; n += made) {
      float(*own)[PANEL] = (float(*)[PANEL])(sums[0] + n);
      made = OUTPUTS;
      if (pairs) made = bf16_tile(a, w, (const uint16_t *)x + row * k, first + n, count - n, rows, own);
      else if (a->kind == BFLOAT12) bfloat12_tiles(w, (const float *)x + row * k, k, first + n, rows, own);
      else kinds[a->kind]((const float *)x + row * k, a->weight, at + n, k, rows, own);
    }
    finish_panel(a, w, x, sums, row, rows, first, count);
  }
}

/* Ask for `lines` lines of memory from `at` on, into the second cache; returns what follows them. */
INLINE const char *prefetch_lines(const char *at, int64_t lines) {
  for (; lines > 0; lines--, at += 64) __builtin_prefetch(at, 0, 1);
  return at;
}

/* Some tiles of rows share a part of four outputs while it is in the first cache, and each finds its own rows there for
 * all outputs of the panel. Meanwhile it asks for the weights of the next panel, a few lines at each tile: packing them
 * would wait for the memory. */
void packed_panel(const linear_args *a, const bfloat12 *w, const void *x, int64_t first, int64_t count,
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
          ahead[later] = prefetch_lines(ahead[later], lines);
          (pairs ? bf16_packed_tile : packed_tiles)(
            (const float *)x + (row + m) * k, scratch + n * padded, k, begin, begin + deep < k ? begin + deep : k,
            rows - m < HIGH ? rows - m : HIGH, before[m / HIGH][n / OUTPUTS], (float(*)[PANEL])(sums[m] + n));
        }
    finish_panel(a, w, x, sums, row, rows, first, count);
  }
}
