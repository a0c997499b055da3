/* Sixteen floats: AVX-512 F, BW, VL, DQ and VNNI. */
#include <immintrin.h>

#define VL 16
typedef __m512 vf;

INLINE vf vf_zero(void) { return _mm512_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm512_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE void vf_store(float *p, vf x) { _mm512_storeu_ps(p, x); }
INLINE void vf_stream(float *p, vf x) { _mm512_stream_ps(p, x); } /* past the caches; p is aligned */
/* Sixteen vectors of sixteen lanes: lane j of vector i becomes lane i of vector j. */
INLINE void transpose16(__m512i *r) {
  __m512i t[16];
  UNROLL16 for (int i = 0; i < 16; i += 2) {
    t[i] = _mm512_unpacklo_epi32(r[i], r[i + 1]);
    t[i + 1] = _mm512_unpackhi_epi32(r[i], r[i + 1]);
  }
  UNROLL16 for (int i = 0; i < 16; i += 4) { /* r[i + j]: of four vectors, the lanes j, 4 + j, 8 + j, 12 + j */
    r[i] = _mm512_unpacklo_epi64(t[i], t[i + 2]);
    r[i + 1] = _mm512_unpackhi_epi64(t[i], t[i + 2]);
    r[i + 2] = _mm512_unpacklo_epi64(t[i + 1], t[i + 3]);
    r[i + 3] = _mm512_unpackhi_epi64(t[i + 1], t[i + 3]);
  }
  UNROLL16 for (int j = 0; j < 4; j++) {
    const __m512i even[2] = {
      _mm512_shuffle_i32x4(r[j], r[4 + j], 0x88), _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0x88)};
    const __m512i odd[2] = {
      _mm512_shuffle_i32x4(r[j], r[4 + j], 0xdd), _mm512_shuffle_i32x4(r[8 + j], r[12 + j], 0xdd)};
    t[j] = _mm512_shuffle_i32x4(even[0], even[1], 0x88);
    t[8 + j] = _mm512_shuffle_i32x4(even[0], even[1], 0xdd);
    t[4 + j] = _mm512_shuffle_i32x4(odd[0], odd[1], 0x88);
    t[12 + j] = _mm512_shuffle_i32x4(odd[0], odd[1], 0xdd);
  }
  UNROLL16 for (int i = 0; i < 16; i++) r[i] = t[i];
}
INLINE void vf_transpose(vf *r) {
  __m512i lanes[16];
  UNROLL16 for (int i = 0; i < 16; i++) lanes[i] = _mm512_castps_si512(r[i]);
  transpose16(lanes);
  UNROLL16 for (int i = 0; i < 16; i++) r[i] = _mm512_castsi512_ps(lanes[i]);
}
INLINE vf vf_load_bf16(const uint16_t *p) {
  __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}
INLINE vf vf_load_f16(const uint16_t *p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p)); }
INLINE vf vf_load_int8(const int8_t *p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)p)));
}
/* The low and the high half of each byte, from the middle of what they can be; its four quarters. A permutation looks
 * at four bits of an index. */
