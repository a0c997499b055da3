/* Whether products go in tiles, decided once a process. */
#define _GNU_SOURCE /* syscall */
#include "simd/amx.h"

#include <stdlib.h>

#ifdef LMSTATE_AMX
#include <sys/syscall.h>
#include <unistd.h>

enum { REQUEST_PERMISSION = 0x1023, TILE_DATA = 18 }; /* of arch_prctl(2), in <asm/prctl.h> of new systems alone */

static int known = -1;

int uses_amx(void) {
  if (known >= 0) return known;
  const char *asked = getenv("LMSTATE_AMX");
  __builtin_cpu_init();
  const int has = __builtin_cpu_supports("amx-tile") && __builtin_cpu_supports("amx-int8") &&
                  __builtin_cpu_supports("amx-bf16");
  return known = has && !(asked && *asked == '0') && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
}
#endif

int64_t lmstate_uses_amx(const void *nothing) {
  (void)nothing;
  return uses_amx();
}
