/* The RMS norm after a recurrence and the gate beside it, a group of features at a time. */
#include "recurrent/recurrent.h"
#include "layout.h"

INLINE vf gate_of(vf x, int64_t silu) { return silu ? activate(SILU, x) : vf_sigmoid(x); }

void gated_norm_group(const gated_norm_args *a, int64_t token, int64_t g) {
  const int64_t n = a->width, at = token * a->groups * n + g * n;
  const float *y = a->y + at, *weight = a->weight + g * n % (a->weight ? a->weights : 1);
  const float *gate = a->gate + token / a->tokens * a->gate_row + token % a->tokens * a->gate_token + g * n;
  float *out = a->out + at;
  vf sum = vf_zero();
  for (int64_t i = 0; i < n; i += VL) {
    vf x = load_some(y + i, n - i);
    if (!a->gate_last) {
      x = vf_mul(x, gate_of(load_some(gate + i, n - i), a->silu));
      store_some(out + i, x, n - i);
    }
    sum = vf_fma(x, x, sum);
  }
  if (!a->weight) return;
  const vf scale = vf_set1(1.0f / sqrtf(vf_sum(sum) / (float)n + (float)a->eps));
  const float *from = a->gate_last ? y : out;
  for (int64_t i = 0; i < n; i += VL) {
    vf x = vf_mul(vf_mul(load_some(from + i, n - i), scale), load_some(weight + i, n - i));
    if (a->gate_last) x = vf_mul(x, gate_of(load_some(gate + i, n - i), a->silu));
    store_some(out + i, x, n - i);
  }
}

void gated_norm_run(const gated_norm_args *a) {
  const int64_t tokens = a->rows * a->tokens;
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < tokens * a->groups; i++) {
    const int64_t token = i / a->groups;
    if (a->counts && token % a->tokens >= a->counts[token / a->tokens]) continue;
    gated_norm_group(a, token, i % a->groups);
  }
  team_barrier();
}

void lmstate_gated_norm(const gated_norm_args *a) {
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  gated_norm_run(a);
}

EXPORT_SIZE(gated_norm_args);
