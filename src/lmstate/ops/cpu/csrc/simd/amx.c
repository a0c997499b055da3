/* Whether products go in tiles, and whether vectors give the same bits: both decided once a process. */
#define _GNU_SOURCE /* syscall */
#include "simd/amx.h"

#include <stdlib.h>

#ifdef LMSTATE_AMX
#include <sys/syscall.h>
#include <unistd.h>

enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* of arch_prctl(2), in <asm/prctl.h> of new systems alone */
enum { SIDE = 16, STEP = 32, INPUTS = 2 * STEP }; /* of the product that is tried: the second step adds to the first */

static int known = -1, same;

/* A number of any size, now and then zero or a denormal: products and sums that are none of the normal ones too. */
static uint16_t next_number(uint32_t *state) {
  *state = *state * 1664525u + 1013904223u;
  const uint32_t bits = *state >> 12, exponent = bits % 3 ? 112 + bits % 32 : bits % 5 * 32;
  return (uint16_t)((bits & 1) << 15 | exponent << 7 | *state >> 25);
}

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16")
static void multiply_in_tiles(const uint16_t *x, const uint32_t *pairs, float *y) {
  begin_tiles(2 * STEP);
  _tile_zero(0);
  for (int i = 0; i < INPUTS; i += STEP) {
    TILE_LOAD(4, pairs + i / 2 * SIDE, 4 * SIDE);
    TILE_LOAD(5, x + i, 2 * INPUTS);
    _tile_dpbf16ps(0, 5, 4);
  }
  _tile_stored(0, y, 4 * SIDE);
  end_tiles();
  __asm__ volatile("" ::: "memory");
}
#pragma GCC pop_options

/* Whether tiles and vectors give one product the same bits. */
static int try_vectors(void) {
  _Alignas(64) uint16_t x[SIDE * INPUTS];
  _Alignas(64) uint32_t pairs[SIDE * INPUTS / 2];
  _Alignas(64) float in_tiles[SIDE][SIDE], in_vectors[SIDE][SIDE];
  uint32_t state = 1;
  for (int i = 0; i < SIDE * INPUTS; i++) x[i] = next_number(&state);
  for (int i = 0; i < SIDE * INPUTS / 2; i++) pairs[i] = next_number(&state) | (uint32_t)next_number(&state) << 16;
  multiply_in_tiles(x, pairs, in_tiles[0]);
  for (int m = 0; m < SIDE; m++) {
    float row[INPUTS];
    for (int i = 0; i < INPUTS; i++) row[i] = bf16_to_float(x[m * INPUTS + i]);
    const unsigned before = begin_flushing();
    vf sum = vf_zero();
    for (int i = 0; i < INPUTS; i += STEP) sum = add_as_tile(row + i, (const __m512i *)(pairs + i / 2 * SIDE), sum);
    vf_store(in_vectors[m], end_flushing(before, sum));
  }
  return !memcmp(in_tiles, in_vectors, sizeof in_tiles);
}

int uses_amx(void) {
  if (known >= 0) return known;
  const char *asked = getenv("LMSTATE_AMX");
  __builtin_cpu_init();
  const int has = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
                  __builtin_cpu_supports("amx-bf16");
  const int may = has && !(asked && *asked == '0') && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  same = may && try_vectors();
  return known = may;
}

int adds_as_tiles(void) { return uses_amx() && same; }
#endif

int64_t lmstate_uses_amx(const void *nothing) {
  (void)nothing;
  return uses_amx();
}
