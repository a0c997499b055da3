/* Whether products of bfloat16 numbers go in pairs, decided once a process. */
#include "simd/bf16_dot.h"

#include <stdlib.h>

#ifdef LMSTATE_BF16_DOT
static int known = -1;

int uses_bf16_dot(void) {
  if (known >= 0) return known;
  const char *asked = getenv("LMSTATE_BF16_DOT");
  __builtin_cpu_init();
  const int has = __builtin_cpu_supports("avx512bf16") != 0;
  return known = has && (asked && *asked ? *asked == '1' : !__builtin_cpu_is("intel"));
}
#endif

int64_t lmstate_rounds_to_bf16(const void *nothing) {
  (void)nothing;
  return rounds_to_bf16();
}
