/* Attention of new tokens over the stored ones, for up to some hundreds of new tokens a row.
 *
 * The positions are cut at fixed places (`chunk_begin`). A task is one kv head of one row over one chunk, for a run of
 * the row's new tokens and all query heads of that kv head, so that keys and values are read once for them; each task
 * leaves its part of the softmax, and the parts are put together in the order of the chunks. Where a query's sum is cut
 * depends on its own position alone: its result has the same bits beside other queries, rows and numbers of threads. */
#include <stdlib.h>

#include "attend.h"
#include "lanes.h"

enum { SUB = 64 }; /* positions that are scored together */
enum { RUN = 32 }; /* new tokens of a task */

/* The processor's own prefetch stops at every page, and keys and values take turns: ask for the same place of the next
 * positions, into the second cache. */
INLINE void ask_ahead(int kind, const void *base, int64_t stride, int64_t at) {
  __builtin_prefetch((const char *)base + (at + SUB * stride) * (kind == F32 ? 4 : 2), 0, 1);
}
#if VL == 16
enum { TILE = 4 }; /* queries that share a key in registers */
#else
enum { TILE = 2 };
#endif

/* Chunks grow with the position, so that their number, and the memory for their parts, stays small. */
static int64_t chunk_begin(int64_t c) {
  if (c <= 32) return 256 * c;
  if (c <= 88) return 8192 + 1024 * (c - 32);
  return 65536 + 4096 * (c - 88);
}
static int64_t chunk_of(int64_t position) {
  if (position < 8192) return position / 256;
  if (position < 65536) return 32 + (position - 8192) / 1024;
  return 88 + (position - 65536) / 4096;
}

static int64_t low_of(const attend_args *a, int64_t own) { /* the first position that a query at `own` sees */
  int64_t low = 0;
  if (a->window && own - a->window + 1 > low) low = own - a->window + 1;
  if (a->chunk && own / a->chunk * a->chunk > low) low = own / a->chunk * a->chunk;
  return low;
}

/* A part of a softmax: largest score, sum of exponentials, then their sum with the values (dim_v floats). */
typedef struct { float *largest, *sum, *values; } part;

static part part_at(const attend_args *a, float *parts, int64_t index) {
  float *p = parts + index * (a->dim_v + 2);
  part r = {p, p + 1, p + 2};
  return r;
}

/* scores[j][t] = q_j . k_t for `count` keys from `key` on. */
INLINE void score(const float *const *q, int queries, const void *key, int64_t stride, int64_t dim, int64_t count,
                  float (*scores)[SUB], int64_t at, int kind) {
  for (int64_t t = 0; t < count; t += 4) {
    int64_t rows[4];
    UNROLL for (int n = 0; n < 4; n++) rows[n] = (t + n < count ? t + n : count - 1) * stride;
    vf acc[TILE][4];
    UNROLL for (int j = 0; j < queries; j++)
      UNROLL for (int n = 0; n < 4; n++) acc[j][n] = vf_zero();
    int64_t d = 0;
    for (; d + VL <= dim; d += VL) {
      vf k[4];
      UNROLL for (int n = 0; n < 4; n++) k[n] = load(kind, key, rows[n] + d), ask_ahead(kind, key, stride, rows[n] + d);
      UNROLL for (int j = 0; j < queries; j++) {
        vf x = vf_load(q[j] + d);
        UNROLL for (int n = 0; n < 4; n++) acc[j][n] = vf_fma(x, k[n], acc[j][n]);
      }
    }
    if (d < dim) {
      vf k[4];
      UNROLL for (int n = 0; n < 4; n++) k[n] = load_part(kind, key, rows[n] + d, (int)(dim - d));
      UNROLL for (int j = 0; j < queries; j++) {
        vf x = load_part(F32, q[j], d, (int)(dim - d));
        UNROLL for (int n = 0; n < 4; n++) acc[j][n] = vf_fma(x, k[n], acc[j][n]);
      }
    }
    UNROLL for (int j = 0; j < queries; j++) {
      float four[4];
      vf_sum4(acc[j][0], acc[j][1], acc[j][2], acc[j][3], four);
      if (t + 4 <= count) memcpy(scores[j] + at + t, four, 16);
      else memcpy(scores[j] + at + t, four, (size_t)(count - t) * 4);
    }
  }
}

