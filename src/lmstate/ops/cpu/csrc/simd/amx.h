/* Products of tiles of 16 x 16 sums, on processors with AMX (Intel SDM, volume 1, chapter 18).
 *
 * A sum of bfloat16 products is made of the sums of 32 inputs each, and each of those in a fixed order: it does not
 * depend on the rows and columns beside it, nor on how many there are. Sums of bytes are exact. */
#ifndef LMSTATE_AMX_H
#define LMSTATE_AMX_H
#include "simd/simd.h"

#if defined(LMSTATE_AVX512) && defined(__linux__) && __GNUC__ >= 11 && !defined(__clang__)
#define LMSTATE_AMX

/* Whether the processor has tiles and the system lets this process use them; LMSTATE_AMX=0 says no. The same for all
 * products of a process. */
int uses_amx(void);

/* Whether `add_as_tile` gives the bits of a tile, tried once a process. */
int adds_as_tiles(void);

/* What a thread's tiles look like, as `_tile_loadconfig` reads it. */
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_of_row[16];
  uint8_t rows[16];
} tile_shapes;

/* Between these two a thread has tiles: sums in those up to 3, in 4 what is in fours or pairs of inputs, in the others
 * 16 rows of `bytes` each. */
__attribute__((target("amx-tile"))) static inline void begin_tiles(int bytes) {
  tile_shapes shapes = {.palette = 1};
  for (int i = 0; i < 8; i++) {
    shapes.bytes_of_row[i] = (uint16_t)(i > 4 ? bytes : 64);
    shapes.rows[i] = (uint8_t)(i == 4 ? bytes / 4 : 16);
  }
  __asm__ volatile("" : : "r"(&shapes) : "memory"); /* as in TILE_LOAD */
  _tile_loadconfig(&shapes);
}
__attribute__((target("amx-tile"))) static inline void end_tiles(void) { _tile_release(); }

/* The compiler does not know that a tile is read from memory: what was stored there before must be there. */
#define TILE_LOAD(tile, from, stride) \
  do { \
    __asm__ volatile("" ::: "memory"); \
    _tile_loadd(tile, from, stride); \
  } while (0)

/* Tiles take denormals for zeros: between these two a thread does too. The compiler does not know that sums depend on
 * it. */
INLINE unsigned begin_flushing(void) {
  const unsigned before = _mm_getcsr();
  _mm_setcsr(before | _MM_FLUSH_ZERO_ON | 0x40);
  __asm__ volatile("" ::: "memory");
  return before;
}
INLINE vf end_flushing(unsigned before, vf sum) {
  __asm__ volatile("" : "+v"(sum) : : "memory");
  _mm_setcsr(before);
  return sum;
}

/* What a tile adds to 16 sums, to the bit where `adds_as_tiles`: products of 32 numbers, which are floats, with
 * those of 16 others, which are stored in pairs; even ones and odd ones apart (Intel SDM, volume 2, TDPBF16PS). */
INLINE vf add_as_tile(const float *x, const __m512i *pairs, vf sum) {
  const __m512i upper = _mm512_set1_epi32((int)0xffff0000u);
  vf even = vf_zero(), odd = vf_zero();
  UNROLL16 for (int p = 0; p < 16; p++) {
    even = vf_fma(vf_set1(x[2 * p]), _mm512_castsi512_ps(_mm512_slli_epi32(pairs[p], 16)), even);
    odd = vf_fma(vf_set1(x[2 * p + 1]), _mm512_castsi512_ps(_mm512_and_si512(pairs[p], upper)), odd);
  }
  return vf_add(sum, vf_add(even, odd));
}

#else
static inline int uses_amx(void) { return 0; }
static inline void begin_tiles(int bytes) { (void)bytes; }
static inline void end_tiles(void) {}
#endif
#endif
