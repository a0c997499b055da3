/* A run of layers of a decoder in one parallel region: what a step of few tokens costs beyond reading weights and keys is
 * calls and regions, and a block of separate operations has a dozen of them. A block has two halves, attention and a
 * feed-forward part; a run is any number of halves, each of which reads the stream that the one before it gives. */
#include <stdlib.h>

#include "attend.h"
#include "linear.h"
#include "prologue.h"

typedef struct {
  /* What does not change from step to step. */
  const float *norm;     /* [inputs], or null */
  const void *qkv;       /* [(H or, gated, 2H) * D + 2 * K * D, inputs] */
  const float *qkv_bias;
  const float *q_norm, *k_norm; /* of each head, or of all that a token has; or null */
  const float *sinks;
  const void *out; /* [outputs, H * D] */
  const float *out_bias, *after; /* the last as in linear_args */
  int64_t inputs, outputs, heads, kv_heads, dim, gated, q_norm_width, k_norm_width, qkv_kind, out_kind;
  double norm_eps, q_eps, k_eps, scale, softcap, after_eps, residual_scale;
  const int64_t *starts; /* [R], where they are not the step's; or null */
  /* The rings. */
  void *k, *v;           /* as in attend_args */
  float *columns;        /* [R, K, planes, S], of this call alone, as in attend_args; or null */
  float *queries;        /* [N, H, D], filled with the queries as they attend; or null */
  int64_t slots, k_row, k_head, k_slot, v_row, v_head, v_slot, planes, kind, window, chunk;
  codes_args codes; /* bits: 0 where they are floats */
  /* The rotation. */
  const float *cos, *sin; /* [R, T, half] */
  int64_t half, interleaved;
} attention_args;

typedef struct {
  const float *norm; /* [inputs], or null */
  const void *up;    /* [2 * hidden, inputs], gate | up */
  const float *up_bias;
  const void *down; /* [outputs, hidden] */
  const float *down_bias, *after; /* the last as in linear_args */
  int64_t inputs, hidden, outputs, up_kind, down_kind, gate;
  int64_t parallel; /* reads what the half before it read, and is added to what that gave */
  double eps, after_eps, residual_scale;
} feed_forward_args;

enum { ATTENTION, FEED_FORWARD };
typedef struct {
  int64_t kind;
  union {
    attention_args attention;
    feed_forward_args feed_forward;
  };
} half_args;

typedef struct {
  const float *x;        /* [N, inputs of the first half], N = rows * tokens */
  const float *residual; /* what the first half is added to, or null; the others are added to what they read */
  float *y;              /* [N, outputs of the last half] */
  const int64_t *starts, *counts; /* [R] */
  int64_t rows, tokens, count, threads;
  half_args halves[];
} run_args;

static int64_t qkv_width(const attention_args *a) {
  return ((a->gated ? 2 : 1) * a->heads + 2 * a->kv_heads) * a->dim;
}

/* Norm and rotate the heads of the projections in place, and store those of keys and values. */
static void place(const run_args *run, const attention_args *a, const attend_args *attend, float *qkv) {
  const int64_t each = a->gated ? 2 * a->dim : a->dim; /* from one query head to the next */
  const int64_t keys = a->heads * each, values = keys + a->kv_heads * a->dim, width = qkv_width(a);
  const int64_t n = run->rows * run->tokens, all = a->heads + a->kv_heads, size = a->kind == F32 ? 4 : 2;
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
    const int64_t token = i / all, r = token / run->tokens, t = token % run->tokens;
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
    if (kv < 0 && a->codes.bits && !a->codes.tail) turn_head(x, a->dim);
    if (kv < 0 || t >= run->counts[r]) continue;
    float *value = qkv + token * width + values + kv * a->dim;
    if (a->codes.bits) {
      store_codes(attend, &a->codes, r, kv, t, x, value);
      continue;
    }
    const int64_t slot = (attend->starts[r] + t) % a->slots;
    store_head(x, (char *)a->k + (r * a->k_row + kv * a->k_head + slot * a->k_slot) * size, a->dim, a->kind);
    store_head(value, (char *)a->v + (r * a->v_row + kv * a->v_head + slot * a->v_slot) * size, a->dim, a->kind);
  }
  if (!a->codes.tail) return;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < run->rows * a->kv_heads; i++) close_blocks(attend, &a->codes, i / a->kv_heads, i % a->kv_heads);
}

/* What was seen of values that are turned. */
static void turn_back(const attention_args *a, int64_t n, float *seen) {
#pragma omp for schedule(static)
  for (int64_t i = 0; i < n * a->heads; i++) turn_head(seen + i * a->dim, a->dim);
}

/* seen[token, head] *= sigmoid(the gate beside the head's query) */
static void gate_heads(const attention_args *a, int64_t n, const float *qkv, float *seen) {
  const int64_t width = qkv_width(a);
#pragma omp for schedule(static)
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
}

/* What the halves share: memory for the products, what is between them, and the plan of an attention. */
typedef struct {
  char *products;
  float *between;
  attend_plan plan;
  int64_t status; /* of the first attend_begin that failed */
} shared;

