/* Eight floats: AVX2, FMA and F16C. */
#include <immintrin.h>

#define VL 8
typedef __m256 vf;

INLINE vf vf_zero(void) { return _mm256_setzero_ps(); }
INLINE vf vf_set1(float x) { return _mm256_set1_ps(x); }
INLINE vf vf_load(const float *p) { return _mm256_loadu_ps(p); }
INLINE void vf_store(float *p, vf x) { _mm256_storeu_ps(p, x); }
INLINE void vf_stream(float *p, vf x) { _mm256_stream_ps(p, x); } /* past the caches; p is aligned */
/* Eight vectors of eight lanes: lane j of vector i becomes lane i of vector j. */
INLINE void vf_transpose(vf *r) {
  vf t[8], u[8];
  UNROLL for (int i = 0; i < 8; i += 2) {
    t[i] = _mm256_unpacklo_ps(r[i], r[i + 1]);
    t[i + 1] = _mm256_unpackhi_ps(r[i], r[i + 1]);
  }
  UNROLL for (int i = 0; i < 8; i += 4) /* u[i + j]: of four vectors, the lanes j and 4 + j */
    UNROLL for (int j = 0; j < 2; j++) {
      u[i + 2 * j] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0x44);
      u[i + 2 * j + 1] = _mm256_shuffle_ps(t[i + j], t[i + 2 + j], 0xee);
    }
  UNROLL for (int j = 0; j < 4; j++) {
    r[j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x20);
    r[4 + j] = _mm256_permute2f128_ps(u[j], u[4 + j], 0x31);
  }
}
INLINE vf vf_load_bf16(const uint16_t *p) {
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16));
}
INLINE vf vf_load_f16(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p)); }
INLINE vf vf_load_int8(const int8_t *p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i *)p)));
}
/* The low and the high half of each byte; its four quarters. */
INLINE vf from_middle(__m256i codes, float middle) {
  return _mm256_sub_ps(_mm256_cvtepi32_ps(codes), _mm256_set1_ps(middle));
}
INLINE void vf_load_fields4(const uint8_t *p, vf *fields) {
  __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  fields[0] = from_middle(_mm256_and_si256(bytes, _mm256_set1_epi32(15)), 7.5f);
  fields[1] = from_middle(_mm256_srli_epi32(bytes, 4), 7.5f);
}
INLINE void vf_load_fields2(const uint8_t *p, vf *fields) {
  const __m256i three = _mm256_set1_epi32(3);
  __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  fields[0] = from_middle(_mm256_and_si256(bytes, three), 1.5f);
  fields[1] = from_middle(_mm256_and_si256(_mm256_srli_epi32(bytes, 2), three), 1.5f);
  fields[2] = from_middle(_mm256_and_si256(_mm256_srli_epi32(bytes, 4), three), 1.5f);
  fields[3] = from_middle(_mm256_srli_epi32(bytes, 6), 1.5f);
}
/* The third bits of two bytes of quarters are in one. */
INLINE void vf_load_fields3(const uint8_t *p, const uint8_t *third, vf *fields) {
  int32_t pairs;
  memcpy(&pairs, third, 4);
  const __m128i both = _mm_cvtsi32_si128(pairs);
  __m256i bytes = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)p));
  __m256i high = _mm256_slli_epi32(_mm256_cvtepu8_epi32(_mm_unpacklo_epi8(both, both)), 2);
  high = _mm256_srlv_epi32(high, _mm256_setr_epi32(0, 4, 0, 4, 0, 4, 0, 4));
  UNROLL for (int f = 0; f < 4; f++) {
    const __m256i low = _mm256_and_si256(_mm256_srli_epi32(bytes, 2 * f), _mm256_set1_epi32(3));
    const __m256i four = _mm256_and_si256(_mm256_srli_epi32(high, f), _mm256_set1_epi32(4));
    fields[f] = from_middle(_mm256_or_si256(low, four), 3.5f);
  }
}
/* A span of bfloat12.h, in order. */
INLINE void vf_load_bfloat12(const uint8_t *lows, const uint8_t *codes, const uint8_t *table, vf *out) {
  const __m256i highs = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i *)table));
  const __m256i both = _mm256_loadu_si256((const __m256i *)codes), odd = _mm256_set1_epi32((int)0xffff0000u);
  UNROLL for (int s = 0; s < 2; s++) { /* the second half of the codes is in the upper four bits */
    __m256i code = _mm256_and_si256(s ? _mm256_srli_epi16(both, 4) : both, _mm256_set1_epi8(15));
    __m256i low = _mm256_loadu_si256((const __m256i *)(lows + 32 * s)), high = _mm256_shuffle_epi8(highs, code);
    __m256i words[2] = {_mm256_unpacklo_epi8(low, high), _mm256_unpackhi_epi8(low, high)};
    UNROLL for (int h = 0; h < 2; h++) {
      out[4 * h + s] = _mm256_castsi256_ps(_mm256_slli_epi32(words[h], 16));
      out[4 * h + 2 + s] = _mm256_castsi256_ps(_mm256_and_si256(words[h], odd));
    }
  }
}
INLINE vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
INLINE vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
INLINE vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
INLINE vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
INLINE vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
INLINE vf vf_sqrt(vf a) { return _mm256_sqrt_ps(a); }
INLINE vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
INLINE vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }

