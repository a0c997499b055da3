/* Products of many rows in bfloat16, on processors that multiply pairs of them: y = residual + x w^T + bias, or
 * act(gate) * up of it.
 *
 * The work is a list of tiles, some rows by 64 outputs, panel by panel; a thread takes a stretch of it. It expands a
 * panel once, as the pairs of inputs that an instruction multiplies, into memory that stays in its second cache, and
 * sums a tile along all inputs in registers. So a weight is read as it is stored, and no product but the result is
 * written. A row of y has the same bits whatever rows and threads are beside it. */
#include "expand.h"
#include "linear.h"
#include "prologue.h"

typedef struct {
  const uint16_t *x; /* [rows, inputs], bfloat16 */
  const void *weight;
  const float *bias, *residual; /* or null: [outputs]; as y */
  void *y;                      /* [rows, stride]: float32, or bfloat16 after a gate */
  uint16_t *scratch;            /* [threads, WIDE + BLOCK, inputs] */
  int64_t rows, inputs, outputs, kind;
  int64_t first, count;         /* the outputs wanted; with a gate all, of which the second half is gated */
  int64_t stride, gate, threads;
} product_args;

enum { WIDE = 64 };

#if defined(LMSTATE_AVX512) && defined(__GNUC__)
#include <immintrin.h>
#include <omp.h>

/* Whether the processor multiplies bfloat16 in vectors. Where it has units for whole matrices too, torch's product uses
 * them, and is faster. */
int64_t lmstate_multiplies(const void *nothing) {
  (void)nothing;
  __builtin_cpu_init();
  return __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_supports("amx-bf16");
}

enum { ROWS = 6, VECTORS = WIDE / VL };

/* Up to 16 pairs of inputs of 16 outputs -> 16 outputs of each pair. */
INLINE void across(const uint16_t *rows, int64_t inputs, int pairs, uint32_t *to) {
  const __mmask16 mask = (__mmask16)((1 << pairs) - 1);
  __m512i r[16], t[16];
  UNROLL16 for (int i = 0; i < 16; i++) r[i] = _mm512_maskz_loadu_epi32(mask, rows + i * inputs);
  UNROLL16 for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLL16 for (int i = 0; i < 16; i += 4) { /* r[i + j]: of four outputs, the pairs j, 4 + j, 8 + j, 12 + j */
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  UNROLL16 for (int j = 0; j < 4; j++) {
    const __m512i even[2] = {_mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88)};
    const __m512i odd[2] = {_mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd), _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd)};
    t[j] = _mm512_shuffle_i32x4(even[0], even[1], 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
    t[4 + j] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
  }
  for (int i = 0; i < pairs; i++) _mm512_store_si512(to + i * WIDE, t[i]);
}

/* Where the group of 16 outputs of a panel begins, and how many of them there are. */
static int64_t group_of(const product_args *a, int64_t panel, int64_t group, int64_t *first) {
  const int64_t in = a->gate ? WIDE / 2 : WIDE, at = panel * in + group * BLOCK % in;
  *first = a->gate ? group * BLOCK / in * a->count + at : a->first + at;
  return a->count - at < BLOCK ? a->count - at : BLOCK;
}

static void expand_panel(const product_args *a, int64_t panel, uint32_t *pairs, uint16_t *scratch) {
  for (int64_t group = 0; group < WIDE / BLOCK; group++) {
    int64_t first, n = group_of(a, panel, group, &first), i = 0;
    if (n <= 0) continue;
    const uint16_t *rows = (const uint16_t *)a->weight + first * a->inputs;
    if (a->kind != BF16 || n < BLOCK) {
      expand(a->weight, (int)a->kind, a->outputs, a->inputs, first, n, BF16, scratch);
      rows = scratch;
    }
    uint32_t *to = pairs + group * BLOCK;
    for (; i + 32 <= a->inputs; i += 32) across(rows + i, a->inputs, 16, to + i / 2 * WIDE);
    if (i < a->inputs) across(rows + i, a->inputs, (int)(a->inputs - i) / 2, to + i / 2 * WIDE);
  }
}

