/* The instructions of AVX-512 that the library uses by those of AVX2, to be included before everything else, amx.h too:
 * what they compute is that of the Intel SDM, volume 2, but for denormals in products of bfloat16 pairs. */
#ifdef LMSTATE_AVX512
#include <immintrin.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

#define EMULATED_512 static inline __attribute__((unused, always_inline))
typedef union {
  __m512 f;
  __m512i i;
  __m256 half[2];
  __m256i ihalf[2];
  __m128i quarter[4];
  float s[16];
  int32_t d[16];
  uint32_t u[16];
  uint16_t w[32];
  int8_t b[64];
  uint8_t ub[64];
  int64_t q[8];
} lanes;

#define HALVES(name, type, part, f512, op256) \
  EMULATED_512 type name(type a, type b) { \
    lanes x = {.f512 = a}, y = {.f512 = b}, r; \
    for (int h = 0; h < 2; h++) r.part[h] = op256(x.part[h], y.part[h]); \
    return r.f512; \
  }
#define FLOATS(name) HALVES(emu_##name, __m512, half, f, _mm256_##name)
#define INTEGERS(name, op256) HALVES(emu_##name, __m512i, ihalf, i, op256)
FLOATS(add_ps) FLOATS(sub_ps) FLOATS(mul_ps) FLOATS(div_ps) FLOATS(min_ps) FLOATS(max_ps)
FLOATS(unpacklo_ps) FLOATS(unpackhi_ps)
INTEGERS(and_si512, _mm256_and_si256) INTEGERS(or_si512, _mm256_or_si256)
INTEGERS(add_epi32, _mm256_add_epi32) INTEGERS(sub_epi32, _mm256_sub_epi32)
INTEGERS(min_epi32, _mm256_min_epi32) INTEGERS(max_epi32, _mm256_max_epi32)
INTEGERS(shuffle_epi8, _mm256_shuffle_epi8)
INTEGERS(unpacklo_epi8, _mm256_unpacklo_epi8) INTEGERS(unpackhi_epi8, _mm256_unpackhi_epi8)
INTEGERS(unpacklo_epi16, _mm256_unpacklo_epi16) INTEGERS(unpackhi_epi16, _mm256_unpackhi_epi16)
INTEGERS(unpacklo_epi32, _mm256_unpacklo_epi32) INTEGERS(unpackhi_epi32, _mm256_unpackhi_epi32)
INTEGERS(unpacklo_epi64, _mm256_unpacklo_epi64) INTEGERS(unpackhi_epi64, _mm256_unpackhi_epi64)

EMULATED_512 __m512 emu_fmadd_ps(__m512 a, __m512 b, __m512 c) {
  lanes x = {.f = a}, y = {.f = b}, z = {.f = c}, r;
  for (int h = 0; h < 2; h++) r.half[h] = _mm256_fmadd_ps(x.half[h], y.half[h], z.half[h]);
  return r.f;
}
EMULATED_512 __m512 emu_fnmadd_ps(__m512 a, __m512 b, __m512 c) {
  lanes x = {.f = a}, y = {.f = b}, z = {.f = c}, r;
  for (int h = 0; h < 2; h++) r.half[h] = _mm256_fnmadd_ps(x.half[h], y.half[h], z.half[h]);
  return r.f;
}
/* Two halves, computed from number h of those of others; followed by what of the union is returned. */
#define EACH(result, from) \
  lanes r; \
  for (int h = 0; h < 2; h++) r.result[h] = from; \
  return r

