#include <stdint.h>

/* What lmstate.ops.cpu.sources.digest said when this was built. */
uint64_t lmstate_sources(void) { return LMSTATE_SOURCES; }

/* What the processor can run: 0 the portable variant only, 1 AVX2 too, 2 AVX-512 too. */
int lmstate_processor(void) {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512vl") ||
      !__builtin_cpu_supports("avx512dq") || !__builtin_cpu_supports("avx512vnni"))
    return 1;
  return 2;
#else
  return 0;
#endif
}