/* The sums of four vectors, each in the same order. */
INLINE void vf_sum4(vf a, vf b, vf c, vf d, float out[4]) {
  vf abcd = _mm256_hadd_ps(_mm256_hadd_ps(a, b), _mm256_hadd_ps(c, d));
  _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(abcd), _mm256_extractf128_ps(abcd, 1)));
}
INLINE float vf_sum(vf a) {
  float out[4];
  vf_sum4(a, a, a, a, out);
  return out[0];
}
INLINE float vf_largest(vf a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_shuffle_ps(m, m, 1)));
}

INLINE vf vf_exp(vf x) { /* exactly 0 below -87, as masked scores need */
  vf t = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.0f), x));
  vf n = _mm256_round_ps(_mm256_mul_ps(t, _mm256_set1_ps(1.44269504f)), _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  vf r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), t);
  r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
  vf p = _mm256_set1_ps(1.9875691500e-4f);
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.3981999507e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(8.3334519073e-3f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(4.1665795894e-2f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(1.6666665459e-1f));
  p = _mm256_fmadd_ps(p, r, _mm256_set1_ps(5.0000001201e-1f));
  p = _mm256_fmadd_ps(p, _mm256_mul_ps(r, r), _mm256_add_ps(r, _mm256_set1_ps(1)));
  __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  vf kept = _mm256_cmp_ps(x, _mm256_set1_ps(-87.0f), _CMP_NLT_UQ); /* a NaN stays one */
  return _mm256_and_ps(kept, _mm256_mul_ps(p, _mm256_castsi256_ps(power)));
}

INLINE vf vf_round_to_int8(int8_t *out, vf x) { /* to nearest even, -127..127; and what it is as floats */
  const __m256i most = _mm256_set1_epi32(127), least = _mm256_set1_epi32(-127);
  const __m256i i = _mm256_max_epi32(least, _mm256_min_epi32(most, _mm256_cvtps_epi32(x)));
  const __m128i words = _mm_packs_epi32(_mm256_castsi256_si128(i), _mm256_extracti128_si256(i, 1));
  _mm_storel_epi64((__m128i *)out, _mm_packs_epi16(words, words));
  return _mm256_cvtepi32_ps(i);
}

/* Sixteen outputs of a quantized block: two halves of eight. */
typedef struct { __m256 lo, hi; } f16x;
/* Whether products of bytes, one of the two without a sign, are added by fours in 32 bits, without saturation. */
#ifdef LMSTATE_AVXVNNI
enum { VNNI = 1 };
#define add_quads _mm256_dpbusd_avx_epi32
#else
enum { VNNI = 0 };
#define add_quads(sums, w, x) ((void)(w), (void)(x), (sums)) /* never called */
#endif
/* Of activations of two bytes: inputs 4q, 4q + 2 (parity 0) and 4q + 1, 4q + 3 (1) of sixteen outputs, two halves of
 * eight, as 16 bits. Of one byte, and of two with VNNI: inputs 4q..4q + 3 as bytes (parity 0), without a sign; but with
 * one for 8 bits without VNNI. */
typedef struct { __m256i w[GROUP / 4][2][2]; } group;

