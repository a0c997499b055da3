/* What lies between a recurrent mixer's projections. Each `_run` is for every thread of a parallel region that is open, of
 * at most `threads`, with memory of that many floats that they share; when it returns, all of the result is there. */
#ifndef LMSTATE_RECURRENT_MIXERS_H
#define LMSTATE_RECURRENT_MIXERS_H
#include "recurrent.h"

typedef struct {
  const float *x;         /* [R, T, F] by its strides: q, k, v before their convolution | beta | decay, as projected */
  const float *z;         /* [R, T, H * Dv] by its strides: the output's gate; null: no norm and no gate */
  const float *tail;      /* [R, C - 1, 2 * Hk * Dk + H * Dv], contiguous, as is all that follows */
  const float *carry;     /* [R, H, Dk, Dv] */
  const int64_t *counts;  /* [R] */
  const float *taps;      /* [C, 2 * Hk * Dk + H * Dv] */
  const float *A, *bias;  /* [H], [H] or [H, Dk] */
  const float *norm;      /* [Dv] */
  float *y;               /* [R, T, H, Dv] */
  float *next_tail, *next;
  int64_t rows, tokens, key_heads, heads, key_dim, value_dim, kernel, by_channel, silu, threads;
  int64_t x_row, x_token, z_row, z_token;
  double beta_scale, eps;
} delta_mixer_args;

typedef struct {
  const float *x;         /* [R, T, F] by its strides: x, B, C before their convolution | dt, as projected */
  const float *z;         /* [R, T, H * P] by its strides: the output's gate; null: no norm and no gate */
  const float *tail;      /* [R, C - 1, H * P + 2 * G * N], contiguous, as is all that follows */
  const float *carry;     /* [R, H, P, N] */
  const int64_t *counts;  /* [R] */
  const float *taps, *conv_bias; /* [C, H * P + 2 * G * N], and its features or null */
  const float *A, *D, *dt_bias;  /* [H]; D and dt_bias or null */
  const float *norm;      /* [norm_weights], or null: the gate alone */
  float *y;               /* [R, T, H, P] */
  float *next_tail, *next;
  int64_t rows, tokens, heads, head_dim, groups, states, kernel, norm_groups, norm_weights, gate_last, threads;
  int64_t x_row, x_token, z_row, z_token;
  double low, high, eps;
} ssd_mixer_args;

void delta_mixer_run(const delta_mixer_args *m, float *memory);
size_t delta_mixer_memory(const delta_mixer_args *m);
void ssd_mixer_run(const ssd_mixer_args *m, float *memory);
size_t ssd_mixer_memory(const ssd_mixer_args *m);

#endif