/* values_j[d..] += sum over t of weights[j][t] * v_t[d..], for `vectors` vectors of d. */
INLINE void add_values(const part *to, int queries, const void *value, int64_t stride, int64_t d, int vectors,
                       int64_t count, float (*weights)[SUB], int64_t at, int kind) {
  vf acc[TILE][2];
  UNROLL for (int j = 0; j < queries; j++)
    UNROLL for (int i = 0; i < vectors; i++) acc[j][i] = vf_load(to[j].values + d + i * VL);
  for (int64_t t = 0; t < count; t++) {
    vf v[2];
    UNROLL for (int i = 0; i < vectors; i++) {
      v[i] = load(kind, value, t * stride + d + i * VL);
      ask_ahead(kind, value, stride, t * stride + d + i * VL);
    }
    UNROLL for (int j = 0; j < queries; j++) {
      vf w = vf_set1(weights[j][at + t]);
      UNROLL for (int i = 0; i < vectors; i++) acc[j][i] = vf_fma(w, v[i], acc[j][i]);
    }
  }
  UNROLL for (int j = 0; j < queries; j++)
    UNROLL for (int i = 0; i < vectors; i++) vf_store(to[j].values + d + i * VL, acc[j][i]);
}

INLINE void add_values_part(const part *to, int queries, const void *value, int64_t stride, int64_t d, int rest,
                            int64_t count, float (*weights)[SUB], int64_t at, int kind) {
  vf acc[TILE];
  UNROLL for (int j = 0; j < queries; j++) acc[j] = load_part(F32, to[j].values, d, rest);
  for (int64_t t = 0; t < count; t++) {
    vf v = load_part(kind, value, t * stride + d, rest);
    UNROLL for (int j = 0; j < queries; j++) acc[j] = vf_fma(vf_set1(weights[j][at + t]), v, acc[j]);
  }
  UNROLL for (int j = 0; j < queries; j++) store_part(to[j].values + d, acc[j], rest);
}

/* scores -> weights, and what was summed before is scaled to the new largest score. */
INLINE void weigh(const attend_args *a, float *scores, const part *to, int64_t low, int64_t end) {
  const vf scale = vf_set1((float)a->scale);
  vf largest = vf_set1(-INFINITY);
  for (int64_t t = 0; t < SUB; t += VL) {
    vf s = vf_mul(vf_load(scores + t), scale);
    if (a->softcap != 0) {
      vf cap = vf_set1((float)a->softcap);
      s = vf_mul(cap, vf_tanh(vf_div(s, cap)));
    }
    vf_store(scores + t, s);
  }
  for (int64_t t = 0; t < low; t++) scores[t] = -INFINITY;
  for (int64_t t = end; t < SUB; t++) scores[t] = -INFINITY;
  for (int64_t t = 0; t < SUB; t += VL) largest = vf_max(largest, vf_load(scores + t));
  const float before = *to->largest, now = fmaxf(before, vf_largest(largest));
  if (now == -INFINITY) {
    memset(scores, 0, SUB * sizeof(float));
    return;
  }
  vf sum = vf_zero();
  for (int64_t t = 0; t < SUB; t += VL) {
    vf w = vf_exp(vf_sub(vf_load(scores + t), vf_set1(now)));
    vf_store(scores + t, w);
    sum = vf_add(sum, w);
  }
  if (now > before) {
    const float keep = expf(before - now);
    *to->sum *= keep;
    for (int64_t d = 0; d < a->dim_v; d++) to->values[d] *= keep;
    *to->largest = now;
  }
  *to->sum += vf_sum(sum);
}

