/* What happens to a row of activations before a product: a norm or a gate. */
#ifndef LMSTATE_PROLOGUE_H
#define LMSTATE_PROLOGUE_H

#include "simd/simd.h"

/* lmstate.ops.cpu has the same numbers. */
enum { NO_GATE = 0, SILU = 1, GELU_TANH = 2, RELU = 3, RELU2 = 4, SWIGLUOAI = 5 };

INLINE vf activate(int gate, vf x) {
  switch (gate) {
    case SILU: return vf_mul(x, vf_sigmoid(x));
    case GELU_TANH: { /* x / 2 * (1 + tanh(u)) is x * sigmoid(2u), which does not cancel where u is negative */
      vf twice = vf_mul(x, vf_fma(vf_mul(x, x), vf_set1(0.071354816273f), vf_set1(1.595769121606f)));
      return vf_mul(x, vf_sigmoid(twice));
    }
    case RELU: return vf_max(vf_zero(), x);
    default: { vf r = vf_max(vf_zero(), x); return vf_mul(r, r); }
  }
}

INLINE vf vf_at_most(float most, vf x) { return vf_sub(vf_zero(), vf_max(vf_set1(-most), vf_sub(vf_zero(), x))); }

/* act(gate) * up, or what gpt-oss has for it; see lmstate.ops.glu. A NaN stays one. */
INLINE vf gated(int act, vf gate, vf up) {
  if (act != SWIGLUOAI) return vf_mul(activate(act, gate), up);
  gate = vf_at_most(7.0f, gate), up = vf_at_most(7.0f, vf_max(vf_set1(-7.0f), up));
  return vf_mul(vf_mul(vf_add(up, vf_set1(1)), gate), vf_sigmoid(vf_mul(vf_set1(1.702f), gate)));
}

/* y[i] = gated(gate[i], up[i]) */
static inline void gate_run(int act, const float *gate, const float *up, float *y, int64_t n) {
  int64_t i = 0;
  for (; i + VL <= n; i += VL) vf_store(y + i, gated(act, vf_load(gate + i), vf_load(up + i)));
  if (i < n) {
    int part = (int)(n - i);
    store_part(y + i, gated(act, load_part(F32, gate, i, part), load_part(F32, up, i, part)), part);
  }
}

/* 1 / sqrt(mean of squares + eps) */
static inline float rms_scale(const float *x, int64_t n, double eps) {
  vf a = vf_zero(), b = vf_zero();
  int64_t i = 0;
  for (; i + 2 * VL <= n; i += 2 * VL) {
    vf u = vf_load(x + i), w = vf_load(x + i + VL);
    a = vf_fma(u, u, a), b = vf_fma(w, w, b);
  }
  float sum = vf_sum(vf_add(a, b));
  for (; i < n; i++) sum += x[i] * x[i];
  return 1.0f / sqrtf(sum / (float)n + (float)eps);
}

/* y[i] = x[i] * rms_scale * weight[i] */
static inline void rms_norm_row(const float *x, const float *weight, float *y, int64_t n, double eps) {
  const float scale = rms_scale(x, n, eps);
  for (int64_t i = 0; i < n; i++) y[i] = x[i] * scale * weight[i];
}

#endif
