/* Attention as a sublayer: norms of heads, rotation, storing, attention, and the gate of what was seen. */
#include "fused/fused.h"
#include "dense/prologue.h"

/* Heads of keys, and of values, that it makes. */
static int64_t stored_heads(const attention_args *a) { return a->reads ? 0 : a->kv_heads; }

static int64_t qkv_width(const attention_args *a) {
  return ((a->gated ? 2 : 1) * a->heads + 2 * stored_heads(a)) * a->dim + a->gates;
}

/* 1 + the first row whose positions the rotation does not reach, or 0. */
static int64_t first_beyond(const fused_args *run, const attention_args *a) {
  for (int64_t r = 0; a->positions && r < run->rows; r++)
    if (run->counts[r] && (run->starts[r] < 0 || run->starts[r] + run->counts[r] > a->positions)) return r + 1;
  return 0;
}

/* Heads of the projections, those of the queries first. */
typedef struct {
  int64_t first, last;
} span_of_heads;

/* Norm and rotate heads of the projections in place, and store those of keys and values. */
static void norm_rope_store(const fused_args *run, const attention_args *a, const attend_args *attend,
                            const packed_tokens *packed, float *qkv, span_of_heads of) {
  const int64_t each = a->gated ? 2 * a->dim : a->dim; /* from one query head to the next */
  const int64_t keys = a->heads * each, values = keys + a->kv_heads * a->dim, width = qkv_width(a);
  const int64_t n = packed->begins[run->rows], all = of.last - of.first, size = a->kind == F32 ? 4 : 2;
  const int whole_q = !of.first && a->q_norm && a->q_norm_width != a->dim;
  const int stores = of.last > a->heads, whole_k = stores && a->k_norm && a->k_norm_width != a->dim;
  if (whole_q || whole_k) {
#pragma omp for schedule(static) nowait
    for (int64_t i = 0; i < n; i++) {
      float *x = qkv + i * width;
      if (whole_q) rms_norm_row(x, a->q_norm, x, a->q_norm_width, a->q_eps);
      if (whole_k) rms_norm_row(x + keys, a->k_norm, x + keys, a->k_norm_width, a->k_eps);
    }
    team_barrier();
  }
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < n * all; i++) {
    const int64_t token = i / all, r = packed->rows[token], t = token - packed->begins[r], place = r * run->tokens + t;
    const int64_t h = of.first + i % all, kv = h - a->heads;
    float *x = qkv + token * width + (kv < 0 ? h * each : keys + kv * a->dim);
    if (kv < 0 ? a->q_norm && !whole_q : a->k_norm && !whole_k)
      rms_norm_row(x, kv < 0 ? a->q_norm : a->k_norm, x, a->dim, kv < 0 ? a->q_eps : a->k_eps);
    if (a->half) {
      float turned[MAX_DIM];
      const int64_t angle = (a->positions ? run->starts[r] + t : place) * a->half;
      rotate_head(x, a->cos + angle, a->sin + angle, turned, a->dim, a->half, a->interleaved);
      memcpy(x, turned, (size_t)a->dim * sizeof(float));
    }
    if (kv < 0 && a->queries && !a->reads)
      memcpy(a->queries + (place * a->heads + h) * a->dim, x, (size_t)a->dim * sizeof(float));
    if (kv < 0 && a->codes.bits) hadamard_head(x, a->dim);
    if (kv < 0) continue;
    float *value = qkv + token * width + values + kv * a->dim;
    if (a->v_norm) rms_norm_row(value, a->v_norm, value, a->dim, a->v_eps);
    if (a->codes.bits) {
      store_codes(attend, &a->codes, r, kv, t, x, value);
      continue;
    }
    const int64_t position = attend->starts[r] + t, row = r * a->table_row;
    char *k = position_at(a->k, r * a->k_row * size, a->k_table ? a->k_table + row : NULL, a->block, a->slots,
                       kv * a->k_head * size, a->k_slot * size, position);
    char *v = position_at(a->v, r * a->v_row * size, a->v_table ? a->v_table + row : NULL, a->block, a->slots,
                       kv * a->v_head * size, a->v_slot * size, position);
    store_head(x, k, a->dim, a->kind);
    store_head(value, v, a->dim, a->kind);
  }
  team_barrier();
  if (!a->codes.tail || !stores) return;
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < run->rows * a->kv_heads; i++)
    close_blocks(attend, &a->codes, i / a->kv_heads, i % a->kv_heads);
  team_barrier();
}

/* What was seen of values that went through a Hadamard transform, which is its own inverse. */
static void undo_hadamard(const attention_args *a, int64_t n, float *seen) {
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < n * a->heads; i++) hadamard_head(seen + i * a->dim, a->dim);
  team_barrier();
}

/* seen[token, head] *= sigmoid(the gate beside the head's query) */
static void gate_per_feature(const attention_args *a, int64_t n, const float *qkv, float *seen) {
  const int64_t width = qkv_width(a);
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < n * a->heads; i++) {
    const float *gate = qkv + i / a->heads * width + (i % a->heads * 2 + 1) * a->dim;
    float *x = seen + i * a->dim;
    int64_t d = 0;
    for (; d + VL <= a->dim; d += VL) vf_store(x + d, vf_mul(vf_load(x + d), vf_sigmoid(vf_load(gate + d))));
    if (d < a->dim) {
      const int rest = (int)(a->dim - d);
      store_part(x + d, vf_mul(load_part(F32, x, d, rest), vf_sigmoid(load_part(F32, gate, d, rest))), rest);
    }
  }
  team_barrier();
}

