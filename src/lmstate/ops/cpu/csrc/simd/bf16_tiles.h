/* The products of bf16_dot.h in tiles: a sum is made of the sums of 32 inputs, the other processors' of those of 2. */
#ifndef LMSTATE_BF16_TILES_H
#define LMSTATE_BF16_TILES_H
#include "simd/bf16_dot.h"

#ifdef LMSTATE_AMX
#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16")
static inline void begin_tile_sums(void) {
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
}

/* Add to the sums of 16 rows those over n numbers, a multiple of 32, of rows of x, `stride` numbers apart, times those
 * of WIDE others, which are stored in pairs [n / 2, WIDE]. */
static inline void add_tile_sums(const uint16_t *x, int64_t stride, const uint32_t *w, int64_t n) {
  for (int64_t i = 0; i < n; i += 32, w += 16 * WIDE) {
    TILE_LOAD(4, x + i, stride * 2);
    TILE_LOAD(5, w, WIDE * 4);
    TILE_LOAD(6, w + 16, WIDE * 4);
    TILE_LOAD(7, w + 32, WIDE * 4);
    _tile_dpbf16ps(0, 4, 5);
    TILE_LOAD(5, w + 48, WIDE * 4);
    _tile_dpbf16ps(1, 4, 6);
    _tile_dpbf16ps(2, 4, 7);
    _tile_dpbf16ps(3, 4, 5);
  }
}

static inline void end_tile_sums(float *y, int64_t stride) {
  _tile_stored(0, y, stride * 4);
  _tile_stored(1, y + 16, stride * 4);
  _tile_stored(2, y + 32, stride * 4);
  _tile_stored(3, y + 48, stride * 4);
}

/* y[m] = the sums over n numbers, a multiple of 32, of x[m] times those of WIDE others, which are stored in pairs
 * [n / 2, WIDE]: of 16 or 32 rows, which must be there to be read and written. */
static inline void sums_in_tiles(const uint16_t *x, const uint32_t *w, int64_t n, int64_t rows, float *y,
                                 int64_t stride) {
  if (rows == 16) {
    begin_tile_sums();
    add_tile_sums(x, n, w, n);
    end_tile_sums(y, stride);
    return;
  }
  for (int half = 0; half < 2; half++, w += 32, y += 32) {
    const uint32_t *p = w;
    begin_tile_sums();
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

/* Thirty-two numbers of each row, which are a line, and so is what is asked for. */
#define LOAD_ROWS(tile, x) \
  do { \
    TILE_LOAD(tile, (x).first + i, (x).stride * 2); \
    const char *next = (const char *)((x).first + i) + (x).ahead; \
    for (int r = 0; r < 16; r++, next += (x).stride * 2) __builtin_prefetch(next, 0, 1); \
  } while (0)
/* The same bits from the other side: columns[m] = the sums of row m of WIDE others, as they are stored, times 16 x,
 * which are stored in pairs [n / 2, WIDE]. Row after row: the processor's own prefetch goes on with what is read in
 * order. */
static inline void scores_in_tiles(const tile_rows *others, const uint32_t *x, int64_t n, float (*columns)[16][16]) {
  begin_tile_sums();
#define ADD_ROWS(t, tile) \
  for (int64_t i = 0; i < n; i += 32) { \
    TILE_LOAD(4, x + i / 2 * WIDE, WIDE * 4); \
    LOAD_ROWS(tile, others[t]); \
    _tile_dpbf16ps(t, tile, 4); \
  }
  ADD_ROWS(0, 5)
  ADD_ROWS(1, 6)
  ADD_ROWS(2, 7)
  ADD_ROWS(3, 5)
#undef ADD_ROWS
  _tile_stored(0, columns[0], 64);
  _tile_stored(1, columns[1], 64);
  _tile_stored(2, columns[2], 64);
  _tile_stored(3, columns[3], 64);
}
#undef LOAD_ROWS

/* y[m][WIDE] of some of the 16. */
static inline void scores_of_columns(const float (*columns)[16][16], int64_t rows, float *y) {
  const __m512i each = _mm512_setr_epi32(0, 16, 32, 48, 64, 80, 96, 112, 128, 144, 160, 176, 192, 208, 224, 240);
  for (int64_t m = 0; m < rows; m++)
    UNROLL for (int i = 0; i < WIDE / 16; i++)
      vf_store(y + m * WIDE + i * 16, _mm512_i32gather_ps(each, columns[i][0] + m, 4));
}
#pragma GCC pop_options
#else
static inline void begin_tile_sums(void) {}
static inline void add_tile_sums(const uint16_t *x, int64_t stride, const uint32_t *w, int64_t n) {
  (void)x, (void)stride, (void)w, (void)n;
}
static inline void end_tile_sums(float *y, int64_t stride) { (void)y, (void)stride; }
static inline void sums_in_tiles(const uint16_t *x, const uint32_t *w, int64_t n, int64_t rows, float *y,
                                 int64_t stride) {
  (void)x, (void)w, (void)n, (void)rows, (void)y, (void)stride;
}
static inline void scores_in_tiles(const tile_rows *others, const uint32_t *x, int64_t n, float (*columns)[16][16]) {
  (void)others, (void)x, (void)n, (void)columns;
}
static inline void scores_of_columns(const float (*columns)[16][16], int64_t rows, float *y) {
  (void)columns, (void)rows, (void)y;
}
#endif
#endif