INLINE f16x f16x_zero(void) { f16x r = {_mm256_setzero_ps(), _mm256_setzero_ps()}; return r; }
INLINE f16x f16x_load(const float *p) {
  f16x r = {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)};
  return r;
}
INLINE f16x f16x_load_f16(const uint8_t *p) {
  f16x r = {vf_load_f16((const uint16_t *)p), vf_load_f16((const uint16_t *)p + 8)};
  return r;
}
INLINE f16x f16x_fma1(f16x a, float b, f16x c) {
  __m256 s = _mm256_set1_ps(b);
  f16x r = {_mm256_fmadd_ps(a.lo, s, c.lo), _mm256_fmadd_ps(a.hi, s, c.hi)};
  return r;
}
INLINE f16x f16x_fma(f16x a, f16x b, f16x c) {
  f16x r = {_mm256_fmadd_ps(a.lo, b.lo, c.lo), _mm256_fmadd_ps(a.hi, b.hi, c.hi)};
  return r;
}
INLINE void f16x_store(float *p, f16x x) { _mm256_storeu_ps(p, x.lo); _mm256_storeu_ps(p + 8, x.hi); }

INLINE group unpack4(const uint8_t *p, int bytes) {
  group g;
  if (VNNI) bytes = 1;
  const __m256i low = bytes == 1 ? _mm256_set1_epi8(15) : _mm256_set1_epi16(15);
  UNROLL for (int q = 0; q < GROUP / 4; q += 2)
    UNROLL for (int half = 0; half < 2; half++) {
      const __m256i b = _mm256_loadu_si256((const __m256i *)(p + 32 * q + 32 * half));
      if (bytes == 1) {
        g.w[q][0][half] = _mm256_and_si256(b, low);
        g.w[q + 1][0][half] = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
        continue;
      }
      g.w[q][0][half] = _mm256_and_si256(b, low);
      g.w[q][1][half] = _mm256_and_si256(_mm256_srli_epi16(b, 8), low);
      g.w[q + 1][0][half] = _mm256_and_si256(_mm256_srli_epi16(b, 4), low);
      g.w[q + 1][1][half] = _mm256_srli_epi16(b, 12);
    }
  return g;
}
INLINE group unpack8(const uint8_t *p, int bytes) {
  group g;
  UNROLL for (int q = 0; q < GROUP / 4; q++)
    UNROLL for (int half = 0; half < 2; half++) {
      const __m256i b = _mm256_loadu_si256((const __m256i *)(p + 64 * q + 32 * half));
      if (VNNI || bytes == 1) {
        g.w[q][0][half] = VNNI ? b : _mm256_xor_si256(b, _mm256_set1_epi8(-128));
        continue;
      }
      g.w[q][0][half] = _mm256_and_si256(b, _mm256_set1_epi16(255));
      g.w[q][1][half] = _mm256_srli_epi16(b, 8);
    }
  return g;
}
/* In place of its bytes, the activations of a group as 16 bits: even inputs, then odd ones, so that 32 bits of either
 * are what four bytes of weights give when they are taken apart by parity. */
INLINE void join_parts(rounded *x) {
  if (VNNI) return;
  const __m256i high = _mm256_loadu_si256((const __m256i *)x->q[0]);
  const __m256i low = _mm256_loadu_si256((const __m256i *)x->q[1]);
  const __m256i even = _mm256_add_epi16(_mm256_slli_epi16(high, 8), _mm256_srai_epi16(_mm256_slli_epi16(low, 8), 8));
  const __m256i odd = _mm256_add_epi16(_mm256_slli_epi16(_mm256_srli_epi16(high, 8), 8), _mm256_srai_epi16(low, 8));
  _mm256_storeu_si256((__m256i *)x->q[0], even);
  _mm256_storeu_si256((__m256i *)x->q[1], odd);
}
/* Rows whose sums are in registers together. */
enum { TOGETHER = 4 };
/* Adds the products of four inputs to the sums of `rows` rows. */
INLINE void quad_dots(const group *g, const rounded *x, int q, int rows, __m256i (*sums)[2]) {
  UNROLL for (int parity = 0; parity < 2; parity++)
    UNROLL for (int m = 0; m < rows; m++) {
      int32_t both;
      memcpy(&both, x[m].q[parity] + 4 * q, 4);
      const __m256i pair = _mm256_set1_epi32(both);
      UNROLL for (int half = 0; half < 2; half++) {
        sums[m][half] = _mm256_add_epi32(sums[m][half], _mm256_madd_epi16(g->w[q][parity][half], pair));
        __asm__("" : "+x"(sums[m][half])); /* or GCC adds all products as a tree, through memory */
      }
    }
}
/* The same of activations of one byte. Pairs of products are added in 16 bits, with saturation that they never reach:
 * with weights of 4 bits all 16 of a group make 16 * 15 * 127 at most, and stay in 16 bits; with weights of 8 bits a
 * pair makes 2 * 128 * 127, after the weight's sign went to the activation, and goes to 32 bits at once. */