/* Up to TILE queries over positions b..b + SUB of one kv head. `queries` and `kind` are constants where this is called. */
INLINE void tile_of_queries(const attend_args *a, const char *key, const char *value, const float *const *q,
                            const int64_t *low, const int64_t *end, const part *to, int queries, int64_t b, int kind) {
  int64_t first = b + SUB, last = b;
  for (int j = 0; j < queries; j++) {
    if (low[j] < first) first = low[j];
    if (end[j] > last) last = end[j];
  }
  if (first < b) first = b;
  if (last > b + SUB) last = b + SUB;
  if (first >= last) return;
  const int64_t size = kind == F32 ? 4 : 2;
  /* The positions first..last lie in one run of slots, or two where the ring ends between them. */
  const int64_t slot = first % a->slots, room = a->slots - slot;
  const int64_t count[2] = {last - first < room ? last - first : room, last - first < room ? 0 : last - first - room};
  const int64_t at[2] = {first - b, first - b + count[0]}, from[2] = {slot, 0};
  float scores[TILE][SUB];
  memset(scores, 0, sizeof scores);
  for (int run = 0; run < 2; run++)
    if (count[run])
      score(q, queries, key + from[run] * a->k_slot * size, a->k_slot, a->dim, count[run], scores, at[run], kind);
  for (int j = 0; j < queries; j++) {
    const int64_t seen = low[j] > b ? (low[j] < b + SUB ? low[j] - b : SUB) : 0;
    const int64_t until = end[j] < b + SUB ? (end[j] > b ? end[j] - b : 0) : SUB;
    weigh(a, scores[j], &to[j], seen, until);
  }
  for (int run = 0; run < 2; run++) {
    if (!count[run]) continue;
    const char *base = value + from[run] * a->v_slot * size;
    int64_t d = 0;
    for (; d + 2 * VL <= a->dim_v; d += 2 * VL)
      add_values(to, queries, base, a->v_slot, d, 2, count[run], scores, at[run], kind);
    if (d + VL <= a->dim_v) {
      add_values(to, queries, base, a->v_slot, d, 1, count[run], scores, at[run], kind);
      d += VL;
    }
    if (d < a->dim_v)
      add_values_part(to, queries, base, a->v_slot, d, (int)(a->dim_v - d), count[run], scores, at[run], kind);
  }
}

/* `task` counts from the row's first: [kv head][chunk][run of new tokens]. */
INLINE void task_of_kind(const attend_args *a, const row_plan *plan, float *parts, int64_t r, int64_t task, int kind) {
  const int64_t group = a->heads / a->kv_heads, start = a->starts[r], size = kind == F32 ? 4 : 2;
  const int64_t run = task % plan->runs, kv = task / plan->runs / plan->chunks;
  const int64_t c = plan->chunk + task / plan->runs % plan->chunks;
  const int64_t first_token = run * RUN, last_token = first_token + RUN < a->counts[r] ? first_token + RUN : a->counts[r];
  const int64_t first_part = plan->first_part + task / plan->runs * a->counts[r] * group;
  const char *key = (const char *)a->k + (r * a->k_row + kv * a->k_head) * size;
  const char *value = (const char *)a->v + (r * a->v_row + kv * a->v_head) * size;
  for (int64_t j = first_token * group; j < last_token * group; j++) {
    part p = part_at(a, parts, first_part + j);
    *p.largest = -INFINITY, *p.sum = 0;
    memset(p.values, 0, (size_t)a->dim_v * sizeof(float));
  }
  int64_t from = low_of(a, start + first_token), until = start + last_token;
  if (from < chunk_begin(c)) from = chunk_begin(c);
  if (until > chunk_begin(c + 1)) until = chunk_begin(c + 1);
  for (int64_t b = from / SUB * SUB; b < until; b += SUB)
    for (int64_t j = first_token * group; j < last_token * group; j += TILE) {
      const float *q[TILE];
      int64_t low[TILE], end[TILE];
      part to[TILE];
      const int64_t left = last_token * group - j;
      const int queries = left < TILE ? (int)left : TILE;
      for (int i = 0; i < queries; i++) {
        const int64_t token = (j + i) / group, head = kv * group + (j + i) % group;
        q[i] = a->q + r * a->q_row + token * a->q_token + head * a->q_head;
        low[i] = low_of(a, start + token), end[i] = start + token + 1;
        to[i] = part_at(a, parts, first_part + j + i);
      }
      switch (queries) {
        case 1: tile_of_queries(a, key, value, q, low, end, to, 1, b, kind); break;
#if VL == 16
        case 2: tile_of_queries(a, key, value, q, low, end, to, 2, b, kind); break;
        case 3: tile_of_queries(a, key, value, q, low, end, to, 3, b, kind); break;
#endif
        default: tile_of_queries(a, key, value, q, low, end, to, TILE, b, kind); break;
      }
    }
}

static void task_f32(const attend_args *a, const row_plan *p, float *parts, int64_t r, int64_t task) {
  task_of_kind(a, p, parts, r, task, F32);
}
static void task_bf16(const attend_args *a, const row_plan *p, float *parts, int64_t r, int64_t task) {
  task_of_kind(a, p, parts, r, task, BF16);
}
static void task_f16(const attend_args *a, const row_plan *p, float *parts, int64_t r, int64_t task) {
  task_of_kind(a, p, parts, r, task, F16);
}