/* seen[token, head] *= sigmoid(the head's gate, which is the last number of the head) */
static void gate_per_head(const attention_args *a, int64_t n, const float *qkv, float *seen) {
  const int64_t width = qkv_width(a);
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < n * a->heads; i++) {
    const float gate = qkv[(i / a->heads + 1) * width - a->gates + i % a->heads];
    float share[VL];
    vf_store(share, vf_sigmoid(vf_set1(gate)));
    for (int64_t d = 0; d < a->dim; d++) seen[i * a->dim + d] *= share[0];
  }
  team_barrier();
}

void attention_products(const attention_args *a, sublayer_products *p) {
  p->into.weight = a->qkv, p->into.bias = a->qkv_bias, p->into.norm = a->norm, p->into.eps = a->norm_eps;
  p->into.kind = a->qkv_kind, p->into.inputs = a->inputs, p->into.outputs = qkv_width(a);
  p->out.weight = a->out, p->out.bias = a->out_bias, p->out.after = a->after, p->out.after_eps = a->after_eps;
  p->out.kind = a->out_kind, p->out.inputs = a->heads * a->dim, p->out.outputs = a->outputs;
  p->out.scale = a->residual_scale, p->between = p->into.rows * (p->into.outputs + p->out.inputs);
}

static attend_args attend_of(const fused_args *run, const attention_args *a, const float *qkv, float *seen) {
  const attend_args attend = {
    .q = qkv, .k = a->k, .v = a->v, .starts = a->starts ? a->starts : run->starts, .counts = run->counts,
    .sinks = a->sinks, .out = seen, .columns = a->reads ? NULL : a->columns, .k_table = a->k_table,
    .v_table = a->v_table, .table_row = a->table_row, .block = a->block, .rows = run->rows, .tokens = run->tokens,
    .heads = a->heads, .kv_heads = a->kv_heads, .slots = a->slots, .dim = a->dim, .dim_v = a->dim,
    .q_token = qkv_width(a), .q_head = a->gated ? 2 * a->dim : a->dim, .k_row = a->k_row, .k_head = a->k_head,
    .k_slot = a->k_slot, .v_row = a->v_row, .v_head = a->v_head, .v_slot = a->v_slot, .planes = a->planes,
    .kind = a->kind, .window = a->window, .chunk = a->chunk, .threads = run->threads, .scale = a->scale,
    .softcap = a->softcap,
  };
  return attend;
}

int attention_stores_first(const attention_args *a) {
  return !a->columns && !a->queries && !a->starts && (!a->half || a->positions);
}

int64_t attention_store(const fused_args *run, const attention_args *a, sublayer_products *p, workspace *common) {
  const attend_args attend = attend_of(run, a, common->between, NULL);
  const int64_t keys = a->heads * (a->gated ? 2 : 1) * a->dim;
#pragma omp single nowait
  {
    const int64_t late = first_beyond(run, a);
    common->status = late ? late : attend_check(&attend, a->codes.bits ? &a->codes : NULL);
  }
  p->into.y = common->between, p->into.begin = keys, p->into.end = keys + 2 * a->kv_heads * a->dim;
  linear_run(&p->into, common->products);
  const span_of_heads stored = {a->heads, a->heads + a->kv_heads};
  const int64_t status = common->status; /* as in attention_sublayer */
  if (!status) norm_rope_store(run, a, &attend, &common->packed, common->between, stored);
  return status;
}

int64_t attention_sublayer(const fused_args *run, const attention_args *a, sublayer_products *p, workspace *common,
                           int stored) {
  const int64_t n = p->into.rows;
  const span_of_heads made = {0, a->heads + (stored ? 0 : stored_heads(a))};
  float *qkv = common->between, *seen = qkv + n * qkv_width(a);
  const attend_args attend = attend_of(run, a, qkv, seen);
#pragma omp single nowait
  {
    const int64_t late = first_beyond(run, a);
    common->status =
      late ? late : attend_begin(&attend, a->codes.bits ? &a->codes : NULL, &common->packed, &common->plan);
  }
  p->into.y = qkv, p->out.x = seen;
  linear_run(&p->into, common->products);
  /* It is there: a product ends when all threads have done their part. From here on none writes it before all have
   * come to the next such end; later, one that is ahead may be at another layer. */
  const int64_t status = common->status;
  if (status) return status;
  norm_rope_store(run, a, &attend, &common->packed, qkv, made);
  attend_run(&attend, &common->plan);
#pragma omp single nowait
  attend_end(&common->plan);
  if (a->codes.bits) undo_hadamard(a, n, seen);
  if (a->gated) gate_per_feature(a, n, qkv, seen);
  if (a->gates) gate_per_head(a, n, qkv, seen);
  linear_run(&p->out, common->products);
  return 0;
}
