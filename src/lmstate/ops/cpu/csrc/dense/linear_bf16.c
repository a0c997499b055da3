/* Products with bfloat16 weights in pairs: activations are rounded to bfloat16, and sums along the inputs lie in the
 * lanes of a vector, so that weights are multiplied as they are stored, one row at decode and thousands at a prompt
 * alike. */
#include "dense/bfloat12.h"
#include "dense/linear_tile.h"
#include "simd/bf16_dot.h"

#ifdef LMSTATE_PAIRS
enum { STEP = 32, OUTPUTS = 4 }; /* inputs of a vector; outputs of a tile */

int bf16_applies(const linear_args *a) {
  return (a->kind == BF16 || a->kind == BFLOAT12) && a->inputs % STEP == 0 && rounds_to_bf16();
}

void bf16_round(const linear_args *a, const float *x, uint16_t *to) {
  if (a->kind == BF16) {
    round_pairs(x, a->inputs, to);
    return;
  }
  for (int64_t i = 0; i < a->inputs; i += STEP) {
    uint16_t half[STEP];
    round_pairs(x + i, STEP, half);
    for (int j = 0; j < STEP / 2; j++) to[i + 2 * j] = half[j], to[i + 2 * j + 1] = half[j + STEP / 2];
  }
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
/* Four outputs, whose weights are the rows w[..], for `rows` rows of x. `rows` and `ask` are constants where this is
 * called. */
INLINE void tile(const uint16_t *x, const uint16_t *const *w, int64_t k, int rows, int ask, float (*sums)[OUTPUTS]) {
  __m512 acc[ROWS][OUTPUTS];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < OUTPUTS; n++) acc[m][n] = vf_zero();
  for (int64_t i = 0; i < k; i += STEP) {
    __m512i v[OUTPUTS];
    UNROLL for (int n = 0; n < OUTPUTS; n++) v[n] = _mm512_loadu_si512(w[n] + i);
    if (ask) UNROLL for (int n = 0; n < OUTPUTS; n++) __builtin_prefetch(w[n] + OUTPUTS * k + i, 0, 1);
    UNROLL for (int m = 0; m < rows; m++) {
      const __m512i u = _mm512_loadu_si512(x + m * k + i);
      UNROLL for (int n = 0; n < OUTPUTS; n++) acc[m][n] = _mm512_dpbf16_ps(acc[m][n], (__m512bh)u, (__m512bh)v[n]);
    }
  }
  UNROLL for (int m = 0; m < rows; m++) vf_sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], sums[m]);
}

/* The same for the four outputs of a 12-bit weight that lie together from p on. */
INLINE void packed_tile(const uint16_t *x, const uint8_t *p, const uint8_t *table, int64_t k, int rows,
                        float (*sums)[OUTPUTS]) {
  __m512 acc[ROWS][OUTPUTS];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int n = 0; n < OUTPUTS; n++) acc[m][n] = vf_zero();
  for (int64_t i = 0; i < k; i += SPAN, p += SPAN_BYTES) {
    UNROLL for (int l = 0; l < SPAN_BYTES; l += 64) __builtin_prefetch(p + AHEAD + l, 0, 1);
    UNROLL for (int n = 0; n < OUTPUTS; n++) {
      __m512i v[2];
      unpack_words(p + lows_at(n), p + codes_at(n), table, v);
      UNROLL for (int m = 0; m < rows; m++)
        UNROLL for (int h = 0; h < 2; h++) {
          const __m512i u = _mm512_loadu_si512(x + m * k + i + h * STEP);
          acc[m][n] = _mm512_dpbf16_ps(acc[m][n], (__m512bh)u, (__m512bh)v[h]);
        }
    }
  }
  UNROLL for (int m = 0; m < rows; m++) vf_sum4(acc[m][0], acc[m][1], acc[m][2], acc[m][3], sums[m]);
}

