/* Four floats: the compiler's own vectors, for any processor. */
#define VL 4
typedef float vf __attribute__((vector_size(16)));
typedef int32_t vi __attribute__((vector_size(16)));

INLINE vf vf_set1(float x) { vf r = {x, x, x, x}; return r; }
INLINE vf vf_zero(void) { return vf_set1(0); }
INLINE vf vf_load(const float *p) { vf r; memcpy(&r, p, 16); return r; }
INLINE void vf_store(float *p, vf x) { memcpy(p, &x, 16); }
INLINE void vf_stream(float *p, vf x) { vf_store(p, x); }
/* Lane j of vector i becomes lane i of vector j. */
INLINE void vf_transpose(vf *r) {
  for (int i = 0; i < VL; i++)
    for (int j = 0; j < i; j++) {
      const float x = r[i][j];
      r[i][j] = r[j][i], r[j][i] = x;
    }
}
INLINE vf vf_load_bf16(const uint16_t *p) {
  vf r = {bf16_to_float(p[0]), bf16_to_float(p[1]), bf16_to_float(p[2]), bf16_to_float(p[3])};
  return r;
}
INLINE vf vf_load_f16(const uint16_t *p) {
  vf r = {f16_to_float_bits(p[0]), f16_to_float_bits(p[1]), f16_to_float_bits(p[2]), f16_to_float_bits(p[3])};
  return r;
}
INLINE vf vf_load_int8(const int8_t *p) {
  vf r = {p[0], p[1], p[2], p[3]};
  return r;
}
/* The low and the high half of each byte; its four quarters. */
INLINE void vf_load_fields4(const uint8_t *p, vf *fields) {
  for (int i = 0; i < VL; i++) fields[0][i] = (float)(p[i] & 15) - 7.5f, fields[1][i] = (float)(p[i] >> 4) - 7.5f;
}
INLINE void vf_load_fields2(const uint8_t *p, vf *fields) {
  for (int f = 0; f < 4; f++)
    for (int i = 0; i < VL; i++) fields[f][i] = (float)(p[i] >> 2 * f & 3) - 1.5f;
}
/* The third bits of two bytes of quarters are in one. */
INLINE void vf_load_fields3(const uint8_t *p, const uint8_t *third, vf *fields) {
  for (int f = 0; f < 4; f++)
    for (int i = 0; i < VL; i++) {
      const int high = third[i / 2] >> (4 * (i % 2) + f) & 1;
      fields[f][i] = (float)((p[i] >> 2 * f & 3) + 4 * high) - 3.5f;
    }
}
/* A span of bfloat12.h, in order. */
INLINE void vf_load_bfloat12(const uint8_t *lows, const uint8_t *codes, const uint8_t *table, vf *out) {
  for (int i = 0; i < 64; i++) {
    const int at = place_of(i);
    const uint8_t high = table[at < 32 ? codes[at] & 15 : codes[at - 32] >> 4];
    out[i / VL][i % VL] = bf16_to_float((uint16_t)(high << 8 | lows[at]));
  }
}
INLINE vf vf_add(vf a, vf b) { return a + b; }
INLINE vf vf_sub(vf a, vf b) { return a - b; }
INLINE vf vf_mul(vf a, vf b) { return a * b; }
INLINE vf vf_div(vf a, vf b) { return a / b; }
INLINE vf vf_select(vi mask, vf a, vf b) { return (vf)((mask & (vi)a) | (~mask & (vi)b)); }
INLINE vf vf_max(vf a, vf b) { return vf_select(a > b, a, b); }
INLINE vf vf_sqrt(vf a) { vf r; UNROLL for (int i = 0; i < VL; i++) r[i] = sqrtf(a[i]); return r; }
INLINE vf vf_abs(vf a) { vi m = {0x7fffffff, 0x7fffffff, 0x7fffffff, 0x7fffffff}; return (vf)((vi)a & m); }
/* Rounded twice: a true one is a call where there is no unit. */
INLINE vf vf_fma(vf a, vf b, vf c) { return a * b + c; }
INLINE float vf_sum(vf a) { return (a[0] + a[1]) + (a[2] + a[3]); }
INLINE float vf_largest(vf a) {
  float x = a[0] > a[1] ? a[0] : a[1], y = a[2] > a[3] ? a[2] : a[3];
  return x > y ? x : y;
}
INLINE void vf_sum4(vf a, vf b, vf c, vf d, float out[4]) {
  out[0] = vf_sum(a), out[1] = vf_sum(b), out[2] = vf_sum(c), out[3] = vf_sum(d);
}
INLINE vf vf_exp(vf x) { /* exactly 0 below -87, as masked scores need */
  vf r;
  for (int i = 0; i < VL; i++) r[i] = x[i] < -87.0f ? 0.0f : expf(x[i] > 88.0f ? 88.0f : x[i]);
  return r;
}

