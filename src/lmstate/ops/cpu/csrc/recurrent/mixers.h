/* What is computed between a recurrent mixer's projections. Each `_run` is for every thread of a parallel region
 * that is open, of at most `threads`, with memory of that many floats that they share; when it returns, all of the
 * result is there. */
#ifndef LMSTATE_MIXERS_H
#define LMSTATE_MIXERS_H
#include "recurrent/recurrent.h"

/* What goes through a mixer and what it leaves. W: features of its convolution; I: features of its outputs. */
typedef struct {
  const float *x;        /* [R, T, F] by its strides: W features before their convolution | its gates, projected */
  const float *z;        /* [R, T, I] by its strides: the output's gate; null: no norm and no gate */
  const float *tail;     /* [R, C - 1, W], contiguous, as is all that follows */
  const float *carry;    /* [R, H, Dk, Dv], or [R, H, P, N] */
  const int64_t *counts; /* [R] */
  const int64_t *begins; /* [R + 1], where x, z and y have no padding: see `token_at`; or null */
  float *y;              /* [R, T, I]; null: not wanted of a delta rule */
  float *next_tail, *next;
  const int64_t *marks;  /* [R]: a row's tokens after which tail and carry are kept as well; 0: none; or null */
  float *marked_tail, *marked;
  int64_t rows, tokens, threads;
  int64_t x_row, x_token, z_row, z_token;
} scan_args;

/* A mixer of q, k, v | beta | decay, its outputs H * Dv. */
typedef struct {
  const float *taps;     /* [C, 2 * Hk * Dk + H * Dv] */
  const float *A, *bias; /* [H], [H] or [H, Dk] */
  const float *norm;     /* [Dv] */
  int64_t key_heads, heads, key_dim, value_dim, kernel, by_channel, silu;
  double beta_scale, eps;
} gated_delta_parts;

/* A mixer of x, B, C | dt, its outputs H * P. */
typedef struct {
  const float *taps, *conv_bias; /* [C, H * P + 2 * G * N], and its features or null */
  const float *A, *D, *dt_bias;  /* [H]; D and dt_bias or null */
  const float *norm;             /* [norm_weights], or null: the gate alone */
  int64_t heads, head_dim, groups, states, kernel, norm_groups, norm_weights, gate_last;
  double low, high, eps;
} mamba2_parts;

void gated_delta_mixer_run(const gated_delta_parts *m, const scan_args *f, float *memory);
size_t gated_delta_mixer_memory(const gated_delta_parts *m, const scan_args *f);
void mamba2_mixer_run(const mamba2_parts *m, const scan_args *f, float *memory);
size_t mamba2_mixer_memory(const mamba2_parts *m, const scan_args *f);

#endif
