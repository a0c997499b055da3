/* The halves of a block of a decoder, each in one parallel region: what a step of few tokens costs beyond reading
 * weights and keys is calls and regions, and a block of separate operations has a dozen of them. */
#include <stdlib.h>

#include "attend.h"
#include "linear.h"
#include "prologue.h"

typedef struct {
  const float *x, *norm; /* [N, inputs], N = rows * tokens; [inputs] or null */
  const void *qkv;       /* [(H or, gated, 2H) * D + 2 * K * D, inputs] */
  const float *qkv_bias;
  const float *q_norm, *k_norm; /* of each head, or of all that a token has; or null */
  const float *cos, *sin;       /* [R, T, half] */
  void *k, *v;                  /* rings, as in attend_args */
  const int64_t *starts, *counts;
  const float *sinks;
  const void *out; /* [inputs, H * D] */
  const float *out_bias, *residual, *after; /* the last two as in linear_args */
  float *y; /* [N, outputs] */
  float *columns; /* [R, K, planes, S], zeros, as in attend_args; or null */
  float *queries; /* [N, H, D], filled with the queries as they attend; or null */
  int64_t rows, tokens, inputs, outputs, heads, kv_heads, dim, half, interleaved, gated;
  int64_t q_norm_width, k_norm_width;
  int64_t slots, k_row, k_head, k_slot, v_row, v_head, v_slot;
  int64_t planes, kind, qkv_kind, out_kind, window, chunk, threads;
  double norm_eps, q_eps, k_eps, scale, softcap, after_eps, residual_scale;
} attention_args;

typedef struct {
  const float *x, *norm; /* [rows, inputs]; [inputs] or null */
  const void *up;        /* [2 * hidden, inputs], gate | up */
  const float *up_bias;
  const void *down; /* [outputs, hidden] */
  const float *down_bias, *residual, *after; /* the last two as in linear_args */
  float *y; /* [rows, outputs] */
  int64_t rows, inputs, hidden, outputs, up_kind, down_kind, gate, threads;
  double eps, after_eps, residual_scale;
} feed_forward_args;

/* Norm and rotate the heads of the projections in place, and store those of keys and values. */
static void place(const attention_args *a, float *qkv) {
  const int64_t each = a->gated ? 2 * a->dim : a->dim; /* from one query head to the next */
  const int64_t keys = a->heads * each, values = keys + a->kv_heads * a->dim, width = values + a->kv_heads * a->dim;
  const int64_t n = a->rows * a->tokens, all = a->heads + a->kv_heads, size = a->kind == F32 ? 4 : 2;
  const int whole_q = a->q_norm && a->q_norm_width != a->dim, whole_k = a->k_norm && a->k_norm_width != a->dim;
  if (whole_q || whole_k) {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      float *x = qkv + i * width;
      if (whole_q) rms_norm_row(x, a->q_norm, x, a->q_norm_width, a->q_eps);
      if (whole_k) rms_norm_row(x + keys, a->k_norm, x + keys, a->k_norm_width, a->k_eps);
    }
  }
#pragma omp for schedule(static)
  for (int64_t i = 0; i < n * all; i++) {
    const int64_t token = i / all, r = token / a->tokens, t = token % a->tokens;
    const int64_t h = i % all, kv = h - a->heads;
    float *x = qkv + token * width + (kv < 0 ? h * each : keys + kv * a->dim);
    if (kv < 0 ? a->q_norm && !whole_q : a->k_norm && !whole_k)
      rms_norm_row(x, kv < 0 ? a->q_norm : a->k_norm, x, a->dim, kv < 0 ? a->q_eps : a->k_eps);
    if (a->half) {
      float turned[MAX_DIM];
      rotate_head(x, a->cos + token * a->half, a->sin + token * a->half, turned, a->dim, a->half, a->interleaved);
      memcpy(x, turned, (size_t)a->dim * sizeof(float));
    }
    if (kv < 0 && a->queries) memcpy(a->queries + (token * a->heads + h) * a->dim, x, (size_t)a->dim * sizeof(float));
    if (kv < 0 || t >= a->counts[r]) continue;
    const int64_t slot = (a->starts[r] + t) % a->slots;
    store_head(x, (char *)a->k + (r * a->k_row + kv * a->k_head + slot * a->k_slot) * size, a->dim, a->kind);
    store_head(qkv + token * width + values + kv * a->dim,
               (char *)a->v + (r * a->v_row + kv * a->v_head + slot * a->v_slot) * size, a->dim, a->kind);
  }
}

