/* Attention of new tokens over the stored ones, for up to some hundreds of new tokens a row.
 *
 * The positions are cut at fixed places (`chunk_begin`). A task is one kv head of one row over one chunk, for a run of
 * the row's new tokens and all query heads of that kv head, so that keys and values are read once for them; each task
 * leaves its part of the softmax, and the parts are put together in the order of the chunks. Where a query's sum is cut
 * depends on its own position alone: its result has the same bits beside other queries, rows and numbers of threads. */
#include <stdlib.h>

#include "attend.h"
#include "attend_tile.h"

enum { RUN = 32 }; /* new tokens of a task */

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

static part part_at(const attend_args *a, float *parts, int64_t index) {
  float *p = parts + index * (a->dim_v + 2);
  part r = {p, p + 1, p + 2, NULL, NULL};
  return r;
}

/* What one kv head of a row has stored: where it lies, and how it is to be read. */
typedef struct {
  const char *key, *value;            /* slot 0 */
  const uint16_t *k_scale, *v_scale;  /* of codes, float16: see codes_args */
  int64_t slots, k_slot, v_slot;      /* from slot to slot, in elements; in bytes where they are codes */
  const char *beside;                 /* slot 0 of the second part of the keys, or null */
  int64_t beside_slot, beside_dim;
  int by_vector;                      /* keys of few bits have a scale and a low each, and not the channels of a block */
} source;

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

/* The float16 numbers `which` of `each` of the slots of both runs -> one float a position of the tile. */
INLINE void spread(const uint16_t *scales, int each, int which, const int64_t *from, const int64_t *at,
                   const int64_t *count, float *out) {
  float wide[2 * SUB + VL];
  memset(out, 0, SUB * sizeof(float));
  for (int run = 0; run < 2; run++) {
    floats_of_f16(scales + each * from[run], wide, each * count[run]);
    for (int64_t t = 0; t < count[run]; t++) out[at[run] + t] = wide[each * t + which];
  }
}

/* Weights of values -> weights of their codes; what the lowest values add to every number goes into `to`. */
INLINE void scale_weights(const attend_args *a, const float *scale, const float *low, float *weights, const part *to) {
  vf sum = vf_zero();
  for (int64_t t = 0; t < SUB; t += VL) {
    const vf w = vf_load(weights + t);
    if (low) sum = vf_fma(w, vf_load(low + t), sum);
    vf_store(weights + t, vf_mul(w, vf_load(scale + t)));
  }
  if (!low) return;
  const float every = vf_sum(sum);
  for (int64_t d = 0; d < a->dim_v; d++) to->values[d] += every;
}

/* What the second part of the keys adds to the scores. Not inlined: where there is none, it shall not cost registers. */
INLINE void beside_of_kind(const source *s, const float *const *q, int queries, const char *key, int64_t count,
                           float (*scores)[SUB], int64_t at, int kind) {
  float more[TILE][SUB];
  score(q, queries, key, s->beside_slot, s->beside_dim, count, more, 0, kind);
  for (int j = 0; j < queries; j++)
    for (int64_t t = 0; t < count; t++) scores[j][at + t] += more[j][t];
}

static __attribute__((noinline)) void add_beside(const attend_args *a, const source *s, const float *const *q, int queries,
                                                 int64_t from, int64_t count, float (*scores)[SUB], int64_t at) {
  const char *key = s->beside + from * s->beside_slot * size_of((int)a->kind);
  const float *rest[TILE];
  for (int j = 0; j < queries; j++) rest[j] = q[j] + a->dim;
  for (int j = 0; j < queries; j += queries == TILE ? TILE : 1)
    switch (a->kind + (queries == TILE ? 3 : 0)) {
      case F32: beside_of_kind(s, rest + j, 1, key, count, scores + j, at, F32); break;
      case BF16: beside_of_kind(s, rest + j, 1, key, count, scores + j, at, BF16); break;
      case F16: beside_of_kind(s, rest + j, 1, key, count, scores + j, at, F16); break;
      case 3 + F32: beside_of_kind(s, rest, TILE, key, count, scores, at, F32); break;
      case 3 + BF16: beside_of_kind(s, rest, TILE, key, count, scores, at, BF16); break;
      default: beside_of_kind(s, rest, TILE, key, count, scores, at, F16); break;
    }
}