static void tiles(const uint16_t *x, const uint16_t *const *w, int64_t k, int64_t rows, float (*sums)[OUTPUTS]) {
  switch (rows) {
    case 1: tile(x, w, k, 1, 1, sums); break;
    case 2: tile(x, w, k, 2, 1, sums); break;
    case 3: tile(x, w, k, 3, 1, sums); break;
    case 4: tile(x, w, k, 4, 1, sums); break;
    case 5: tile(x, w, k, 5, 1, sums); break;
    default: tile(x, w, k, ROWS, 0, sums); break;
  }
}

static void packed_tiles(const uint16_t *x, const uint8_t *p, const uint8_t *table, int64_t k, int64_t rows,
                         float (*sums)[OUTPUTS]) {
  switch (rows) {
    case 1: packed_tile(x, p, table, k, 1, sums); break;
    case 2: packed_tile(x, p, table, k, 2, sums); break;
    case 3: packed_tile(x, p, table, k, 3, sums); break;
    case 4: packed_tile(x, p, table, k, 4, sums); break;
    case 5: packed_tile(x, p, table, k, 5, sums); break;
    default: packed_tile(x, p, table, k, ROWS, sums); break;
  }
}
#pragma GCC pop_options

void bf16_unpack(const uint8_t *p, const uint8_t *ahead, const uint8_t *table, int64_t k, uint16_t *to, int64_t row,
                 int64_t step) {
  for (int64_t i = 0; i < k; i += SPAN, p += SPAN_BYTES, ahead += BF16_ASKED, to += 2 * step) {
    UNROLL for (int l = 0; l < BF16_ASKED; l += 64) __builtin_prefetch(ahead + l, 0, 1);
    UNROLL for (int n = 0; n < OUTPUTS; n++) {
      __m512i v[2];
      unpack_words(p + lows_at(n), p + codes_at(n), table, v);
      UNROLL for (int h = 0; h < 2; h++) _mm512_storeu_si512(to + n * row + h * step, v[h]);
    }
  }
}

void bf16_block(const linear_args *a, const uint16_t *x, int64_t first, span_of_rows of, uint16_t *scratch) {
  const int64_t k = a->inputs, left = a->outputs - first, count = left < OUTPUTS ? left : OUTPUTS;
  const int packed = a->kind == BFLOAT12, many = of.last - of.first > ROWS;
  const bfloat12 in_bits = bfloat12_at(a->weight, a->outputs, k); /* where it is one */
  const uint8_t *p = packed ? span_of(&in_bits, first, k, 0) : NULL;
  const uint16_t *w[OUTPUTS];
  for (int64_t n = 0; n < OUTPUTS; n++) /* the last one again where there are fewer */
    w[n] = packed ? scratch + n * k : (const uint16_t *)a->weight + (first + (n < count ? n : count - 1)) * k;
  if (packed && many) bf16_unpack(p, p + AHEAD, in_bits.table, k, scratch, k, STEP);
  for (int64_t row = of.first, rows; row < of.last; row += rows) {
    float sums[ROWS][OUTPUTS];
    rows = of.last - row < ROWS ? of.last - row : ROWS;
    if (packed && !many) packed_tiles(x + row * k, p, in_bits.table, k, rows, sums);
    else tiles(x + row * k, w, k, rows, sums);
    for (int64_t m = 0; m < rows && packed; m++)
      for (int64_t n = 0; n < count; n++)
        for (int32_t r = in_bits.first[first + n]; r < in_bits.first[first + n + 1]; r++) {
          const uint16_t with = x[(row + m) * k + bf16_place_in_row(in_bits.rares[r].column)];
          sums[m][n] += in_bits.rares[r].value * bf16_to_float(with);
        }
    linear_finish(a, sums[0], OUTPUTS, row, rows, first, count);
  }
}
#else
int bf16_applies(const linear_args *a) {
  (void)a;
  return 0;
}

void bf16_round(const linear_args *a, const float *x, uint16_t *to) { (void)a, (void)x, (void)to; }

void bf16_block(const linear_args *a, const uint16_t *x, int64_t first, span_of_rows of, uint16_t *scratch) {
  (void)a, (void)x, (void)first, (void)of, (void)scratch;
}
#endif
