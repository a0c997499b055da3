/* The RG-LRU of Griffin: a_t = exp(-8 softplus(Lambda) sigmoid(r_t)), h_t = a_t h_{t-1} + sqrt(1 - a_t^2) sigmoid(i_t)
 * x_t, where the first token of a sequence is not scaled down. */
#include "recurrent/recurrent.h"
#include "layout.h"

typedef struct {
  const float *x, *input_gate, *recurrence_gate; /* [R, T, F] by their strides, their last axis dense */
  const float *parameter;                        /* [F], Lambda of the paper */
  const float *h, *seen;                         /* [R, F] and [R], contiguous */
  const int64_t *counts;                         /* [R] */
  float *y, *next, *next_seen;                   /* [R, T, F], [R, F] and [R], contiguous */
  int64_t rows, tokens, width, threads;
  int64_t x_row, x_token, input_row, input_token, recurrence_row, recurrence_token;
} rg_lru_args;

enum { FEATURES = 256 }; /* that a thread takes at a time */

/* 1 - exp(x) for x <= 0, exact near 0 too: a series of x / 32, doubled five times by 1 - (1 - m)^2 = m (2 - m). */
INLINE vf one_minus_exp(vf x) {
  const vf w = vf_mul(vf_max(x, vf_set1(-16)), vf_set1(-1.0f / 32)); /* 0 to 1/2; 1 - exp(-16) is 1 */
  vf p = vf_set1(1);
  UNROLL for (int i = 8; i > 1; i--) p = vf_sub(vf_set1(1), vf_mul(vf_mul(w, vf_set1(1.0f / (float)i)), p));
  vf m = vf_mul(w, p);
  UNROLL for (int i = 0; i < 5; i++) m = vf_mul(m, vf_sub(vf_set1(2), m));
  return m;
}

static void run_features(const rg_lru_args *a, int64_t r, int64_t begin, int64_t end) {
  const int64_t real = real_tokens(a->counts, r, a->tokens);
  float *y = a->y + r * a->tokens * a->width;
  for (int64_t f = begin; f < end; f += VL) {
    const int64_t n = end - f;
    const vf rate = vf_mul(vf_set1(-8), vf_softplus(load_some(a->parameter + f, n)));
    vf h = load_some(a->h + r * a->width + f, n);
    for (int64_t t = 0; t < real; t++) {
      const vf forget = load_some(a->recurrence_gate + r * a->recurrence_row + t * a->recurrence_token + f, n);
      const vf open = load_some(a->input_gate + r * a->input_row + t * a->input_token + f, n);
      const vf log_decay = vf_mul(rate, vf_sigmoid(forget));
      vf update = vf_mul(vf_sigmoid(open), load_some(a->x + r * a->x_row + t * a->x_token + f, n));
      if (t || a->seen[r] != 0.0f) update = vf_mul(vf_sqrt(one_minus_exp(vf_add(log_decay, log_decay))), update);
      h = vf_fma(vf_exp(log_decay), h, update);
      store_some(y + t * a->width + f, h, n);
    }
    store_some(a->next + r * a->width + f, h, n);
  }
  for (int64_t t = real; t < a->tokens; t++)
    memset(y + t * a->width + begin, 0, (size_t)(end - begin) * sizeof(float));
  if (!begin) a->next_seen[r] = fmaxf(a->seen[r], real ? 1.0f : 0.0f);
}

void lmstate_rg_lru(const rg_lru_args *a) {
  const int64_t blocks = (a->width + FEATURES - 1) / FEATURES;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t i = 0; i < a->rows * blocks; i++) {
    const int64_t begin = i % blocks * FEATURES;
    run_features(a, i / blocks, begin, at_most(begin + FEATURES, a->width));
  }
}

EXPORT_SIZE(rg_lru_args);