/* Up to TILE queries over positions b..b + SUB of one kv head. `queries` and `kind` are constants where this is called. */
INLINE void tile_of_queries(const attend_args *a, const source *s, const float *const *q, const int64_t *low,
                            const int64_t *end, const part *to, int queries, int64_t b, int kind) {
  int64_t first = b + SUB, last = b;
  for (int j = 0; j < queries; j++) {
    if (low[j] < first) first = low[j];
    if (end[j] > last) last = end[j];
  }
  if (first < b) first = b;
  if (last > b + SUB) last = b + SUB;
  if (first >= last) return;
  const int64_t size = size_of(kind);
  /* The positions first..last lie in one run of slots, or two where the ring ends between them. */
  const int64_t slot = first % s->slots, room = s->slots - slot;
  const int64_t count[2] = {last - first < room ? last - first : room, last - first < room ? 0 : last - first - room};
  const int64_t at[2] = {first - b, first - b + count[0]}, from[2] = {slot, 0};
  const int few_bits = kind == CODES4 || kind == CODES2, in_blocks = few_bits && !s->by_vector;
  float scores[TILE][SUB], scaled[TILE][MAX_DIM + VL], constant[TILE], k_scale[SUB], k_low[SUB], v_scale[SUB], v_low[SUB];
  const float *own[TILE];
  UNROLL for (int j = 0; j < queries; j++) own[j] = q[j];
  if (in_blocks) { /* one scale and one lowest value a channel */
    float scale[2 * MAX_DIM + VL];
    floats_of_f16(s->k_scale + (slot - slot % SUB) * block_scales(a->dim), scale, 2 * a->dim);
    for (int j = 0; j < queries; j++) {
      vf sum = vf_zero();
      for (int64_t d = 0; d < a->dim; d += VL) { /* what is beyond dim is not read, or times 0 */
        const vf x = a->dim - d < VL ? load_part(F32, q[j], d, (int)(a->dim - d)) : vf_load(q[j] + d);
        vf_store(scaled[j] + d, vf_mul(x, vf_load(scale + d)));
        const vf low = a->dim - d < VL ? load_part(F32, scale + a->dim, d, (int)(a->dim - d)) : vf_load(scale + a->dim + d);
        sum = vf_fma(x, low, sum);
      }
      constant[j] = vf_sum(sum), own[j] = scaled[j];
    }
  }
  if (few_bits && s->by_vector) {
    spread(s->k_scale, 2, 0, from, at, count, k_scale);
    spread(s->k_scale, 2, 1, from, at, count, k_low);
    for (int j = 0; j < queries; j++) {
      vf sum = vf_zero();
      for (int64_t d = 0; d < a->dim; d += VL)
        sum = vf_add(sum, a->dim - d < VL ? load_part(F32, q[j], d, (int)(a->dim - d)) : vf_load(q[j] + d));
      constant[j] = vf_sum(sum);
    }
  }
  if (kind == CODES8) spread(s->k_scale, 1, 0, from, at, count, k_scale);
  if (kind >= CODES8) spread(s->v_scale, few_bits ? 2 : 1, 0, from, at, count, v_scale);
  if (few_bits) spread(s->v_scale, 2, 1, from, at, count, v_low);
  memset(scores, 0, sizeof scores);
  for (int run = 0; run < 2; run++) {
    if (!count[run]) continue;
    score(own, queries, s->key + from[run] * s->k_slot * size, s->k_slot, a->dim, count[run], scores, at[run], kind);
    if (kind <= F16 && s->beside) add_beside(a, s, own, queries, from[run], count[run], scores, at[run]);
  }
  for (int j = 0; j < queries; j++) {
    const int64_t seen = low[j] > b ? (low[j] < b + SUB ? low[j] - b : SUB) : 0;
    const int64_t until = end[j] < b + SUB ? (end[j] > b ? end[j] - b : 0) : SUB;
    if (in_blocks)
      for (int64_t t = 0; t < SUB; t++) scores[j][t] += constant[j];
    if (kind == CODES8)
      for (int64_t t = 0; t < SUB; t++) scores[j][t] *= k_scale[t];
    if (few_bits && s->by_vector)
      for (int64_t t = 0; t < SUB; t++) scores[j][t] = scores[j][t] * k_scale[t] + constant[j] * k_low[t];
    weigh(a, scores[j], &to[j], seen, until);
    if (to[j].weights) {
      memcpy(to[j].weights + b, scores[j], SUB * sizeof(float));
      to[j].peaks[b / SUB] = *to[j].largest;
    }
    if (kind >= CODES8) scale_weights(a, v_scale, few_bits ? v_low : NULL, scores[j], &to[j]);
  }
  for (int run = 0; run < 2; run++) {
    if (!count[run]) continue;
    add_values(to, queries, s->value + from[run] * s->v_slot * size, s->v_slot, a->dim_v, count[run], scores, at[run], kind);
  }
}

typedef void tile_of_kind(const attend_args *a, const source *s, const float *const *q, const int64_t *low,
                          const int64_t *end, const part *to, int queries, int64_t b);