INLINE vf vf_round_to_int8(int8_t *out, vf x) { /* to nearest even, -127..127; and what it is as floats */
  for (int i = 0; i < VL; i++) {
    float r = nearbyintf(x[i]);
    out[i] = (int8_t)(r > 127 ? 127 : r > -127 ? r : -127);
  }
  return vf_load_int8(out);
}

/* Sixteen outputs of a quantized block. */
typedef struct { float v[16]; } f16x;
typedef struct { uint8_t w[512]; } group; /* 8 x 4 inputs of 16 outputs */

INLINE f16x f16x_zero(void) { f16x r = {{0}}; return r; }
INLINE f16x f16x_load(const float *p) {
  f16x r;
  memcpy(r.v, p, 64);
  return r;
}
INLINE f16x f16x_load_f16(const uint8_t *p) {
  uint16_t h[16];
  memcpy(h, p, 32);
  f16x r;
  for (int i = 0; i < 16; i++) r.v[i] = f16_to_float_bits(h[i]);
  return r;
}
INLINE f16x f16x_fma1(f16x a, float b, f16x c) {
  for (int i = 0; i < 16; i++) c.v[i] += a.v[i] * b;
  return c;
}
INLINE f16x f16x_fma(f16x a, f16x b, f16x c) {
  for (int i = 0; i < 16; i++) c.v[i] += a.v[i] * b.v[i];
  return c;
}
INLINE void f16x_store(float *p, f16x x) { memcpy(p, x.v, 64); }

INLINE group unpack4(const uint8_t *p, int bytes) {
  group g;
  (void)bytes;
  for (int j = 0; j < 4; j++)
    for (int i = 0; i < 64; i++) {
      g.w[128 * j + i] = p[64 * j + i] & 15;
      g.w[128 * j + 64 + i] = p[64 * j + i] >> 4;
    }
  return g;
}
INLINE group unpack8(const uint8_t *p, int bytes) {
  group g;
  (void)bytes;
  memcpy(g.w, p, 512);
  return g;
}
INLINE void join_parts(rounded *x) { (void)x; }
/* For each row, the sums of a group's products with each output's integers, of which 128 is the zero where they have 8
 * bits: exact, then a float. `bytes`: of an activation. */
INLINE void group_dots(const group *g, const rounded *x, int rows, int bits, int bytes, f16x *out) {
  for (int m = 0; m < rows; m++) {
    const rounded *own = rounded_at(x, m, bytes);
    for (int n = 0; n < 16; n++) {
      int32_t sum = bits == 4 ? 0 : -128 * own->sum;
      for (int i = 0; i < GROUP; i++) {
        const int32_t q = bytes == 1 ? own->q[0][i] : 256 * own->q[0][i] + own->q[1][i];
        sum += g->w[64 * (i / 4) + 4 * n + i % 4] * q;
      }
      out[m].v[n] = (float)sum;
    }
  }
}
