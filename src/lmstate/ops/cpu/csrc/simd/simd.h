/* Vectors of floats, once for each variant: the kernels are written over these and compiled for each processor.
 *
 * Every function here does the same operations in the same order whatever surrounds it, so that a row's result does not
 * depend on what else is in the call. (The build therefore forbids -ffast-math and contraction.) */
#ifndef LMSTATE_SIMD_H
#define LMSTATE_SIMD_H

#include <math.h>
#include <stdint.h>
#include <string.h>

#define INLINE static inline __attribute__((always_inline))
/* Small loops over arrays of vectors must vanish, or the vectors live in memory. */
#define UNROLL _Pragma("GCC unroll 8")
/* Over rows whose vectors live in memory anyway (the portable ones of 16 floats), copies only cost time to compile. */
#if defined LMSTATE_AVX512 || defined LMSTATE_AVX2
#define UNROLL_ROWS UNROLL
#else
#define UNROLL_ROWS _Pragma("GCC unroll 1")
#endif
#define UNROLL16 _Pragma("GCC unroll 16")

/* How keys, values and float weights are stored; lmstate.ops.cpu has the same numbers. Then codes of keys and values,
 * of which a byte holds several: a vector of bytes is a vector of each of its fields, the lowest bits first, 0..n that
 * stand for -n/2..n/2. The third bits of CODES3 are in bytes of their own after those of the other two. */
enum { F32 = 0, BF16 = 1, F16 = 2, CODES8 = 3, CODES4 = 4, CODES3 = 5, CODES2 = 6 };
INLINE int size_of(int kind) { return kind == F32 ? 4 : kind <= F16 ? 2 : 1; }
INLINE int fields_of(int kind) { return kind == CODES4 ? 2 : kind >= CODES3 ? 4 : 1; }
INLINE int codes_of_bits(int64_t bits) { return bits == 8 ? CODES8 : bits == 4 ? CODES4 : bits == 3 ? CODES3 : CODES2; }
INLINE int bits_of_codes(int kind) { return kind == CODES8 ? 8 : kind == CODES4 ? 4 : kind == CODES3 ? 3 : 2; }

INLINE float from_bits(uint32_t u) { float f; memcpy(&f, &u, 4); return f; }
INLINE uint32_t to_bits(float f) { uint32_t u; memcpy(&u, &f, 4); return u; }
INLINE float bf16_to_float(uint16_t h) { return from_bits((uint32_t)h << 16); }

