/* The RMS norm after a recurrence and the gate beside it, a group of features at a time. */
#include "recurrent.h"

typedef struct {
  const float *y;      /* [R, T, G * W], contiguous */
  const float *gate;   /* [R, T, G * W] by its strides, its last axis dense */
  const float *weight; /* [G * W], or [W] for every group alike */
  float *out;          /* as y */
  int64_t rows, tokens, groups, width, weights, silu, gate_last, threads;
  int64_t gate_row, gate_token;
  double eps;
} gated_norm_args;

INLINE vf gate_of(vf x, int64_t silu) { return silu ? activate(SILU, x) : vf_sigmoid(x); }

static void gated_norm(const gated_norm_args *a, const float *y, const float *gate, const float *weight, float *out) {
  const int64_t n = a->width;
  vf sum = vf_zero();
  for (int64_t i = 0; i < n; i += VL) {
    vf x = load_some(y + i, n - i);
    if (!a->gate_last) {
      x = vf_mul(x, gate_of(load_some(gate + i, n - i), a->silu));
      store_some(out + i, x, n - i);
    }
    sum = vf_fma(x, x, sum);
  }
  const vf scale = vf_set1(1.0f / sqrtf(vf_sum(sum) / (float)n + (float)a->eps));
  const float *from = a->gate_last ? y : out;
  for (int64_t i = 0; i < n; i += VL) {
    vf x = vf_mul(vf_mul(load_some(from + i, n - i), scale), load_some(weight + i, n - i));
    if (a->gate_last) x = vf_mul(x, gate_of(load_some(gate + i, n - i), a->silu));
    store_some(out + i, x, n - i);
  }
}

void lmstate_gated_norm(const gated_norm_args *a) {
  const int64_t row = a->groups * a->width;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t i = 0; i < a->rows * a->tokens; i++) {
    const float *gate = a->gate + i / a->tokens * a->gate_row + i % a->tokens * a->gate_token;
    for (int64_t g = 0; g < a->groups; g++) {
      const int64_t at = g * a->width;
      gated_norm(a, a->y + i * row + at, gate + at, a->weight + at % a->weights, a->out + i * row + at);
    }
  }
}