/* The parts of one query, in the order of the chunks; one that saw nothing has the sum 0 and adds nothing. */
static void combine(const attend_args *a, const row_plan *plan, float *parts, int64_t r, int64_t token, int64_t head) {
  float *out = a->out + ((r * a->tokens + token) * a->heads + head) * a->dim_v;
  memset(out, 0, (size_t)a->dim_v * sizeof(float));
  if (token >= a->counts[r]) return;
  const int64_t group = a->heads / a->kv_heads, n = a->counts[r] * group;
  const int64_t first = plan->first_part + head / group * plan->chunks * n + token * group + head % group;
  float largest = a->sinks ? a->sinks[head] : -INFINITY;
  for (int64_t c = 0; c < plan->chunks; c++) largest = fmaxf(largest, *part_at(a, parts, first + c * n).largest);
  float sum = a->sinks ? expf(a->sinks[head] - largest) : 0;
  for (int64_t c = 0; c < plan->chunks; c++) {
    const part p = part_at(a, parts, first + c * n);
    if (*p.largest == -INFINITY) continue;
    const float keep = expf(*p.largest - largest);
    sum += keep * *p.sum;
    for (int64_t d = 0; d < a->dim_v; d++) out[d] += keep * p.values[d];
  }
  for (int64_t d = 0; d < a->dim_v; d++) out[d] /= sum;
}

int64_t attend_begin(const attend_args *a, attend_plan *plan) {
  plan->tasks = 0;
  plan->parts = 0;
  plan->rows = malloc((size_t)(a->rows + 1) * sizeof(row_plan));
  if (!plan->rows) return -1;
  int64_t parts = 0;
  for (int64_t r = 0; r < a->rows; r++) {
    const int64_t start = a->starts[r], count = a->counts[r];
    /* What the row's queries see must lie in the ring at once; a row without tokens sees nothing. */
    if (start < 0 || count < 0 || count > a->tokens || (count && start + count - low_of(a, start) > a->slots)) {
      attend_end(plan);
      return 1 + r;
    }
    row_plan *row = &plan->rows[r];
    row->first_task = plan->tasks, row->first_part = parts;
    row->chunk = chunk_of(low_of(a, start));
    row->chunks = count ? chunk_of(start + count - 1) + 1 - row->chunk : 0;
    row->runs = (count + RUN - 1) / RUN;
    plan->tasks += a->kv_heads * row->chunks * row->runs;
    parts += a->heads * row->chunks * count;
  }
  plan->parts = malloc(((size_t)parts * (size_t)(a->dim_v + 2) + 1) * sizeof(float));
  if (plan->parts) return 0;
  attend_end(plan);
  return -1;
}

void attend_end(attend_plan *plan) {
  free(plan->parts);
  free(plan->rows);
}

void attend_run(const attend_args *a, const attend_plan *plan) {
#pragma omp for schedule(dynamic, 1)
  for (int64_t task = 0; task < plan->tasks; task++) {
    int64_t low = 0, high = a->rows - 1; /* the last row whose first task is not beyond this one */
    while (low < high) {
      const int64_t middle = (low + high + 1) / 2;
      if (plan->rows[middle].first_task <= task) low = middle;
      else high = middle - 1;
    }
    const row_plan *row = &plan->rows[low];
    if (a->kind == F32) task_f32(a, row, plan->parts, low, task - row->first_task);
    else if (a->kind == BF16) task_bf16(a, row, plan->parts, low, task - row->first_task);
    else task_f16(a, row, plan->parts, low, task - row->first_task);
  }
#pragma omp for schedule(static)
  for (int64_t i = 0; i < a->rows * a->tokens * a->heads; i++) {
    const int64_t r = i / (a->tokens * a->heads), token = i / a->heads % a->tokens;
    combine(a, &plan->rows[r], plan->parts, r, token, i % a->heads);
  }
}

int64_t lmstate_attend(const attend_args *a) {
  if (a->rows == 0 || a->tokens == 0) return 0;
  attend_plan plan;
  const int64_t status = attend_begin(a, &plan);
  if (status) return status;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  attend_run(a, &plan);
  attend_end(&plan);
  return 0;
}

/* Rotate the new queries and keys, store keys and values, attend: what a layer does between its products. */
int64_t lmstate_rotate_attend(const rotate_attend_args *a) {
  lmstate_rope(&a->q);
  lmstate_rope(&a->k);
  lmstate_append(&a->store);
  return lmstate_attend(&a->attend);
}
