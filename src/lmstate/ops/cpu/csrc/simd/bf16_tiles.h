/* The products of bf16_dot.h in tiles: a sum is made of the sums of 32 inputs, the other processors' of those of 2. */
#ifndef LMSTATE_BF16_TILES_H
#define LMSTATE_BF16_TILES_H
#include "simd/bf16_dot.h"

/* Sixteen rows of bfloat16 numbers, `stride` numbers apart. */
typedef struct { const uint16_t *first; int64_t stride; } tile_rows;

#ifdef LMSTATE_AMX
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16")
/* y[m] = the sums over n numbers, a multiple of 32, of x[m] times those of WIDE others, which lie in pairs
 * [n / 2, WIDE]: of 16 or 32 rows, which must be there to be read and written. */
static void sums_in_tiles(const uint16_t *x, const uint32_t *w, int64_t n, int64_t rows, float *y, int64_t stride) {
  if (rows == 16) {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < n; i += 32, w += 16 * WIDE) {
      TILE_LOAD(4, x + i, n * 2);
      TILE_LOAD(5, w, WIDE * 4);
      TILE_LOAD(6, w + 16, WIDE * 4);
      TILE_LOAD(7, w + 32, WIDE * 4);
      _tile_dpbf16ps(0, 4, 5);
      TILE_LOAD(5, w + 48, WIDE * 4);
      _tile_dpbf16ps(1, 4, 6);
      _tile_dpbf16ps(2, 4, 7);
      _tile_dpbf16ps(3, 4, 5);
    }
    _tile_stored(0, y, stride * 4);
    _tile_stored(1, y + 16, stride * 4);
    _tile_stored(2, y + 32, stride * 4);
    _tile_stored(3, y + 48, stride * 4);
    return;
  }
  for (int half = 0; half < 2; half++, w += 32, y += 32) {
    const uint32_t *p = w;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < n; i += 32, p += 16 * WIDE) {
      TILE_LOAD(4, x + i, n * 2);
      TILE_LOAD(6, p, WIDE * 4);
      _tile_dpbf16ps(0, 4, 6);
      TILE_LOAD(7, p + 16, WIDE * 4);
      _tile_dpbf16ps(1, 4, 7);
      TILE_LOAD(5, x + 16 * n + i, n * 2);
      _tile_dpbf16ps(2, 5, 6);
      _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, y, stride * 4);
    _tile_stored(1, y + 16, stride * 4);
    _tile_stored(2, y + 16 * stride, stride * 4);
    _tile_stored(3, y + 16 * stride + 16, stride * 4);
  }
}

#define LOAD_ROWS(tile, x) TILE_LOAD(tile, (x).first + i, (x).stride * 2)
/* The same bits from the other side: columns[m] = the sums of row m of `count` others, as they are stored, times 16 x,
 * which lie in pairs [n / 2, WIDE]. Tiles end at multiples of WIDE others. */
static void scores_in_tiles(const tile_rows *others, int64_t count, const uint32_t *pairs, int64_t n,
                            float (*columns)[16][16]) {
  for (int64_t m = 0; m < count; m += WIDE, others += 4, columns += 4) {
    const uint32_t *x = pairs;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int64_t i = 0; i < n; i += 32, x += 16 * WIDE) {
      TILE_LOAD(4, x, WIDE * 4);
      LOAD_ROWS(5, others[0]);
      LOAD_ROWS(6, others[1]);
      LOAD_ROWS(7, others[2]);
      _tile_dpbf16ps(0, 5, 4);
      LOAD_ROWS(5, others[3]);
      _tile_dpbf16ps(1, 6, 4);
      _tile_dpbf16ps(2, 7, 4);
      _tile_dpbf16ps(3, 5, 4);
    }
    _tile_stored(0, columns[0], 64);
    _tile_stored(1, columns[1], 64);
    _tile_stored(2, columns[2], 64);
    _tile_stored(3, columns[3], 64);
  }
}
#undef LOAD_ROWS

/* y[m][WIDE] of some of the 16. */
static void scores_of_columns(const float (*columns)[16][16], int64_t rows, float *y) {
  const __m512i each = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
  for (int64_t m = 0; m < rows; m++)
    UNROLL for (int i = 0; i < WIDE / 16; i++)
      vf_store(y + m * WIDE + i * 16, _mm512_i32gather_ps(each, columns[i][0] + m, 4));
}
#pragma GCC pop_options
#else
static inline void sums_in_tiles(const uint16_t *x, const uint32_t *w, int64_t n, int64_t rows, float *y,
                                 int64_t stride) {
  (void)x, (void)w, (void)n, (void)rows, (void)y, (void)stride;
}
static inline void scores_in_tiles(const tile_rows *others, int64_t count, const uint32_t *pairs, int64_t n,
                                   float (*columns)[16][16]) {
  (void)others, (void)count, (void)pairs, (void)n, (void)columns;
}
static inline void scores_of_columns(const float (*columns)[16][16], int64_t rows, float *y) {
  (void)columns, (void)rows, (void)y;
}
#endif
#endif
