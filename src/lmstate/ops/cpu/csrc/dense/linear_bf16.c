/* Products with bfloat16 weights in pairs: activations are rounded to bfloat16, and sums along the inputs are in the
 * lanes of a vector, so that weights are multiplied as they are stored, one row at decode and thousands at a prompt
 * alike. */
#include "dense/bfloat12.h"
#include "dense/linear_tile.h"
#include "simd/bf16_dot.h"

#ifdef LMSTATE_BF16_DOT
enum { STEP = 32 }; /* inputs of a vector */
/* Of a row alone: as many sums have to be on their way as an instruction takes long. */
enum { MOST_OUTPUTS = 2 * OUTPUTS };

int bf16_applies(const linear_args *a) {
  return (a->kind == BF16 || a->kind == BFLOAT12) && a->inputs % STEP == 0 && rounds_to_bf16();
}

/* 64 inputs of an output of a 12-bit weight, as two vectors. */
INLINE void unpack_words(const uint8_t *lows, const uint8_t *codes, const uint8_t *table, __m512i *words) {
  const __m512i highs = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
  __m512i code = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)codes)), low = _mm512_loadu_si512(lows);
  code = _mm512_mask_srli_epi16(code, 0xffff0000u, code, 4); /* the second half of them is in the upper four bits */
  const __m512i high = _mm512_shuffle_epi8(highs, _mm512_and_si512(code, _mm512_set1_epi8(15)));
  words[0] = _mm512_unpacklo_epi8(low, high), words[1] = _mm512_unpackhi_epi8(low, high);
}

#pragma GCC push_options
#pragma GCC target("avx512bf16")
void bf16_round(const linear_args *a, const float *x, uint16_t *to, int64_t step) {
  for (int64_t i = 0; i < a->inputs; i += STEP, to += step) {
    const __m256i low = (__m256i)_mm512_cvtneps_pbh(vf_load(x + i));
    const __m256i high = (__m256i)_mm512_cvtneps_pbh(vf_load(x + i + VL));
    if (a->kind == BFLOAT12) {
      const __m512i second = _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16);
      _mm512_storeu_si512(to, _mm512_or_si512(_mm512_cvtepu16_epi32(low), second));
    } else {
      _mm256_storeu_si256((__m256i *)to, low);
      _mm256_storeu_si256((__m256i *)(to + VL), high);
    }
  }
}

/* `outputs` outputs, whose weights are the rows w[..], for `rows` rows of x; both are constants where this is
 * called. */
INLINE void stored_tile(const uint16_t *x, const uint16_t *const *w, int64_t k, int rows, int outputs,
                        float (*sums)[PANEL]) {
  __m512 acc[ROWS][MOST_OUTPUTS];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < outputs; n++) acc[m][n] = vf_zero();
  for (int64_t i = 0; i < k; i += STEP) {
    __m512i v[MOST_OUTPUTS];
    UNROLL for (int n = 0; n < outputs; n++) v[n] = _mm512_loadu_si512(w[n] + i);
    UNROLL for (int n = 0; n < outputs; n++) __builtin_prefetch(w[n] + outputs * k + i, 0, 1);
    UNROLL for (int m = 0; m < rows; m++) {
      const __m512i u = _mm512_loadu_si512(x + m * k + i);
      UNROLL for (int n = 0; n < outputs; n++) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], (__m512bh)u, (__m512bh)v[n]);
    }
  }
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < outputs; n += OUTPUTS)
      vf_sum4(acc[m][n], acc[m][n + 1], acc[m][n + 2], acc[m][n + 3], sums[m] + n);
}

/* The same for outputs of a 12-bit weight, of which fours are stored together: from p on, and `quad` bytes behind. */
INLINE void bfloat12_tile(const uint16_t *x, const uint8_t *p, int64_t quad, const uint8_t *table, int64_t k, int rows,
                          int outputs, float (*sums)[PANEL]) {
  __m512 acc[ROWS][MOST_OUTPUTS];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < outputs; n++) acc[m][n] = vf_zero();
  for (int64_t i = 0; i < k; i += SPAN, p += SPAN_BYTES) {
    UNROLL for (int n = 0; n < outputs; n += OUTPUTS)
      UNROLL for (int l = 0; l < SPAN_BYTES; l += 64) __builtin_prefetch(p + n / OUTPUTS * quad + AHEAD + l, 0, 1);
    UNROLL for (int n = 0; n < outputs; n++) {
      const uint8_t *own = p + n / OUTPUTS * quad;
      __m512i v[2];
      unpack_words(own + lows_at(n % OUTPUTS), own + codes_at(n % OUTPUTS), table, v);
      UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int h = 0; h < 2; h++) {
          const __m512i u = _mm512_loadu_si512(x + m * k + i + h * STEP);
          acc[m][n] = _mm512_dpbf16_ps(acc[m][n], (__m512bh)u, (__m512bh)v[h]);
        }
    }
  }
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < outputs; n += OUTPUTS)
      vf_sum4(acc[m][n], acc[m][n + 1], acc[m][n + 2], acc[m][n + 3], sums[m] + n);
}