/* The products of a half. What lies between them, `between` floats a token, is where the first writes. */
static void products_of(const run_args *run, const half_args *half, linear_args *into, linear_args *out, int64_t *between) {
  const linear_args common = {.rows = run->rows * run->tokens, .threads = run->threads};
  *into = *out = common;
  if (half->kind == ATTENTION) {
    const attention_args *a = &half->attention;
    into->weight = a->qkv, into->bias = a->qkv_bias, into->norm = a->norm, into->eps = a->norm_eps;
    into->kind = a->qkv_kind, into->inputs = a->inputs, into->outputs = qkv_width(a);
    out->weight = a->out, out->bias = a->out_bias, out->after = a->after, out->after_eps = a->after_eps;
    out->kind = a->out_kind, out->inputs = a->heads * a->dim, out->outputs = a->outputs, out->scale = a->residual_scale;
    *between = into->outputs + out->inputs;
  } else {
    const feed_forward_args *a = &half->feed_forward;
    into->weight = a->up, into->bias = a->up_bias, into->norm = a->norm, into->eps = a->eps;
    into->kind = a->up_kind, into->inputs = a->inputs, into->outputs = 2 * a->hidden;
    out->weight = a->down, out->bias = a->down_bias, out->after = a->after, out->after_eps = a->after_eps;
    out->kind = a->down_kind, out->inputs = a->hidden, out->outputs = a->outputs, out->scale = a->residual_scale;
    out->gate = a->gate, *between = into->outputs;
  }
}

/* One half, run by every thread: y = residual + scale * after(out(...(in(norm x)))). */
static void run_half(const run_args *run, const half_args *half, shared *common, const float *x, const float *residual,
                     float *y) {
  linear_args into, out;
  int64_t between;
  products_of(run, half, &into, &out, &between);
  into.x = x, into.y = common->between, out.x = common->between, out.residual = residual, out.y = y;
  if (half->kind == FEED_FORWARD) {
    linear_run(&into, common->products);
    linear_run(&out, common->products);
    return;
  }
  const attention_args *a = &half->attention;
  const int64_t *starts = a->starts ? a->starts : run->starts;
  float *seen = common->between + into.rows * into.outputs;
  const attend_args attend = {
    .q = common->between, .k = a->k, .v = a->v, .starts = starts, .counts = run->counts, .sinks = a->sinks, .out = seen,
    .columns = a->columns, .rows = run->rows, .tokens = run->tokens, .heads = a->heads, .kv_heads = a->kv_heads,
    .slots = a->slots, .dim = a->dim, .dim_v = a->dim, .q_row = run->tokens * into.outputs, .q_token = into.outputs,
    .q_head = a->gated ? 2 * a->dim : a->dim, .k_row = a->k_row, .k_head = a->k_head, .k_slot = a->k_slot,
    .v_row = a->v_row, .v_head = a->v_head, .v_slot = a->v_slot, .planes = a->planes, .kind = a->kind,
    .window = a->window, .chunk = a->chunk, .threads = run->threads, .scale = a->scale, .softcap = a->softcap,
  };
#pragma omp single nowait
  {
    common->status = attend_begin(&attend, &common->plan);
    if (a->codes.bits) common->plan.codes = &a->codes;
  }
  linear_run(&into, common->products);
  if (common->status) return; /* every thread has seen it: a product ends when all have done their part */
  place(run, a, &attend, common->between);
  attend_run(&attend, &common->plan);
#pragma omp single nowait
  attend_end(&common->plan);
  if (a->codes.bits) turn_back(a, into.rows, seen);
  if (a->gated) gate_heads(a, into.rows, common->between, seen);
  out.x = seen;
  linear_run(&out, common->products);
}

/* 0, or the status of lmstate_attend of the half that failed, times the number of halves, plus the half's. */
int64_t lmstate_run(const run_args *run) {
  const int64_t n = run->rows * run->tokens;
  if (n == 0) return 0;
  size_t products = 0;
  int64_t between = 0, width = 0;
  for (int64_t i = 0; i < run->count; i++) {
    linear_args into, out;
    int64_t each;
    products_of(run, &run->halves[i], &into, &out, &each);
    const size_t first = linear_memory(&into), second = linear_memory(&out), most = first > second ? first : second;
    if (most > products) products = most;
    if (each > between) between = each;
    if (out.outputs > width) width = out.outputs;
  }
  /* A half reads one stream or two, and writes a third. */
  char *memory = malloc(products + (size_t)(n * (between + 3 * width)) * sizeof(float));
  if (!memory) return -1;
  shared common = {.products = memory, .between = (float *)(memory + products)};
  float *streams = common.between + n * between;
  int64_t failed = 0;
#pragma omp parallel num_threads((int)run->threads) if (run->threads > 1)
  {
    const float *before = NULL, *x = run->x, *residual = run->residual;
    for (int64_t i = 0; i < run->count; i++) {
      const half_args *half = &run->halves[i];
      float *y = i + 1 < run->count ? streams + i % 3 * n * width : run->y;
      const int parallel = half->kind == FEED_FORWARD && half->feed_forward.parallel;
      run_half(run, half, &common, parallel ? before : x, residual, y);
      if (common.status) {
#pragma omp single nowait
        failed = i;
        break;
      }
      before = x, x = residual = y;
    }
  }
  free(memory);
  return common.status < 0 ? -1 : common.status ? common.status * run->count + failed : 0;
}
