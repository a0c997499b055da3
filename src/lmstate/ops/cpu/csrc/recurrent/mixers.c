/* What is computed between a recurrent mixer's projections, in one parallel region: convolution, recurrence, gate
 * and norm. */
#include "recurrent/mixers.h"
#include "layout.h"

/* Tokens that have a place, over all rows. */
static int64_t all_tokens(const scan_args *f) { return f->begins ? f->begins[f->rows] : f->rows * f->tokens; }

/* The norm and the gate of a mixer's outputs, in place. Without padding they are those of one long row. */
static gated_norm_args norm_of(const scan_args *f, const float *weight, int64_t groups, int64_t width, int64_t weights,
                               int64_t silu, int64_t gate_last, double eps) {
  const gated_norm_args norm = {
      .y = f->y, .gate = f->z, .weight = weight, .out = f->y, .counts = f->begins ? 0 : f->counts,
      .rows = f->begins ? 1 : f->rows, .tokens = f->begins ? all_tokens(f) : f->tokens, .groups = groups,
      .width = width, .weights = weights, .silu = silu, .gate_last = gate_last, .threads = f->threads,
      .gate_row = f->z_row, .gate_token = f->z_token, .eps = eps};
  return norm;
}

static int64_t delta_width(const gated_delta_parts *m) {
  return 2 * m->key_heads * m->key_dim + m->heads * m->value_dim;
}

/* The delta rule of a mixer, its q, k and v those of `conv`. */
static gated_delta_rule_args delta_of(const gated_delta_parts *m, const scan_args *f, const causal_conv_args *conv,
    const gated_norm_args *norm) {
  const int64_t width = delta_width(m);
  const gated_delta_rule_args delta = {
      .conv = conv, .carry = f->carry, .counts = f->counts, .begins = f->begins, .y = f->y,
      .next = f->next, .rows = f->rows, .tokens = f->tokens, .key_heads = m->key_heads, .heads = m->heads,
      .key_dim = m->key_dim, .value_dim = m->value_dim, .by_channel = m->by_channel, .normalize = 1,
      .threads = f->threads, .beta = f->x + width, .beta_row = f->x_row, .beta_token = f->x_token, .beta_head = 1,
      .g = f->x + width + m->heads, .g_row = f->x_row, .g_token = f->x_token,
      .g_head = m->by_channel ? m->key_dim : 1, .carry_row = m->heads * m->key_dim * m->value_dim,
      .scale = 1.0 / sqrt((double)m->key_dim), .A = m->A, .bias = m->bias, .beta_scale = m->beta_scale,
      .norm = f->z ? norm : 0, .marks = f->marks, .marked = f->marked};
  return delta;
}

size_t gated_delta_mixer_memory(const gated_delta_parts *m, const scan_args *f) {
  const gated_delta_rule_args delta = {.key_dim = m->key_dim, .value_dim = m->value_dim, .threads = f->threads};
  return delta_memory(&delta);
}

void gated_delta_mixer_run(const gated_delta_parts *m, const scan_args *f, float *memory) {
  const gated_norm_args norm = norm_of(f, m->norm, m->heads, m->value_dim, m->value_dim, m->silu, 1, m->eps);
  const int64_t width = delta_width(m);
  const causal_conv_args conv = {
      f->x, f->tail, m->taps, 0, f->counts, f->begins, 0, f->next_tail, f->rows, f->tokens, width, m->kernel, 1,
      f->threads, f->x_row, f->x_token, (m->kernel - 1) * width, f->marks, f->marked_tail};
  const gated_delta_rule_args delta = delta_of(m, f, &conv, &norm);
  delta_run(&delta, memory);
  conv_tails_run(&conv);
}

typedef struct {
  scan_args scan;
  gated_delta_parts parts;
} gated_delta_mixer_args;

/* 0, or -1 where there was no memory. */
int64_t lmstate_gated_delta_mixer(const gated_delta_mixer_args *a) {
  const scan_args *f = &a->scan;
  float *memory = malloc(gated_delta_mixer_memory(&a->parts, f) * sizeof(float));
  if (!memory) return -1;
#pragma omp parallel num_threads((int)f->threads) if (f->threads > 1)
  gated_delta_mixer_run(&a->parts, f, memory);
  free(memory);
  return 0;
}

static int64_t ssd_width(const mamba2_parts *m) { return m->heads * m->head_dim + 2 * m->groups * m->states; }

size_t mamba2_mixer_memory(const mamba2_parts *m, const scan_args *f) {
  return (size_t)(all_tokens(f) * ssd_width(m));
}

void mamba2_mixer_run(const mamba2_parts *m, const scan_args *f, float *memory) {
  const int64_t inner = m->heads * m->head_dim, each = m->groups * m->states, width = ssd_width(m);
  const int64_t row = f->tokens * width;
  const causal_conv_args conv = {
      f->x, f->tail, m->taps, m->conv_bias, f->counts, f->begins, memory, f->next_tail, f->rows, f->tokens, width,
      m->kernel, 1, f->threads, f->x_row, f->x_token, (m->kernel - 1) * width, f->marks, f->marked_tail};
  const ssd_args ssd = {
      .x = memory, .B = memory + inner, .C = memory + inner + each, .dt = f->x + width, .A = m->A, .D = m->D,
      .bias = m->dt_bias, .carry = f->carry, .counts = f->counts, .begins = f->begins, .y = f->y, .next = f->next,
      .rows = f->rows,
      .tokens = f->tokens, .heads = m->heads, .head_dim = m->head_dim, .groups = m->groups, .states = m->states,
      .threads = f->threads, .x_row = row, .x_token = width, .x_head = m->head_dim, .dt_row = f->x_row,
      .dt_token = f->x_token, .dt_head = 1, .B_row = row, .B_token = width, .B_group = m->states, .C_row = row,
      .C_token = width, .C_group = m->states, .carry_row = inner * m->states, .low = m->low, .high = m->high,
      .marks = f->marks, .marked = f->marked};
  const gated_norm_args norm =
      norm_of(f, m->norm, m->norm_groups, inner / m->norm_groups, m->norm_weights, 1, m->gate_last, m->eps);
  conv_run(&conv);
  ssd_run(&ssd);
  if (f->z) gated_norm_run(&norm);
}

typedef struct {
  scan_args scan;
  mamba2_parts parts;
} mamba2_mixer_args;

/* 0, or -1 where there was no memory. */
int64_t lmstate_mamba2_mixer(const mamba2_mixer_args *a) {
  const scan_args *f = &a->scan;
  float *memory = malloc(mamba2_mixer_memory(&a->parts, f) * sizeof(float));
  if (!memory) return -1;
#pragma omp parallel num_threads((int)f->threads) if (f->threads > 1)
  mamba2_mixer_run(&a->parts, f, memory);
  free(memory);
  return 0;
}

EXPORT_SIZE(scan_args);
EXPORT_SIZE(gated_delta_parts);
EXPORT_SIZE(mamba2_parts);
EXPORT_SIZE(gated_delta_mixer_args);
EXPORT_SIZE(mamba2_mixer_args);