/* The same of packed weights and rows. */
INLINE void packed_tile(const float *x, const float *w, int64_t k, int64_t begin, int64_t end, int rows,
                        open_sums before, float (*sums)[PANEL]) {
  open_sums acc;
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < OUTPUTS; n++) acc[m][n] = begin ? before[m][n] : vf_zero();
  w += begin * OUTPUTS;
  for (int64_t i = begin; i < end; i += VL, w += OUTPUTS * VL) {
    __m512i v[OUTPUTS];
    UNROLL for (int n = 0; n < OUTPUTS; n++) v[n] = _mm512_load_si512(w + n * VL);
    UNROLL for (int m = 0; m < rows; m++) {
      const __m512i u = _mm512_loadu_si512(x + i * rows + m * VL);
      UNROLL for (int n = 0; n < OUTPUTS; n++) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], (__m512bh)u, (__m512bh)v[n]);
    }
  }
  if (end < k)
    UNROLL for (int m = 0; m < rows; m++)
      UNROLL for (int n = 0; n < OUTPUTS; n++) before[m][n] = acc[m][n];
  else
    UNROLL for (int m = 0; m < rows; m++) vf_sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], sums[m]);
}

#define EACH_HEIGHT CASE(1) CASE(2) CASE(3) CASE(4) CASE(5) CASE(6)
int64_t bf16_tile(const linear_args *a, const bfloat12 *w, const uint16_t *x, int64_t first, int64_t count,
                  int64_t rows, float (*sums)[PANEL]) {
  const int64_t k = a->inputs, last = a->outputs - 1;
  const int64_t outputs = rows == 1 && count > OUTPUTS ? MOST_OUTPUTS : OUTPUTS;
  if (a->kind == BFLOAT12) {
    const uint8_t *p = span_of(w, first, k, 0);
    const int64_t quad = k / SPAN * SPAN_BYTES;
    switch (outputs == OUTPUTS ? rows : 0) {
#define CASE(high) case high: bfloat12_tile(x, p, quad, w->table, k, high, OUTPUTS, sums); break;
      EACH_HEIGHT
#undef CASE
      default: bfloat12_tile(x, p, quad, w->table, k, 1, MOST_OUTPUTS, sums); break;
    }
    return outputs;
  }
  const uint16_t *at[MOST_OUTPUTS];
  for (int64_t n = 0; n < outputs; n++) /* the last one again where there are fewer */
    at[n] = (const uint16_t *)a->weight + (first + n < last ? first + n : last) * k;
  switch (outputs == OUTPUTS ? rows : 0) {
#define CASE(high) case high: stored_tile(x, at, k, high, OUTPUTS, sums); break;
    EACH_HEIGHT
#undef CASE
    default: stored_tile(x, at, k, 1, MOST_OUTPUTS, sums); break;
  }
  return outputs;
}

void bf16_packed_tile(const float *x, const float *w, int64_t k, int64_t begin, int64_t end, int64_t rows,
                      open_sums before, float (*sums)[PANEL]) {
  switch (rows) {
#define CASE(high) case high: packed_tile(x, w, k, begin, end, high, before, sums); break;
    EACH_HEIGHT
#undef CASE
    default: break;
  }
}
#pragma GCC pop_options

void bf16_unpack(const uint8_t *p, const uint8_t *ahead, const uint8_t *table, int64_t k, uint16_t *to, int64_t row,
                 int64_t step) {
  for (int64_t i = 0; i < k; i += SPAN, p += SPAN_BYTES, ahead += BF16_PREFETCHED, to += 2 * step) {
    UNROLL for (int l = 0; l < BF16_PREFETCHED; l += 64) __builtin_prefetch(ahead + l, 0, 1);
    UNROLL for (int n = 0; n < OUTPUTS; n++) {
      __m512i v[2];
      unpack_words(p + lows_at(n), p + codes_at(n), table, v);
      UNROLL for (int h = 0; h < 2; h++) _mm512_storeu_si512(to + n * row + h * step, v[h]);
    }
  }
}

void bf16_pack(const linear_args *a, const bfloat12 *w, int64_t first, int64_t count, uint16_t *to) {
  const int64_t k = a->inputs, last = a->outputs - 1;
  for (int64_t n = 0; n < count; n += OUTPUTS, to += OUTPUTS * k) {
    if (a->kind == BFLOAT12) {
      const uint8_t *p = span_of(w, first + n, k, 0);
      bf16_unpack(p, p, w->table, k, to, STEP, OUTPUTS * STEP);
      continue;
    }
    for (int64_t j = 0; j < OUTPUTS; j++) {
      const uint16_t *from = (const uint16_t *)a->weight + (first + n + j < last ? first + n + j : last) * k;
      for (int64_t i = 0; i < k; i += STEP)
        _mm512_store_si512(to + i * OUTPUTS + j * STEP, _mm512_loadu_si512(from + i));
    }
  }
}
#else
int bf16_applies(const linear_args *a) {
  (void)a;
  return 0;
}

void bf16_round(const linear_args *a, const float *x, uint16_t *to, int64_t step) {
  (void)a, (void)x, (void)to, (void)step;
}

int64_t bf16_tile(const linear_args *a, const bfloat12 *w, const uint16_t *x, int64_t first, int64_t count,
                  int64_t rows, float (*sums)[PANEL]) {
  (void)a, (void)w, (void)x, (void)first, (void)count, (void)rows, (void)sums;
  return OUTPUTS;
}

void bf16_pack(const linear_args *a, const bfloat12 *w, int64_t first, int64_t count, uint16_t *to) {
  (void)a, (void)w, (void)first, (void)count, (void)to;
}

void bf16_packed_tile(const float *x, const float *w, int64_t k, int64_t begin, int64_t end, int64_t rows,
                      open_sums before, float (*sums)[PANEL]) {
  (void)x, (void)w, (void)k, (void)begin, (void)end, (void)rows, (void)before, (void)sums;
}
#endif
