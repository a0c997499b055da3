/* What lies between a recurrent mixer's projections, in one parallel region: convolution, recurrence, gate and norm. */
#include "recurrent_mixers.h"

/* The delta rule of a mixer, its q, k and v in `mixed`. */
static delta_args delta_of(const delta_mixer_args *m, const float *mixed, const gated_norm_args *norm) {
  const int64_t keys = m->key_heads * m->key_dim, width = 2 * keys + m->heads * m->value_dim, row = m->tokens * width;
  const delta_args delta = {
      .q = mixed, .k = mixed + keys, .v = mixed + 2 * keys, .carry = m->carry, .counts = m->counts, .y = m->y,
      .next = m->next, .rows = m->rows, .tokens = m->tokens, .key_heads = m->key_heads, .heads = m->heads,
      .key_dim = m->key_dim, .value_dim = m->value_dim, .by_channel = m->by_channel, .normalize = 1,
      .threads = m->threads, .q_row = row, .q_token = width, .q_head = m->key_dim, .k_row = row, .k_token = width,
      .k_head = m->key_dim, .v_row = row, .v_token = width, .v_head = m->value_dim,
      .beta = m->x + width, .beta_row = m->x_row, .beta_token = m->x_token, .beta_head = 1,
      .g = m->x + width + m->heads, .g_row = m->x_row, .g_token = m->x_token,
      .g_head = m->by_channel ? m->key_dim : 1, .carry_row = m->heads * m->key_dim * m->value_dim,
      .scale = 1.0 / sqrt((double)m->key_dim), .A = m->A, .bias = m->bias, .beta_scale = m->beta_scale,
      .norm = m->z ? norm : 0};
  return delta;
}

size_t delta_mixer_memory(const delta_mixer_args *m) {
  const delta_args delta = delta_of(m, m->x, 0);
  return delta_memory(&delta) + (size_t)(m->rows * delta.q_row);
}

void delta_mixer_run(const delta_mixer_args *m, float *memory) {
  const gated_norm_args norm = {
      m->y, m->z, m->norm, m->y, m->counts, m->rows, m->tokens, m->heads, m->value_dim, m->value_dim, m->silu, 1, m->threads,
      m->z_row, m->z_token, m->eps};
  delta_args delta = delta_of(m, memory, &norm);
  const int64_t width = delta.q_token;
  const conv_args conv = {
      m->x, m->tail, m->taps, 0, m->counts, memory, m->next_tail, m->rows, m->tokens, width, m->kernel, 1, m->threads,
      m->x_row, m->x_token, (m->kernel - 1) * width};
  conv_run(&conv);
  delta_run(&delta, memory + m->rows * delta.q_row);
}

/* 0, or -1 where there was no memory. */
int64_t lmstate_delta_mixer(const delta_mixer_args *m) {
  float *memory = malloc(delta_mixer_memory(m) * sizeof(float));
  if (!memory) return -1;
#pragma omp parallel num_threads((int)m->threads) if (m->threads > 1)
  delta_mixer_run(m, memory);
  free(memory);
  return 0;
}

static int64_t ssd_width(const ssd_mixer_args *m) { return m->heads * m->head_dim + 2 * m->groups * m->states; }

size_t ssd_mixer_memory(const ssd_mixer_args *m) { return (size_t)(m->rows * m->tokens * ssd_width(m)); }

void ssd_mixer_run(const ssd_mixer_args *m, float *memory) {
  const int64_t inner = m->heads * m->head_dim, each = m->groups * m->states, width = ssd_width(m);
  const int64_t row = m->tokens * width;
  const conv_args conv = {
      m->x, m->tail, m->taps, m->conv_bias, m->counts, memory, m->next_tail, m->rows, m->tokens, width, m->kernel, 1,
      m->threads, m->x_row, m->x_token, (m->kernel - 1) * width};
  const ssd_args ssd = {
      .x = memory, .B = memory + inner, .C = memory + inner + each, .dt = m->x + width, .A = m->A, .D = m->D,
      .bias = m->dt_bias, .carry = m->carry, .counts = m->counts, .y = m->y, .next = m->next, .rows = m->rows,
      .tokens = m->tokens, .heads = m->heads, .head_dim = m->head_dim, .groups = m->groups, .states = m->states,
      .threads = m->threads, .x_row = row, .x_token = width, .x_head = m->head_dim, .dt_row = m->x_row,
      .dt_token = m->x_token, .dt_head = 1, .B_row = row, .B_token = width, .B_group = m->states, .C_row = row,
      .C_token = width, .C_group = m->states, .carry_row = inner * m->states, .low = m->low, .high = m->high};
  const gated_norm_args norm = {
      m->y, m->z, m->norm, m->y, m->counts, m->rows, m->tokens, m->norm_groups, inner / m->norm_groups, m->norm_weights, 1,
      m->gate_last, m->threads, m->z_row, m->z_token, m->eps};
  conv_run(&conv);
  ssd_run(&ssd);
  if (m->z) gated_norm_run(&norm);
}

/* 0, or -1 where there was no memory. */
int64_t lmstate_ssd_mixer(const ssd_mixer_args *m) {
  float *memory = malloc(ssd_mixer_memory(m) * sizeof(float));
  if (!memory) return -1;
#pragma omp parallel num_threads((int)m->threads) if (m->threads > 1)
  ssd_mixer_run(m, memory);
  free(memory);
  return 0;
}
