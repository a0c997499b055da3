/* Attention over slots in any order, each with a position of its own, and the attention that each slot receives. */
#include <stdlib.h>

#include "attend_tile.h"

typedef struct {
  const float *q;                 /* [R, T, H, D] by its strides */
  const void *k, *v;              /* [R, K, S, D] and [R, K, S, DV], contiguous, of `kind` */
  const int32_t *positions;       /* [R, K, S], contiguous; negative where a slot is not seen */
  const int64_t *starts, *counts; /* [R] */
  const float *sinks;             /* [H], or null */
  float *out;                     /* [R, T, H, DV], contiguous */
  float *seen;                    /* [R, K, S, 1 + last], zeros, or null */
  int64_t rows, tokens, heads, kv_heads, slots, dim, dim_v, last;
  int64_t q_row, q_token, q_head;
  int64_t kind, window, chunk, threads; /* window, chunk: 0 where there is none */
  double scale, softcap;
} slots_args;

/* A query's scores [S] -> weights that add up to one (with the sink's); all zero where it sees nothing. */
static void softmax(const slots_args *a, float *scores, const int32_t *positions, int64_t own, const float *sink) {
  float largest = sink ? *sink : -INFINITY;
  for (int64_t t = 0; t < a->slots; t++) {
    const int64_t p = positions[t];
    const int sees = p >= 0 && p <= own && (!a->window || p > own - a->window) && (!a->chunk || p / a->chunk == own / a->chunk);
    float x = scores[t] * (float)a->scale;
    if (a->softcap != 0) x = (float)a->softcap * tanhf(x / (float)a->softcap);
    scores[t] = sees ? x : -INFINITY;
    largest = fmaxf(largest, scores[t]);
  }
  vf sum = vf_zero();
  const int64_t padded = (a->slots + SUB - 1) / SUB * SUB;
  for (int64_t t = a->slots; t < padded; t++) scores[t] = -INFINITY;
  if (largest == -INFINITY) {
    memset(scores, 0, (size_t)padded * sizeof(float));
    return;
  }
  for (int64_t t = 0; t < padded; t += VL) {
    const vf w = vf_exp(vf_sub(vf_load(scores + t), vf_set1(largest)));
    vf_store(scores + t, w);
    sum = vf_add(sum, w);
  }
  const vf scale = vf_set1(1.0f / (vf_sum(sum) + (sink ? expf(*sink - largest) : 0)));
  for (int64_t t = 0; t < padded; t += VL) vf_store(scores + t, vf_mul(vf_load(scores + t), scale));
}

/* Up to TILE queries of one kv head; scores has room for all of their slots. */
INLINE void queries_of_kind(const slots_args *a, int64_t r, int64_t kv, int64_t j, int queries, float *scores, int kind) {
  const int64_t group = a->heads / a->kv_heads, head = r * a->kv_heads + kv;
  const int64_t padded = (a->slots + SUB - 1) / SUB * SUB;
  const char *key = (const char *)a->k + head * a->slots * a->dim * size_of(kind);
  const char *value = (const char *)a->v + head * a->slots * a->dim_v * size_of(kind);
  const int32_t *positions = a->positions + head * a->slots;
  const float *q[TILE];
  part to[TILE] = {{0}};
  float tile[TILE][SUB];
  for (int i = 0; i < queries; i++) {
    const int64_t token = (j + i) / group, h = kv * group + (j + i) % group;
    q[i] = a->q + r * a->q_row + token * a->q_token + h * a->q_head;
    to[i].values = a->out + ((r * a->tokens + token) * a->heads + h) * a->dim_v;
  }
  for (int64_t t = 0; t < a->slots; t += SUB) {
    const int64_t count = a->slots - t < SUB ? a->slots - t : SUB;
    score(q, queries, key + t * a->dim * size_of(kind), a->dim, a->dim, count, tile, 0, kind);
    for (int i = 0; i < queries; i++) memcpy(scores + i * padded + t, tile[i], (size_t)count * sizeof(float));
  }
  for (int i = 0; i < queries; i++) {
    const int64_t token = (j + i) / group;
    float *weights = scores + i * padded;
    softmax(a, weights, positions, a->starts[r] + token, a->sinks ? a->sinks + kv * group + (j + i) % group : NULL);
    if (!a->seen) continue;
    const int64_t late = token - (a->counts[r] - a->last);
    float *column = a->seen + head * a->slots * (1 + a->last) + (late < 0 ? 0 : 1 + late);
    for (int64_t t = 0; t < a->slots; t++) column[t * (1 + a->last)] += weights[t] / (float)group;
  }
  for (int64_t t = 0; t < a->slots; t += SUB) {
    const int64_t count = a->slots - t < SUB ? a->slots - t : SUB;
    for (int i = 0; i < queries; i++) memcpy(tile[i], scores + i * padded + t, SUB * sizeof(float));
    add_values(to, queries, value + t * a->dim_v * size_of(kind), a->dim_v, a->dim_v, count, tile, 0, kind);
  }
}

#define QUERIES_OF(name, kind) \
  static void name(const slots_args *a, int64_t r, int64_t kv, int64_t j, int queries, float *scores) { \
    if (queries == TILE) queries_of_kind(a, r, kv, j, TILE, scores, kind); \
    else for (int i = 0; i < queries; i++) queries_of_kind(a, r, kv, j + i, 1, scores, kind); \
  }
QUERIES_OF(queries_f32, F32)
QUERIES_OF(queries_bf16, BF16)
QUERIES_OF(queries_f16, F16)

/* 0; -1 where there was no memory. */
int64_t lmstate_attend_slots(const slots_args *a) {
  memset(a->out, 0, (size_t)(a->rows * a->tokens * a->heads * a->dim_v) * sizeof(float));
  const int64_t padded = (a->slots + SUB - 1) / SUB * SUB, group = a->heads / a->kv_heads;
  float *all = malloc((size_t)(a->threads * TILE * padded + 1) * sizeof(float));
  if (!all) return -1;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t lane = 0; lane < a->threads; lane++) /* heads of rows by turns */
    for (int64_t i = lane; i < a->rows * a->kv_heads; i += a->threads) {
      const int64_t r = i / a->kv_heads, n = a->counts[r] * group;
      for (int64_t j = 0; j < n; j += TILE) {
        const int queries = n - j < TILE ? (int)(n - j) : TILE;
        float *scores = all + lane * TILE * padded;
        if (a->kind == F32) queries_f32(a, r, i % a->kv_heads, j, queries, scores);
        else if (a->kind == BF16) queries_bf16(a, r, i % a->kv_heads, j, queries, scores);
        else queries_f16(a, r, i % a->kv_heads, j, queries, scores);
      }
    }
  free(all);
  return 0;
}
