/* What lies between a recurrent mixer's projections, in one parallel region: convolution, recurrence, gate and norm. */
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

/* 0, or -1 where there was no memory. */
int64_t lmstate_delta_mixer(const delta_mixer_args *m) {
  const int64_t keys = m->key_heads * m->key_dim, values = m->heads * m->value_dim, width = 2 * keys + values;
  const int64_t token = width, row = m->tokens * width;
  const gated_norm_args norm = {
      m->y, m->z, m->norm, m->y, m->counts, m->rows, m->tokens, m->heads, m->value_dim, m->value_dim, m->silu, 1, m->threads,
      m->z_row, m->z_token, m->eps};
  delta_args delta = {
      .carry = m->carry, .counts = m->counts, .y = m->y, .next = m->next, .rows = m->rows, .tokens = m->tokens,
      .key_heads = m->key_heads, .heads = m->heads, .key_dim = m->key_dim, .value_dim = m->value_dim,
      .by_channel = m->by_channel, .normalize = 1, .threads = m->threads,
      .q_row = row, .q_token = token, .q_head = m->key_dim, .k_row = row, .k_token = token, .k_head = m->key_dim,
      .v_row = row, .v_token = token, .v_head = m->value_dim,
      .beta = m->x + width, .beta_row = m->x_row, .beta_token = m->x_token, .beta_head = 1,
      .g = m->x + width + m->heads, .g_row = m->x_row, .g_token = m->x_token,
      .g_head = m->by_channel ? m->key_dim : 1, .carry_row = m->heads * m->key_dim * m->value_dim,
      .scale = 1.0 / sqrt((double)m->key_dim), .A = m->A, .bias = m->bias, .beta_scale = m->beta_scale,
      .norm = m->z ? &norm : 0};
  float *memory = malloc((delta_memory(&delta) + (size_t)(m->rows * row)) * sizeof(float));
  if (!memory) return -1;
  float *mixed = memory + delta_memory(&delta);
  const conv_args conv = {
      m->x, m->tail, m->taps, 0, m->counts, mixed, m->next_tail, m->rows, m->tokens, width, m->kernel, 1, m->threads,
      m->x_row, m->x_token, (m->kernel - 1) * width};
  delta.q = mixed, delta.k = mixed + keys, delta.v = mixed + 2 * keys;
#pragma omp parallel num_threads((int)m->threads) if (m->threads > 1)
  {
    conv_run(&conv);
    delta_run(&delta, memory);
  }
  free(memory);
  return 0;
}

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

/* 0, or -1 where there was no memory. */
int64_t lmstate_ssd_mixer(const ssd_mixer_args *m) {
  const int64_t inner = m->heads * m->head_dim, each = m->groups * m->states, width = inner + 2 * each;
  const int64_t token = width, row = m->tokens * width;
  float *mixed = malloc((size_t)(m->rows * row) * sizeof(float));
  if (!mixed) return -1;
  const conv_args conv = {
      m->x, m->tail, m->taps, m->conv_bias, m->counts, mixed, m->next_tail, m->rows, m->tokens, width, m->kernel, 1,
      m->threads, m->x_row, m->x_token, (m->kernel - 1) * width};
  const ssd_args ssd = {
      .x = mixed, .B = mixed + inner, .C = mixed + inner + each, .dt = m->x + width, .A = m->A, .D = m->D,
      .bias = m->dt_bias, .carry = m->carry, .counts = m->counts, .y = m->y, .next = m->next, .rows = m->rows,
      .tokens = m->tokens, .heads = m->heads, .head_dim = m->head_dim, .groups = m->groups, .states = m->states,
      .threads = m->threads, .x_row = row, .x_token = token, .x_head = m->head_dim, .dt_row = m->x_row,
      .dt_token = m->x_token, .dt_head = 1, .B_row = row, .B_token = token, .B_group = m->states, .C_row = row,
      .C_token = token, .C_group = m->states, .carry_row = inner * m->states, .low = m->low, .high = m->high};
  const gated_norm_args norm = {
      m->y, m->z, m->norm, m->y, m->counts, m->rows, m->tokens, m->norm_groups, inner / m->norm_groups, m->norm_weights, 1,
      m->gate_last, m->threads, m->z_row, m->z_token, m->eps};
#pragma omp parallel num_threads((int)m->threads) if (m->threads > 1)
  {
    conv_run(&conv);
    ssd_run(&ssd);
    if (m->z) gated_norm_run(&norm);
  }
  free(mixed);
  return 0;
}