#if VL == 16
#define MIDDLE_TILES(kind) \
    case 2: tile_of_queries(a, s, q, low, end, to, 2, b, kind); break; \
    case 3: tile_of_queries(a, s, q, low, end, to, 3, b, kind); break;
#else
#define MIDDLE_TILES(kind)
#endif
#define TILE_OF(name, kind) \
  static void name(const attend_args *a, const source *s, const float *const *q, const int64_t *low, \
                   const int64_t *end, const part *to, int queries, int64_t b) { \
    switch (queries) { \
      case 1: tile_of_queries(a, s, q, low, end, to, 1, b, kind); break; \
      MIDDLE_TILES(kind) \
      default: tile_of_queries(a, s, q, low, end, to, TILE, b, kind); break; \
    } \
  }
TILE_OF(tile_f32, F32)
TILE_OF(tile_bf16, BF16)
TILE_OF(tile_f16, F16)
TILE_OF(tile_int8, CODES8)
TILE_OF(tile_int4, CODES4)
TILE_OF(tile_int2, CODES2)

/* `task` counts from the row's first: [kv head][chunk][run of new tokens]. */
static void run_task(const attend_args *a, const attend_plan *all, int64_t r, int64_t task) {
  const row_plan *plan = &all->rows[r];
  const codes_args *codes = all->codes;
  const beside_args *beside = all->beside;
  const int64_t group = a->heads / a->kv_heads, start = a->starts[r], size = size_of(a->kind);
  const int64_t run = task % plan->runs, kv = task / plan->runs / plan->chunks;
  const int64_t c = plan->chunk + task / plan->runs % plan->chunks;
  const int64_t first_token = run * RUN, last_token = first_token + RUN < a->counts[r] ? first_token + RUN : a->counts[r];
  const int64_t first_part = plan->first_part + task / plan->runs * a->counts[r] * group, n = last_token * group;
  const source floats = {
    (const char *)a->k + (r * a->k_row + kv * a->k_head) * size, (const char *)a->v + (r * a->v_row + kv * a->v_head) * size,
    NULL, NULL, codes ? codes->tail : a->slots, a->k_slot, a->v_slot,
    beside ? (const char *)beside->k + r * beside->row * size : NULL, beside ? beside->slot : 0, beside ? beside->dim : 0, 0,
  };
  tile_of_kind *tile = a->kind == F32 ? tile_f32 : a->kind == BF16 ? tile_bf16 : tile_f16, *coded_tile = NULL;
  source coded = {0};
  if (codes) {
    const int64_t head = r * a->kv_heads + kv, slot = head * a->slots;
    coded_tile = codes->bits == 8 ? tile_int8 : codes->bits == 4 ? tile_int4 : tile_int2;
    coded.slots = a->slots, coded.k_slot = a->dim * codes->bits / 8, coded.v_slot = a->dim_v * codes->bits / 8;
    coded.key = (const char *)codes->k + slot * coded.k_slot, coded.value = (const char *)codes->v + slot * coded.v_slot;
    coded.by_vector = !codes->lag;
    coded.k_scale = codes->k_scale + slot * (codes->bits == 8 ? 1 : codes->lag ? block_scales(a->dim) : 2);
    coded.v_scale = codes->v_scale + slot * (codes->bits == 8 ? 1 : 2);
  }
  for (int64_t j = first_token * group; j < n; j++) {
    part p = part_at(a, all->parts, first_part + j);
    *p.largest = -INFINITY, *p.sum = 0;
    memset(p.values, 0, (size_t)a->dim_v * sizeof(float));
  }
  int64_t from = low_of(a, start + first_token), until = start + last_token;
  if (from < chunk_begin(c)) from = chunk_begin(c);
  if (until > chunk_begin(c + 1)) until = chunk_begin(c + 1);
  for (int64_t b = from / SUB * SUB; b < until; b += SUB) {
    /* The queries before this one stand too near to the block to see codes of it. */
    int64_t far = n;
    if (codes) far = codes->lag ? (b + SUB - 1 + codes->lag - start) * group : 0;
    int queries;
    for (int64_t j = first_token * group; j < n; j += queries) {
      const float *q[TILE];
      int64_t low[TILE], end[TILE];
      part to[TILE];
      const int64_t stop = j < far && far < n ? far : n;
      queries = stop - j < TILE ? (int)(stop - j) : TILE;
      for (int i = 0; i < queries; i++) {
        const int64_t token = (j + i) / group, head = kv * group + (j + i) % group;
        q[i] = a->q + r * a->q_row + token * a->q_token + head * a->q_head;
        low[i] = low_of(a, start + token), end[i] = start + token + 1;
        to[i] = part_at(a, all->parts, first_part + j + i);
        if (a->columns) {
          const int64_t query = (r * a->tokens + token) * a->heads + head;
          to[i].weights = all->weights + query * all->padded, to[i].peaks = all->peaks + query * (all->padded / SUB);
        }
      }
      if (j < far) tile(a, &floats, q, low, end, to, queries, b);
      else coded_tile(a, &coded, q, low, end, to, queries, b);
    }
  }
}

