/* Products of bfloat16 numbers in pairs, on processors with an instruction that adds the products of two. */
#ifndef LMSTATE_BF16_DOT_H
#define LMSTATE_BF16_DOT_H
#include "simd/amx.h"

enum { WIDE = 64, ROWS = 6 }; /* sums that are made together: as many as there are registers for */

/* `call` with a constant N for a number of rows: up to ROWS of them. */
#define FOR_ROWS(rows, call) switch (rows) { \
    case 1: { enum { N = 1 }; call; break; } \
    case 2: { enum { N = 2 }; call; break; } \
    case 3: { enum { N = 3 }; call; break; } \
    case 4: { enum { N = 4 }; call; break; } \
    case 5: { enum { N = 5 }; call; break; } \
    default: { enum { N = ROWS }; call; } }

#if defined(LMSTATE_AVX512) && __GNUC__ >= 11 && !defined(__clang__)
#define LMSTATE_BF16_DOT

/* Whether they are faster than twice as many products of floats: those of Intel's vector units are not, and
 * LMSTATE_BF16_DOT=1 or 0 says otherwise. The same for all products of a process, and for all processes of a
 * machine. */
int uses_bf16_dot(void);

/* Sixteen rows of numbers, `stride` numbers apart; `ahead` bytes behind each is what to ask for, if not 0. */
typedef struct { const uint16_t *first; int64_t stride, ahead; } tile_rows;

/* From number `at` on, up to 16 pairs of each row -> of each pair, that of all rows. */
INLINE void load_transposed(tile_rows rows, int64_t at, int pairs, __m512i *to) {
  const __mmask16 mask = (__mmask16)((1 << pairs) - 1);
  UNROLL16 for (int i = 0; i < 16; i++) to[i] = _mm512_maskz_loadu_epi32(mask, rows.first + i * rows.stride + at);
  transpose16(to);
}
INLINE void transpose_pairs(tile_rows rows, int64_t at, int pairs, uint32_t *to) {
  __m512i r[16];
  load_transposed(rows, at, pairs, r);
  for (int i = 0; i < pairs; i++) _mm512_store_si512(to + i * WIDE, r[i]);
}

/* All pairs of rows of n numbers. */
INLINE void transpose_all_pairs(tile_rows rows, int64_t n, uint32_t *to) {
  int64_t at = 0;
  for (; at + 32 <= n; at += 32) transpose_pairs(rows, at, 16, to + at / 2 * WIDE);
  if (at < n) transpose_pairs(rows, at, (int)(n - at) / 2, to + at / 2 * WIDE);
}

#pragma GCC push_options
#pragma GCC target("avx512bf16")
static __attribute__((unused)) void round_pairs(const float *x, int64_t n, uint16_t *y) {
  const int64_t whole = n / VL * VL;
  for (int64_t i = 0; i < whole; i += VL)
    _mm256_storeu_si256((__m256i *)(y + i), (__m256i)_mm512_cvtneps_pbh(vf_load(x + i)));
  for (int64_t i = whole; i < n; i++) y[i] = float_to_bf16(x[i]);
}

/* y[m] = the sums over n numbers of x[m] times those of WIDE others, which are stored in pairs [n / 2, WIDE]. `rows`
 * is a constant where this is called. */
INLINE void sums(const uint16_t *x, const uint32_t *w, int64_t n, int rows, float *y) {
  enum { VECTORS = WIDE / VL };
  __m512 acc[ROWS][VECTORS];
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int v = 0; v < VECTORS; v++) acc[m][v] = vf_zero();
  for (int64_t i = 0; i < n; i += 2, w += WIDE) {
    __m512i pairs[VECTORS];
    UNROLL for (int v = 0; v < VECTORS; v++) pairs[v] = _mm512_load_si512(w + v * VL);
    UNROLL for (int m = 0; m < rows; m++) {
      int32_t pair;
      memcpy(&pair, x + m * n + i, 4);
      const __m512i both = _mm512_set1_epi32(pair);
      UNROLL for (int v = 0; v < VECTORS; v++)
        acc[m][v] = _mm512_dpbf16_ps(acc[m][v], (__m512bh)both, (__m512bh)pairs[v]);
    }
  }
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int v = 0; v < VECTORS; v++) vf_store(y + m * WIDE + v * VL, acc[m][v]);
}

static __attribute__((unused)) void sums_of(const uint16_t *x, const uint32_t *w, int64_t n, int64_t rows, float *y) {
  FOR_ROWS(rows, sums(x, w, n, N, y))
}
#pragma GCC pop_options

#else
static inline int uses_bf16_dot(void) { return 0; }
#endif

/* Whether bfloat16 weights, keys and values multiply what is rounded to bfloat16 too. */
static inline int rounds_to_bf16(void) { return uses_bf16_dot() || uses_amx(); }
#endif