#pragma GCC push_options
#pragma GCC target("avx512bf16")
/* The sums of `rows` rows, a constant where this is called. */
INLINE void sums(const uint16_t *x, const uint32_t *w, int64_t inputs, int rows, float (*y)[WIDE]) {
  __m512 acc[ROWS][VECTORS];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int v = 0; v < VECTORS; v++) acc[m][v] = _mm512_setzero_ps();
  for (int64_t i = 0; i < inputs; i += 2, w += WIDE) {
    __m512i pairs[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) pairs[v] = _mm512_load_si512(w + v * VL);
    UNROLL for (int m = 0; m < rows; m++) {
      int32_t pair;
      memcpy(&pair, x + m * inputs + i, 4);
      const __m512i both = _mm512_set1_epi32(pair);
      UNROLL for (int v = 0; v < VECTORS; v++) acc[m][v] = _mm512_dpbf16_ps(acc[m][v], (__m512bh)both, (__m512bh)pairs[v]);
    }
  }
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int v = 0; v < VECTORS; v++) _mm512_store_ps(y[m] + v * VL, acc[m][v]);
}

static void sums_of(const uint16_t *x, const uint32_t *w, int64_t inputs, int64_t rows, float (*y)[WIDE]) {
  switch (rows) {
    case 1: sums(x, w, inputs, 1, y); break;
    case 2: sums(x, w, inputs, 2, y); break;
    case 3: sums(x, w, inputs, 3, y); break;
    case 4: sums(x, w, inputs, 4, y); break;
    case 5: sums(x, w, inputs, 5, y); break;
    default: sums(x, w, inputs, ROWS, y); break;
  }
}
#pragma GCC pop_options

/* A row's sums of a panel into y. */
static void leave(const product_args *a, float *sums, int64_t row, int64_t panel) {
  const int64_t in = a->gate ? WIDE / 2 : WIDE, at = panel * in, n = a->count - at < in ? a->count - at : in;
  if (a->bias)
    for (int64_t group = 0; group < WIDE / BLOCK; group++) {
      int64_t first, some = group_of(a, panel, group, &first);
      for (int64_t i = 0; i < some; i++) sums[group * BLOCK + i] += a->bias[first + i];
    }
  if (a->gate) {
    uint16_t *y = (uint16_t *)a->y + row * a->stride + at;
    float made[WIDE / 2];
    gate_run((int)a->gate, sums, sums + WIDE / 2, made, n);
    for (int64_t i = 0; i < n; i++) y[i] = float_to_bf16(made[i]);
    return;
  }
  float *y = (float *)a->y + row * a->stride + at;
  if (a->residual) {
    const float *residual = a->residual + row * a->stride + at;
    for (int64_t i = 0; i < n; i++) y[i] = sums[i] + residual[i];
  } else {
    memcpy(y, sums, (size_t)n * sizeof(float));
  }
}

void lmstate_product(const product_args *a) {
  const int64_t in = a->gate ? WIDE / 2 : WIDE, panels = (a->count + in - 1) / in, tiles = (a->rows + ROWS - 1) / ROWS;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t end = panels * tiles * (thread + 1) / threads;
    uint16_t *scratch = a->scratch + thread * (WIDE + BLOCK) * a->inputs;
    uint32_t *pairs = (uint32_t *)(scratch + BLOCK * a->inputs);
    int64_t expanded = -1;
    for (int64_t i = panels * tiles * thread / threads; i < end; i++) {
      const int64_t panel = i / tiles, row = i % tiles * ROWS, rows = a->rows - row < ROWS ? a->rows - row : ROWS;
      _Alignas(64) float y[ROWS][WIDE];
      if (panel != expanded) expand_panel(a, expanded = panel, pairs, scratch);
      sums_of(a->x + row * a->inputs, pairs, a->inputs, rows, y);
      for (int64_t m = 0; m < rows; m++) leave(a, y[m], row + m, panel);
    }
  }
}
#else
int64_t lmstate_multiplies(const void *nothing) {
  (void)nothing;
  return 0;
}

void lmstate_product(const product_args *a) { (void)a; }
#endif