INLINE void vf_load_fields4(const uint8_t *p, vf *fields) {
  const vf values = _mm512_setr_ps(-7.5f, -6.5f, -5.5f, -4.5f, -3.5f, -2.5f, -1.5f, -0.5f,
                                   0.5f, 1.5f, 2.5f, 3.5f, 4.5f, 5.5f, 6.5f, 7.5f);
  __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  fields[0] = _mm512_permutexvar_ps(bytes, values);
  fields[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
}
INLINE void vf_load_fields2(const uint8_t *p, vf *fields) {
  const vf values = _mm512_setr_ps(-1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f,
                                   -1.5f, -0.5f, 0.5f, 1.5f, -1.5f, -0.5f, 0.5f, 1.5f);
  __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  fields[0] = _mm512_permutexvar_ps(bytes, values);
  fields[1] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 2), values);
  fields[2] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 4), values);
  fields[3] = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 6), values);
}
/* The third bits of two bytes of quarters are in one. */
INLINE void vf_load_fields3(const uint8_t *p, const uint8_t *third, vf *fields) {
  const vf values = _mm512_setr_ps(-3.5f, -2.5f, -1.5f, -0.5f, -3.5f, -2.5f, -1.5f, -0.5f,
                                   -3.5f, -2.5f, -1.5f, -0.5f, -3.5f, -2.5f, -1.5f, -0.5f);
  const __m128i both = _mm_loadl_epi64((const __m128i *)third);
  const __m512i high = _mm512_cvtepu8_epi32(_mm_unpacklo_epi8(both, both));
  const __m512i bytes = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)p));
  UNROLL for (int f = 0; f < 4; f++) {
    const vf low = _mm512_permutexvar_ps(_mm512_srli_epi32(bytes, 2 * f), values);
    const __mmask16 set = _mm512_test_epi32_mask(high, _mm512_set1_epi64(((int64_t)16 << f) << 32 | (int64_t)1 << f));
    fields[f] = _mm512_mask_add_ps(low, set, low, _mm512_set1_ps(4));
  }
}
/* A span of bfloat12.h, in order. */
INLINE void vf_load_bfloat12(const uint8_t *lows, const uint8_t *codes, const uint8_t *table, vf *out) {
  const __m512i highs = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)table));
  __m512i code = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)codes)), low = _mm512_loadu_si512(lows);
  code = _mm512_mask_srli_epi16(code, 0xffff0000u, code, 4); /* the second half of them is in the upper four bits */
  __m512i high = _mm512_shuffle_epi8(highs, _mm512_and_si512(code, _mm512_set1_epi8(15)));
  const __m512i odd = _mm512_set1_epi32((int)0xffff0000u);
  __m512i words[2] = {_mm512_unpacklo_epi8(low, high), _mm512_unpackhi_epi8(low, high)};
  UNROLL for (int h = 0; h < 2; h++) {
    out[2 * h] = _mm512_castsi512_ps(_mm512_slli_epi32(words[h], 16));
    out[2 * h + 1] = _mm512_castsi512_ps(_mm512_and_si512(words[h], odd));
  }
}
INLINE vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
INLINE vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
INLINE vf vf_sqrt(vf a) { return _mm512_sqrt_ps(a); }
INLINE vf vf_abs(vf a) { return _mm512_abs_ps(a); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
INLINE float vf_sum(vf a) { return _mm512_reduce_add_ps(a); }
INLINE float vf_largest(vf a) { return _mm512_reduce_max_ps(a); }

/* The sums of four vectors, each in the same order. */
INLINE void vf_sum4(vf a, vf b, vf c, vf d, float out[4]) {
  vf ab = _mm512_add_ps(_mm512_unpacklo_ps(a, b), _mm512_unpackhi_ps(a, b));
  vf cd = _mm512_add_ps(_mm512_unpacklo_ps(c, d), _mm512_unpackhi_ps(c, d));
  vf lo = _mm512_castpd_ps(_mm512_unpacklo_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
  vf hi = _mm512_castpd_ps(_mm512_unpackhi_pd(_mm512_castps_pd(ab), _mm512_castps_pd(cd)));
  vf abcd = _mm512_add_ps(lo, hi); /* each quarter holds a part of all four sums */
  __m256 half = _mm256_add_ps(_mm512_castps512_ps256(abcd), _mm512_extractf32x8_ps(abcd, 1));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(half), _mm256_extractf128_ps(half, 1)));
}