/* seen[token, head] *= sigmoid(the gate beside the head's query) */
static void gate_heads(const attention_args *a, const float *qkv, int64_t width, float *seen) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < a->rows * a->tokens * a->heads; i++) {
    const float *gate = qkv + i / a->heads * width + (i % a->heads * 2 + 1) * a->dim;
    float *x = seen + i * a->dim;
    int64_t d = 0;
    for (; d + VL <= a->dim; d += VL) vf_store(x + d, vf_mul(vf_load(x + d), vf_sigmoid(vf_load(gate + d))));
    if (d < a->dim) {
      const int rest = (int)(a->dim - d);
      store_part(x + d, vf_mul(load_part(F32, x, d, rest), vf_sigmoid(load_part(F32, gate, d, rest))), rest);
    }
  }
}

/* y = residual + scale * after(out(attend(qkv(norm x)))). Status as of lmstate_attend. */
int64_t lmstate_attention(const attention_args *a) {
  const int64_t n = a->rows * a->tokens, seen_width = a->heads * a->dim;
  if (n == 0) return 0;
  const int64_t q_width = a->gated ? 2 * seen_width : seen_width, width = q_width + 2 * a->kv_heads * a->dim;
  linear_args qkv = {.x = a->x, .weight = a->qkv, .bias = a->qkv_bias, .norm = a->norm, .rows = n, .outputs = width,
                     .inputs = a->inputs, .kind = a->qkv_kind, .threads = a->threads, .eps = a->norm_eps};
  linear_args out = {.weight = a->out, .bias = a->out_bias, .residual = a->residual, .after = a->after, .y = a->y,
                     .rows = n, .outputs = a->outputs, .inputs = seen_width, .kind = a->out_kind,
                     .threads = a->threads, .after_eps = a->after_eps, .scale = a->residual_scale};
  attend_args attend = {.k = a->k, .v = a->v, .starts = a->starts, .counts = a->counts, .sinks = a->sinks,
                        .rows = a->rows, .tokens = a->tokens, .heads = a->heads, .kv_heads = a->kv_heads,
                        .slots = a->slots, .dim = a->dim, .dim_v = a->dim, .q_row = a->tokens * width,
                        .q_token = width, .q_head = a->gated ? 2 * a->dim : a->dim, .k_row = a->k_row,
                        .k_head = a->k_head, .k_slot = a->k_slot, .v_row = a->v_row, .v_head = a->v_head,
                        .v_slot = a->v_slot, .kind = a->kind, .window = a->window, .chunk = a->chunk,
                        .columns = a->columns, .planes = a->planes,
                        .scale = a->scale, .softcap = a->softcap};
  attend_plan plan;
  const int64_t status = attend_begin(&attend, &plan);
  if (status) return status;
  const size_t first = linear_memory(&qkv), second = linear_memory(&out), most = first > second ? first : second;
  char *memory = malloc(most + (size_t)(n * (width + seen_width)) * sizeof(float));
  if (!memory) {
    attend_end(&plan);
    return -1;
  }
  float *projected = (float *)(memory + most), *seen = projected + n * width;
  qkv.y = projected, attend.q = projected, attend.out = seen, out.x = seen;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    linear_run(&qkv, memory);
    place(a, projected);
    attend_run(&attend, &plan);
    if (a->gated) gate_heads(a, projected, width, seen);
    linear_run(&out, memory);
  }
  attend_end(&plan);
  free(memory);
  return 0;
}

/* y = residual + scale * after(down(act(gate x) * up x)), x normed first. 0, or -1 where there was no memory. */
int64_t lmstate_feed_forward(const feed_forward_args *a) {
  if (a->rows == 0) return 0;
  linear_args up = {.x = a->x, .weight = a->up, .bias = a->up_bias, .norm = a->norm, .rows = a->rows,
                    .outputs = 2 * a->hidden, .inputs = a->inputs, .kind = a->up_kind, .threads = a->threads,
                    .eps = a->eps};
  linear_args down = {.weight = a->down, .bias = a->down_bias, .residual = a->residual, .after = a->after, .y = a->y,
                      .rows = a->rows, .outputs = a->outputs, .inputs = a->hidden, .kind = a->down_kind,
                      .gate = a->gate, .threads = a->threads, .after_eps = a->after_eps, .scale = a->residual_scale};
  const size_t first = linear_memory(&up), second = linear_memory(&down), most = first > second ? first : second;
  char *memory = malloc(most + (size_t)(a->rows * 2 * a->hidden) * sizeof(float));
  if (!memory) return -1;
  float *hidden = (float *)(memory + most);
  up.y = hidden, down.x = hidden;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    linear_run(&up, memory);
    linear_run(&down, memory);
  }
  free(memory);
  return 0;
}
