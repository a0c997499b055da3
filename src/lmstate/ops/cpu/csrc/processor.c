#include <stdint.h>
#if defined(__x86_64__) || defined(__i386__)
#include <cpuid.h>
#endif

/* What lmstate.ops.cpu.sources.digest said when this was built. */
uint64_t lmstate_sources(void) { return LMSTATE_SOURCES; }

/* Which variants the processor can run, a bit for each: 1 the portable one, 2 AVX2, 4 that with VNNI, 8 AVX-512. */
int lmstate_processor(void) {
  int runs = 1;
#if defined(__x86_64__) || defined(__i386__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return runs;
  runs |= 2;
  unsigned a, b, c, d;
  if (__get_cpuid_count(7, 1, &a, &b, &c, &d) && a >> 4 & 1) runs |= 4; /* __builtin_cpu_supports may not know it */
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vnni"))
    runs |= 8;
#endif
  return runs;
}