INLINE uint16_t float_to_bf16(float f) { /* round to nearest even; a NaN stays one */
  uint32_t u = to_bits(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return (uint16_t)((u >> 16) | 64);
  return (uint16_t)((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
}

INLINE float f16_to_float_bits(uint16_t h) {
  uint32_t sign = (uint32_t)(h & 0x8000) << 16, rest = h & 0x7fff;
  if (rest >= 0x7c00) return from_bits(sign | 0x7f800000u | (rest & 0x3ff) << 13);
  /* 2^112 moves the exponent's bias, and numbers below the smallest normal one come out right too. */
  return from_bits(sign | to_bits(from_bits(rest << 13) * 5.192296858534828e33f));
}

INLINE uint16_t float_to_f16_bits(float f) { /* round to nearest even */
  uint32_t u = to_bits(f), sign = (u >> 16) & 0x8000;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00);
  if (u >= 0x477ff000u) return (uint16_t)(sign | 0x7c00);
  if (u < 0x38800000u) { /* below the smallest normal: adding 0.5 leaves the multiple of 2^-24 in the low bits */
    float g = from_bits(u) + 0.5f;
    return (uint16_t)(sign | (to_bits(g) - 0x3f000000u));
  }
  return (uint16_t)(sign | ((u - 0x38000000u + 0xfffu + ((u >> 13) & 1)) >> 13));
}

/* A group of 32 activations in one byte each, x = scale * q[0], or in two, x = scale * (256 q[0] + q[1]), a product for
 * each byte. The second is left out of memory where there is one: groups are `rounded_size` apart. */
enum { GROUP = 32 };
typedef struct {
  int32_t sum; /* of the integers */
  float scale;
  float scaled_sum;   /* what the weights' minimum multiplies */
  int8_t q[2][GROUP]; /* -127..127 */
} rounded;
INLINE int64_t rounded_size(int bytes) { return (int64_t)sizeof(rounded) - (2 - bytes) * GROUP; }
INLINE const rounded *rounded_at(const rounded *x, int64_t group, int bytes) {
  return (const rounded *)((const char *)x + group * rounded_size(bytes));
}

/* Where input i of a span of bfloat12.h is in it: so that bytes which are put side by side, and then taken apart by
 * parity, come in order. */
INLINE int place_of(int i) { return 16 * (i / 4 % 4) + 8 * (i / 32) + 2 * (i % 4) + i / 16 % 2; }

#if defined(LMSTATE_AVX512)
#include "simd/avx512.h"
#elif defined(LMSTATE_AVX2)
#include "simd/avx2.h"
#else
#include "simd/portable.h"
#endif

/* Loaded once where it is multiplied several times: a compiler would scan the load into each product. */
INLINE vf vf_in_register(vf x) {
#if defined(LMSTATE_AVX512)
  __asm__("" : "+v"(x));
#elif defined(LMSTATE_AVX2)
  __asm__("" : "+x"(x));
#endif
  return x;
}

/* VL numbers at element i of an array stored as `kind`; the first n of them, and zeros, where n < VL. */
INLINE vf load(int kind, const void *base, int64_t i) {
  if (kind == F32) return vf_load((const float *)base + i);
  if (kind == BF16) return vf_load_bf16((const uint16_t *)base + i);
  if (kind == F16) return vf_load_f16((const uint16_t *)base + i);
  return vf_load_int8((const int8_t *)base + i);
}

INLINE vf load_part(int kind, const void *base, int64_t i, int n) {
  if (kind == F32) {
    float buffer[VL] = {0};
    memcpy(buffer, (const float *)base + i, (size_t)n * 4);
    return vf_load(buffer);
  }
  uint16_t buffer[VL] = {0};
  memcpy(buffer, (const char *)base + i * (kind > F16 ? 1 : 2), (size_t)n * (kind > F16 ? 1 : 2));
  return load(kind, buffer, 0);
}

/* Of the vector that begins at element i, whose fields have `part` numbers each: those from d on. */
INLINE void load_fields(int kind, const void *base, int64_t i, int64_t part, int64_t d, vf *fields) {
  const uint8_t *codes = (const uint8_t *)base + i;
  if (kind == CODES4) vf_load_fields4(codes + d, fields);
  else if (kind == CODES3) vf_load_fields3(codes + d, codes + part + d / 2, fields);
  else if (kind == CODES2) vf_load_fields2(codes + d, fields);
  else fields[0] = load(kind, base, i + d);
}

INLINE void load_fields_part(int kind, const void *base, int64_t i, int64_t part, int64_t d, int n, vf *fields) {
  if (kind <= CODES8) {
    fields[0] = load_part(kind, base, i + d, n);
    return;
  }
  uint8_t buffer[2 * VL] = {0};
  const uint8_t *codes = (const uint8_t *)base + i;
  memcpy(buffer, codes + d, (size_t)n);
  if (kind == CODES3) memcpy(buffer + VL, codes + part + d / 2, (size_t)n / 2);
  load_fields(kind, buffer, 0, VL, 0, fields);
}

INLINE void floats_of_f16(const uint16_t *x, float *y, int64_t n) { /* y has room for VL more */
  int64_t i = 0;
  for (; i + VL <= n; i += VL) vf_store(y + i, vf_load_f16(x + i));
  if (i < n) vf_store(y + i, load_part(F16, x, i, (int)(n - i)));
}

INLINE void store_part(float *p, vf x, int n) {
  float buffer[VL];
  vf_store(buffer, x);
  memcpy(p, buffer, (size_t)n * 4);
}

INLINE vf vf_sigmoid(vf x) {
  return vf_div(vf_set1(1), vf_add(vf_set1(1), vf_exp(vf_sub(vf_zero(), x))));
}

INLINE vf vf_tanh(vf x) { /* 1 - 2 / (exp(2x) + 1) */
  vf e = vf_exp(vf_add(x, x));
  return vf_sub(vf_set1(1), vf_div(vf_set1(2), vf_add(e, vf_set1(1))));
}

#endif
