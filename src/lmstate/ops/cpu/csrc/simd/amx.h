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

/* What a thread's tiles look like, as `_tile_loadconfig` reads it. */
typedef struct {
  uint8_t palette, start_row, reserved[14];
  uint16_t bytes_of_row[16];
  uint8_t rows[16];
} tile_shapes;

/* Between these two a thread has tiles: sums in those up to 3, in 4 what lies in fours or pairs of inputs, in the others
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

#else
static inline int uses_amx(void) { return 0; }
static inline void begin_tiles(int bytes) { (void)bytes; }
static inline void end_tiles(void) {}
#endif
#endif