INLINE void quad_byte_dots(const group *g, const rounded *x, int q, int rows, int bits, __m256i (*sums)[2]) {
  UNROLL for (int m = 0; m < rows; m++) {
    int32_t four;
    memcpy(&four, rounded_at(x, m, 1)->q[0] + 4 * q, 4);
    const __m256i quad = _mm256_set1_epi32(four);
    UNROLL for (int half = 0; half < 2; half++) {
      const __m256i w = g->w[q][0][half];
      if (bits == 4) {
        sums[m][half] = _mm256_add_epi16(sums[m][half], _mm256_maddubs_epi16(w, quad));
      } else {
        const __m256i pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(w), _mm256_sign_epi8(quad, w));
        sums[m][half] = _mm256_add_epi32(sums[m][half], _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
      }
      __asm__("" : "+x"(sums[m][half])); /* as above */
    }
  }
}
/* Either byte of the activations has sums of its own. */
INLINE void vnni_dots(const group *g, const rounded *x, int rows, int bytes, __m256i (*sums)[2]) {
  __m256i each[2][TOGETHER][2];
  UNROLL for (int part = 0; part < bytes; part++) {
    UNROLL for (int m = 0; m < rows; m++) each[part][m][0] = each[part][m][1] = _mm256_setzero_si256();
    UNROLL for (int q = 0; q < GROUP / 4; q++)
      UNROLL for (int m = 0; m < rows; m++) {
        int32_t four;
        memcpy(&four, rounded_at(x, m, bytes)->q[part] + 4 * q, 4);
        const __m256i quad = _mm256_set1_epi32(four);
        UNROLL for (int half = 0; half < 2; half++)
          each[part][m][half] = add_quads(each[part][m][half], g->w[q][0][half], quad);
      }
  }
  UNROLL for (int m = 0; m < rows; m++)
    UNROLL for (int half = 0; half < 2; half++)
      sums[m][half] = bytes == 1 ? each[0][m][half]
                                 : _mm256_add_epi32(_mm256_slli_epi32(each[0][m][half], 8), each[1][m][half]);
}
/* For each row, the sums of a group's products with each output's integers, of which 128 is the zero where they have 8
 * bits: exact, then a float. `rows`, `bits` and `bytes`, of an activation, are constants where this is called. */
INLINE void group_dots(const group *g, const rounded *x, int rows, int bits, int bytes, f16x *out) {
  UNROLL for (int first = 0; first < rows; first += TOGETHER) {
    const int count = rows - first < TOGETHER ? rows - first : TOGETHER;
    const rounded *own = rounded_at(x, first, bytes);
    __m256i sums[TOGETHER][2];
    UNROLL for (int m = 0; m < count; m++) sums[m][0] = sums[m][1] = _mm256_setzero_si256();
    if (VNNI)
      vnni_dots(g, own, count, bytes, sums);
    else if (bytes == 1)
      UNROLL for (int q = 0; q < GROUP / 4; q++) quad_byte_dots(g, own, q, count, bits, sums);
    else if (rows < TOGETHER) /* weights need not go through memory */
      UNROLL for (int q = 0; q < GROUP / 4; q++) quad_dots(g, own, q, count, sums);
    else
      _Pragma("GCC unroll 1") for (int q = 0; q < GROUP / 4; q++) quad_dots(g, own, q, count, sums);
    UNROLL for (int m = 0; m < count; m++)
      UNROLL for (int half = 0; half < 2; half++) {
        __m256i sum = sums[m][half];
        if (!VNNI && bytes == 1 && bits == 4) sum = _mm256_madd_epi16(sum, _mm256_set1_epi16(1));
        if ((VNNI || bytes == 2) && bits == 8)
          sum = _mm256_sub_epi32(sum, _mm256_set1_epi32(128 * rounded_at(own, m, bytes)->sum));
        *(half ? &out[first + m].hi : &out[first + m].lo) = _mm256_cvtepi32_ps(sum);
      }
  }
}