INLINE vf vf_exp(vf x) { /* exactly 0 below -87, as masked scores need */
  vf t = _mm512_min_ps(_mm512_set1_ps(88.0f), _mm512_max_ps(_mm512_set1_ps(-87.0f), x));
  vf n = _mm512_roundscale_ps(_mm512_mul_ps(t, _mm512_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT);
  vf r = _mm512_fnmadd_ps(n, _mm512_set1_ps(0.693359375f), t);
  r = _mm512_fnmadd_ps(n, _mm512_set1_ps(-2.12194440e-4f), r);
  vf p = _mm512_set1_ps(1.9875691500e-4f);
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.3981999507e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(8.3334519073e-3f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(4.1665795894e-2f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(1.6666665459e-1f));
  p = _mm512_fmadd_ps(p, r, _mm512_set1_ps(5.0000001201e-1f));
  p = _mm512_fmadd_ps(p, _mm512_mul_ps(r, r), _mm512_add_ps(r, _mm512_set1_ps(1)));
  __mmask16 kept = _mm512_cmp_ps_mask(x, _mm512_set1_ps(-87.0f), _CMP_NLT_UQ); /* a NaN stays one */
  return _mm512_maskz_scalef_ps(kept, p, n);
}

INLINE vf vf_round_to_int8(int8_t *out, vf x) { /* to nearest even, -127..127; and what it is as floats */
  const __m512i most = _mm512_set1_epi32(127), least = _mm512_set1_epi32(-127);
  const __m512i whole = _mm512_max_epi32(least, _mm512_min_epi32(most, _mm512_cvtps_epi32(x)));
  _mm_storeu_si128((__m128i *)out, _mm512_cvtsepi32_epi8(whole));
  return _mm512_cvtepi32_ps(whole);
}

/* Sixteen outputs of a quantized block. */
typedef __m512 f16x;
typedef struct { __m512i w[8]; } group; /* 8 x 4 inputs of 16 outputs, unsigned bytes */

INLINE f16x f16x_zero(void) { return _mm512_setzero_ps(); }
INLINE f16x f16x_load(const float *p) { return _mm512_loadu_ps(p); }
INLINE f16x f16x_load_f16(const uint8_t *p) { return vf_load_f16((const uint16_t *)p); }
INLINE f16x f16x_fma1(f16x a, float b, f16x c) { return _mm512_fmadd_ps(a, _mm512_set1_ps(b), c); }
INLINE f16x f16x_fma(f16x a, f16x b, f16x c) { return _mm512_fmadd_ps(a, b, c); }
INLINE void f16x_store(float *p, f16x x) { _mm512_storeu_ps(p, x); }

INLINE group unpack4(const uint8_t *p, int bytes) {
  group g;
  (void)bytes;
  const __m512i low = _mm512_set1_epi8(15);
  UNROLL for (int j = 0; j < 4; j++) {
    __m512i b = _mm512_loadu_si512(p + 64 * j);
    g.w[2 * j] = _mm512_and_si512(b, low);
    g.w[2 * j + 1] = _mm512_and_si512(_mm512_srli_epi16(b, 4), low);
  }
  return g;
}
INLINE group unpack8(const uint8_t *p, int bytes) {
  group g;
  (void)bytes;
  UNROLL for (int j = 0; j < 8; j++) g.w[j] = _mm512_loadu_si512(p + 64 * j);
  return g;
}
INLINE void join_parts(rounded *x) { (void)x; }
/* For each row, the sums of a group's products with each output's integers, of which 128 is the zero where they have 8
 * bits: exact, then a float. Rows are the inner loop and each byte has sums of its own: one alone would wait for
 * itself. `rows`, `bits` and `bytes`, of an activation, are constants where this is called. */
INLINE void group_dots(const group *g, const rounded *x, int rows, int bits, int bytes, f16x *out) {
  __m512i high[8], low[8];
  UNROLL for (int m = 0; m < rows; m++) high[m] = low[m] = _mm512_setzero_si512();
  UNROLL for (int j = 0; j < GROUP / 4; j++)
    UNROLL for (int m = 0; m < rows; m++) {
      const rounded *own = rounded_at(x, m, bytes);
      int32_t q[2];
      memcpy(q, own->q[0] + 4 * j, 4);
      high[m] = _mm512_dpbusd_epi32(high[m], g->w[j], _mm512_set1_epi32(q[0]));
      if (bytes == 1) continue;
      memcpy(q + 1, own->q[1] + 4 * j, 4);
      low[m] = _mm512_dpbusd_epi32(low[m], g->w[j], _mm512_set1_epi32(q[1]));
    }
  UNROLL for (int m = 0; m < rows; m++) {
    __m512i sum = bytes == 1 ? high[m] : _mm512_add_epi32(_mm512_slli_epi32(high[m], 8), low[m]);
    if (bits == 8) sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(128 * rounded_at(x, m, bytes)->sum));
    out[m] = _mm512_cvtepi32_ps(sum);
  }
}