/* The parts of one query, in the order of the chunks; one that saw nothing has the sum 0 and adds nothing. */
static void combine(const attend_args *a, const attend_plan *all, int64_t r, int64_t token, int64_t head) {
  const row_plan *plan = &all->rows[r];
  float *parts = all->parts;
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
  if (!a->columns) return;
  float *total = all->totals + 2 * ((r * a->tokens + token) * a->heads + head);
  total[0] = largest, total[1] = sum;
}

/* Add to the columns of one kv head what its slots received, averaged over the group: in the order of the queries. No
 * ring wraps here, so that position p lies in slot p. */
static void add_columns(const attend_args *a, const attend_plan *all, int64_t r, int64_t kv) {
  const int64_t group = a->heads / a->kv_heads;
  const int64_t end = a->ends ? a->ends[r] : a->starts[r] + a->counts[r];
  for (int64_t token = 0; token < a->counts[r]; token++) {
    const int64_t own = a->starts[r] + token, plane = own + a->planes - end;
    float *column = a->columns + ((r * a->kv_heads + kv) * a->planes + (plane < 0 ? 0 : plane)) * a->slots;
    for (int64_t h = kv * group; h < (kv + 1) * group; h++) {
      const int64_t query = (r * a->tokens + token) * a->heads + h;
      const float *weights = all->weights + query * all->padded, *total = all->totals + 2 * query;
      for (int64_t b = low_of(a, own) / SUB * SUB; b <= own; b += SUB) {
        const float keep = expf(all->peaks[query * (all->padded / SUB) + b / SUB] - total[0]) / (total[1] * (float)group);
        const int64_t n = a->slots - b < SUB ? a->slots - b : SUB;
        int64_t t = 0;
        for (; t + VL <= n; t += VL)
          vf_store(column + b + t, vf_fma(vf_set1(keep), vf_load(weights + b + t), vf_load(column + b + t)));
        for (; t < n; t++) column[b + t] += keep * weights[b + t];
      }
    }
  }
}

int64_t attend_begin(const attend_args *a, attend_plan *plan) {
  plan->tasks = 0;
  plan->parts = plan->weights = NULL;
  plan->codes = NULL, plan->beside = NULL;
  plan->rows = malloc((size_t)(a->rows + 1) * sizeof(row_plan));
  if (!plan->rows) return -1;
  int64_t parts = 0;
  for (int64_t r = 0; r < a->rows; r++) {
    const int64_t start = a->starts[r], count = a->counts[r];
    /* What the row's queries see must lie in the ring at once; a row without tokens sees nothing. */
    const int64_t first = a->columns ? 0 : low_of(a, start); /* a ring that wraps has no columns */
    const int beyond = a->ends && a->ends[r] < start + count; /* their sums would lie behind the last plane */
    if (start < 0 || count < 0 || count > a->tokens || (count && (beyond || start + count - first > a->slots))) {
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
  if (a->columns) {
    const size_t queries = (size_t)(a->rows * a->tokens * a->heads);
    plan->padded = (a->slots + SUB - 1) / SUB * SUB;
    plan->weights = malloc((queries * (size_t)(plan->padded + plan->padded / SUB + 2) + 1) * sizeof(float));
    plan->peaks = plan->weights + queries * (size_t)plan->padded;
    plan->totals = plan->peaks + queries * (size_t)(plan->padded / SUB);
  }
  if (plan->parts && (plan->weights || !a->columns)) return 0;
  attend_end(plan);
  return -1;
}

void attend_end(attend_plan *plan) {
  free(plan->weights);
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
    run_task(a, plan, low, task - row->first_task);
  }
#pragma omp for schedule(static)
  for (int64_t i = 0; i < a->rows * a->tokens * a->heads; i++) {
    const int64_t r = i / (a->tokens * a->heads), token = i / a->heads % a->tokens;
    combine(a, plan, r, token, i % a->heads);
  }
  if (!a->columns) return;
#pragma omp for schedule(static)
  for (int64_t i = 0; i < a->rows * a->kv_heads; i++) add_columns(a, plan, i / a->kv_heads, i % a->kv_heads);
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