EMULATED_512 __m512 emu_sqrt_ps(__m512 a) { lanes x = {.f = a}; EACH(half, _mm256_sqrt_ps(x.half[h])).f; }
EMULATED_512 __m512 emu_round(__m512 a, int how) {
  lanes x = {.f = a}, r;
  for (int h = 0; h < 2; h++)
    r.half[h] = how == _MM_FROUND_TO_NEG_INF
                    ? _mm256_floor_ps(x.half[h])
                    : _mm256_round_ps(x.half[h], _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return r.f;
}
EMULATED_512 __m512 emu_reduce(__m512 a, int how) {
  lanes x = {.f = a}, whole = {.f = emu_round(a, how)}, r;
  for (int i = 0; i < 16; i++) r.s[i] = isinf(x.s[i]) ? 0.0f : x.s[i] - whole.s[i];
  return r.f;
}
EMULATED_512 __m512i emu_slli(__m512i a, int n) { lanes x = {.i = a}; EACH(ihalf, _mm256_slli_epi32(x.ihalf[h], n)).i; }
EMULATED_512 __m512i emu_srli(__m512i a, int n) { lanes x = {.i = a}; EACH(ihalf, _mm256_srli_epi32(x.ihalf[h], n)).i; }
EMULATED_512 __m512i emu_srli16(__m512i a, int n) {
  lanes x = {.i = a};
  EACH(ihalf, _mm256_srli_epi16(x.ihalf[h], n)).i;
}
EMULATED_512 __m512i emu_mask_srli16(__m512i src, __mmask32 k, __m512i a, int n) {
  lanes r = {.i = src}, x = {.i = a};
  for (int i = 0; i < 32; i++) if (k >> i & 1) r.w[i] = (uint16_t)(x.w[i] >> n);
  return r.i;
}
EMULATED_512 __m512 emu_cvtepi32_ps(__m512i a) { lanes x = {.i = a}; EACH(half, _mm256_cvtepi32_ps(x.ihalf[h])).f; }
EMULATED_512 __m512i emu_cvtps_epi32(__m512 a) { lanes x = {.f = a}; EACH(ihalf, _mm256_cvtps_epi32(x.half[h])).i; }
EMULATED_512 __m512i emu_cvtepu16_epi32(__m256i a) {
  lanes x = {.ihalf = {a}};
  EACH(ihalf, _mm256_cvtepu16_epi32(x.quarter[h])).i;
}
EMULATED_512 __m512 emu_cvtph_ps(__m256i a) { lanes x = {.ihalf = {a}}; EACH(half, _mm256_cvtph_ps(x.quarter[h])).f; }
EMULATED_512 __m512i emu_cvtepi8_epi32(__m128i a) {
  lanes x = {.quarter = {a}}, r;
  for (int i = 0; i < 16; i++) r.d[i] = x.b[i];
  return r.i;
}
EMULATED_512 __m512i emu_cvtepu8_epi32(__m128i a) {
  lanes x = {.quarter = {a}}, r;
  for (int i = 0; i < 16; i++) r.d[i] = x.ub[i];
  return r.i;
}
EMULATED_512 __m128i emu_cvtsepi32_epi8(__m512i a) {
  lanes x = {.i = a}, r;
  for (int i = 0; i < 16; i++) r.b[i] = (int8_t)(x.d[i] < -128 ? -128 : x.d[i] > 127 ? 127 : x.d[i]);
  return r.quarter[0];
}
EMULATED_512 __m512 emu_permutexvar_ps(__m512i at, __m512 a) {
  lanes x = {.f = a}, k = {.i = at}, r;
  for (int i = 0; i < 16; i++) r.s[i] = x.s[k.u[i] & 15];
  return r.f;
}
EMULATED_512 __m512 emu_permutex2var_ps(__m512 a, __m512i at, __m512 b) {
  lanes x = {.f = a}, y = {.f = b}, k = {.i = at}, r;
  for (int i = 0; i < 16; i++) r.s[i] = (k.u[i] & 16 ? y : x).s[k.u[i] & 15];
  return r.f;
}
EMULATED_512 __m512i emu_shuffle_i32x4(__m512i a, __m512i b, int m) {
  lanes x = {.i = a}, y = {.i = b}, r;
  r.quarter[0] = x.quarter[m & 3], r.quarter[1] = x.quarter[m >> 2 & 3];
  r.quarter[2] = y.quarter[m >> 4 & 3], r.quarter[3] = y.quarter[m >> 6 & 3];
  return r.i;
}
EMULATED_512 __m512i emu_broadcast_i32x4(__m128i a) {
  lanes r;
  for (int i = 0; i < 4; i++) r.quarter[i] = a;
  return r.i;
}
EMULATED_512 __m512i emu_broadcast_i64x4(__m256i a) { EACH(ihalf, a).i; }
EMULATED_512 __m512 emu_set1_ps(float a) { EACH(half, _mm256_set1_ps(a)).f; }
EMULATED_512 __m512i emu_set1_epi32(int a) { EACH(ihalf, _mm256_set1_epi32(a)).i; }
EMULATED_512 __m512i emu_set1_epi8(char a) { EACH(ihalf, _mm256_set1_epi8(a)).i; }
EMULATED_512 __m512i emu_load(const void *p) { lanes r; memcpy(&r, p, 64); return r.i; }
EMULATED_512 void emu_store(void *p, __m512i a) { memcpy(p, &a, 64); }
EMULATED_512 __m512i emu_maskz_load(uint32_t k, const void *p, int bytes) {
  lanes r = {.q = {0}};
  for (int i = 0; i < 64 / bytes; i++)
    if (k >> i & 1) memcpy(r.b + i * bytes, (const char *)p + i * bytes, (size_t)bytes);
  return r.i;
}
EMULATED_512 void emu_mask_store(void *p, uint32_t k, __m512i a) {
  lanes x = {.i = a};
  for (int i = 0; i < 16; i++) if (k >> i & 1) memcpy((char *)p + i * 4, x.d + i, 4);
}
EMULATED_512 __m512 emu_gather(__m512i at, const void *p, int scale) {
  lanes k = {.i = at}, r;
  for (int i = 0; i < 16; i++) memcpy(r.s + i, (const char *)p + (int64_t)k.d[i] * scale, 4);
  return r.f;
}
EMULATED_512 __mmask16 emu_not_less(__m512 a, __m512 b) {
  lanes x = {.f = a}, y = {.f = b};
  uint32_t k = 0;
  for (int i = 0; i < 16; i++) k |= (uint32_t)!(x.s[i] < y.s[i]) << i;
  return (__mmask16)k;
}
EMULATED_512 __m512 emu_maskz_scalef(__mmask16 k, __m512 a, __m512 b) {
  lanes x = {.f = a}, y = {.f = b}, r;
  for (int i = 0; i < 16; i++) {
    const float n = y.s[i];
    r.s[i] = !(k >> i & 1) ? 0.0f : n != n ? n : scalbnf(x.s[i], n < -400 ? -400 : n > 400 ? 400 : (int)floorf(n));
  }
  return r.f;
}
EMULATED_512 float emu_reduce_add(__m512 a) {
  lanes x = {.f = a};
  float t[8], q[4];
  for (int i = 0; i < 8; i++) t[i] = x.s[i] + x.s[i + 8];
  for (int i = 0; i < 4; i++) q[i] = t[i] + t[i + 4];
  return (q[0] + q[2]) + (q[1] + q[3]);
}
EMULATED_512 float emu_reduce_max(__m512 a) {
  lanes x = {.f = a};
  float largest = x.s[0];
  for (int i = 1; i < 16; i++) largest = x.s[i] > largest ? x.s[i] : largest;
  return largest;
}
EMULATED_512 uint16_t emu_bf16(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  if (x != x) return (uint16_t)(u >> 16 | 0x40);
  if (!(u & 0x7f800000u)) return (uint16_t)(u >> 16 & 0x8000u);
  return (uint16_t)((u + 0x7fffu + (u >> 16 & 1)) >> 16);
}
EMULATED_512 __m256i emu_cvtneps_pbh(__m512 a) {
  lanes x = {.f = a}, r;
  for (int i = 0; i < 16; i++) r.w[i] = emu_bf16(x.s[i]);
  return r.ihalf[0];
}
EMULATED_512 __m512i emu_cvtne2ps_pbh(__m512 high, __m512 low) { EACH(ihalf, emu_cvtneps_pbh(h ? high : low)).i; }
EMULATED_512 __m512 emu_dpbf16_ps(__m512 sum, __m512i a, __m512i b) {
  const __m512i upper = emu_set1_epi32((int)0xffff0000u);
  sum = emu_fmadd_ps((__m512)emu_and_si512(a, upper), (__m512)emu_and_si512(b, upper), sum);
  return emu_fmadd_ps((__m512)emu_slli(a, 16), (__m512)emu_slli(b, 16), sum);
}
EMULATED_512 __m512i emu_dpbusd(__m512i sum, __m512i a, __m512i b) {
  lanes r = {.i = sum}, x = {.i = a}, y = {.i = b};
  for (int i = 0; i < 16; i++)
    for (int j = 0; j < 4; j++) r.d[i] += x.ub[4 * i + j] * y.b[4 * i + j];
  return r.i;
}

#define __m512bh __m512i
#define __m256bh __m256i
#define _mm512_add_ps emu_add_ps
#define _mm512_sub_ps emu_sub_ps
#define _mm512_mul_ps emu_mul_ps
#define _mm512_div_ps emu_div_ps
#define _mm512_min_ps emu_min_ps
#define _mm512_max_ps emu_max_ps
#define _mm512_sqrt_ps emu_sqrt_ps
#define _mm512_fmadd_ps emu_fmadd_ps
#define _mm512_fnmadd_ps emu_fnmadd_ps
#define _mm512_abs_ps(a) ((__m512)emu_and_si512((__m512i)(a), emu_set1_epi32(0x7fffffff)))
#undef _mm512_roundscale_ps
#define _mm512_roundscale_ps(a, how) emu_round(a, (how) & 3)
#undef _mm512_reduce_ps
#define _mm512_reduce_ps(a, how) emu_reduce(a, (how) & 3)
#define _mm512_and_si512 emu_and_si512
#define _mm512_or_si512 emu_or_si512
#define _mm512_add_epi32 emu_add_epi32
#define _mm512_sub_epi32 emu_sub_epi32
#define _mm512_min_epi32 emu_min_epi32
#define _mm512_max_epi32 emu_max_epi32
#define _mm512_shuffle_epi8 emu_shuffle_epi8
#define _mm512_unpacklo_epi8 emu_unpacklo_epi8
#define _mm512_unpackhi_epi8 emu_unpackhi_epi8
#define _mm512_unpacklo_epi16 emu_unpacklo_epi16
#define _mm512_unpackhi_epi16 emu_unpackhi_epi16
#define _mm512_unpacklo_epi32 emu_unpacklo_epi32
#define _mm512_unpackhi_epi32 emu_unpackhi_epi32
#define _mm512_unpacklo_epi64 emu_unpacklo_epi64
#define _mm512_unpackhi_epi64 emu_unpackhi_epi64
#define _mm512_unpacklo_ps emu_unpacklo_ps
#define _mm512_unpackhi_ps emu_unpackhi_ps
#define _mm512_unpacklo_pd(a, b) ((__m512d)emu_unpacklo_epi64((__m512i)(a), (__m512i)(b)))
#define _mm512_unpackhi_pd(a, b) ((__m512d)emu_unpackhi_epi64((__m512i)(a), (__m512i)(b)))
#undef _mm512_slli_epi32
#define _mm512_slli_epi32(a, n) emu_slli(a, n)
#undef _mm512_srli_epi32
#define _mm512_srli_epi32(a, n) emu_srli(a, n)
#undef _mm512_srli_epi16
#define _mm512_srli_epi16(a, n) emu_srli16(a, n)
#undef _mm512_mask_srli_epi16
#define _mm512_mask_srli_epi16 emu_mask_srli16
#define _mm512_cvtepi32_ps emu_cvtepi32_ps
#define _mm512_cvtps_epi32 emu_cvtps_epi32
#define _mm512_cvtepu16_epi32 emu_cvtepu16_epi32
#define _mm512_cvtepi8_epi32 emu_cvtepi8_epi32
#define _mm512_cvtepu8_epi32 emu_cvtepu8_epi32
#define _mm512_cvtph_ps emu_cvtph_ps
#define _mm512_cvtsepi32_epi8 emu_cvtsepi32_epi8
#define _mm512_permutexvar_ps emu_permutexvar_ps
#define _mm512_permutex2var_ps emu_permutex2var_ps
#undef _mm512_shuffle_i32x4
#define _mm512_shuffle_i32x4 emu_shuffle_i32x4
#define _mm512_broadcast_i32x4 emu_broadcast_i32x4
#define _mm512_broadcast_i64x4 emu_broadcast_i64x4
#define _mm512_set1_ps emu_set1_ps
#define _mm512_set1_epi32 emu_set1_epi32
#define _mm512_set1_epi8 emu_set1_epi8
#define _mm512_setzero_ps() emu_set1_ps(0.0f)
#define _mm512_setzero_si512() emu_set1_epi32(0)
#define _mm512_setr_ps(...) ((lanes){.s = {__VA_ARGS__}}.f)
#undef _mm512_setr_epi32
#define _mm512_setr_epi32(...) ((lanes){.d = {__VA_ARGS__}}.i)
#undef _mm512_setr_epi64
#define _mm512_setr_epi64(...) ((lanes){.q = {__VA_ARGS__}}.i)
#define _mm512_load_ps(p) ((__m512)emu_load(p))
#define _mm512_loadu_ps(p) ((__m512)emu_load(p))
#define _mm512_load_si512 emu_load
#define _mm512_loadu_si512 emu_load
#define _mm512_store_ps(p, a) emu_store(p, (__m512i)(a))
#define _mm512_storeu_ps(p, a) emu_store(p, (__m512i)(a))
#define _mm512_stream_ps(p, a) emu_store(p, (__m512i)(a))
#define _mm512_store_si512(p, a) emu_store(p, (__m512i)(a))
#define _mm512_storeu_si512(p, a) emu_store(p, (__m512i)(a))
#define _mm512_maskz_loadu_epi16(k, p) emu_maskz_load(k, p, 2)
#define _mm512_maskz_loadu_epi32(k, p) emu_maskz_load(k, p, 4)
#define _mm512_maskz_loadu_ps(k, p) ((__m512)emu_maskz_load(k, p, 4))
#define _mm512_mask_storeu_ps(p, k, a) emu_mask_store(p, k, (__m512i)(a))
#define _mm512_mask_storeu_epi32(p, k, a) emu_mask_store(p, k, a)
#undef _mm512_i32gather_ps
#define _mm512_i32gather_ps emu_gather
#undef _mm512_cmp_ps_mask
#define _mm512_cmp_ps_mask(a, b, how) ((void)sizeof(char[(how) == _CMP_NLT_UQ ? 1 : -1]), emu_not_less(a, b))
#define _mm512_maskz_scalef_ps emu_maskz_scalef
#define _mm512_reduce_add_ps emu_reduce_add
#define _mm512_reduce_max_ps emu_reduce_max
#define _mm512_castsi512_ps(a) ((__m512)(a))
#define _mm512_castps_pd(a) ((__m512d)(a))
#define _mm512_castpd_ps(a) ((__m512)(a))
#define _mm512_castps512_ps256(a) ((lanes){.f = (a)}.half[0])
#undef _mm512_extractf32x8_ps
#define _mm512_extractf32x8_ps(a, n) ((lanes){.f = (a)}.half[n])
#define _mm512_cvtss_f32(a) ((lanes){.f = (a)}.s[0])
#define _mm512_cvtneps_pbh emu_cvtneps_pbh
#define _mm512_cvtne2ps_pbh emu_cvtne2ps_pbh
#define _mm512_dpbf16_ps emu_dpbf16_ps
#define _mm512_dpbusd_epi32 emu_dpbusd
#define target(...)
#endif
#undef __builtin_cpu_supports
#define __builtin_cpu_supports(name) 1 /* also where the portable variant is asked what the processor runs */
