/* The stored keys and values of a kv head, as floats or as codes: their address, and the products of queries and
 * weights with them. */
#ifndef LMSTATE_KV_READ_H
#define LMSTATE_KV_READ_H

#include "attention/kv_layout.h"

/* x[t] *= the scale of the vector at position t of the tile. */
INLINE void times_scales(const stored *x, const ring_ranges *r, float (*of)[SUB], int queries) {
  float scale[SUB + VL] = {0};
  for (int run = 0; run < 2; run++) floats_of_f16(x->scale + r->from[run], scale + r->at[run], r->count[run]);
  for (int j = 0; j < queries; j++)
    for (int64_t t = 0; t < SUB; t += VL) vf_store(of[j] + t, vf_mul(vf_load(of[j] + t), vf_load(scale + t)));
}

/* What the second part of the keys adds to the scores. Not inlined: where there is none, it shall not cost
 * registers. */
INLINE void beside_of_kind(const source *s, const float *const *q, int queries, const char *key, int64_t count,
                           float (*scores)[SUB], int64_t at, int kind) {
  float more[TILE][SUB];
  const int64_t slot = s->extra_slot;
  score(q, queries, key, slot, s->extra_dim, count, SUB * slot * size_of(kind), more, 0, kind);
  for (int j = 0; j < queries; j++)
    for (int64_t t = 0; t < count; t++) scores[j][at + t] += more[j][t];
}

static __attribute__((noinline)) void add_extra_key(const attend_args *a, const source *s, const float *const *q,
                                                 int queries,
                                                 int64_t from, int64_t count, float (*scores)[SUB], int64_t at) {
  const char *key = s->extra_key + from * s->extra_slot * size_of((int)a->kind);
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

/* Queries against a block of keys: q . (scale * code + middle) = (q * scale) . code + q . middle, channel by channel.
 * The codes of a channel are side by side, so that the scores are sums of vectors of positions; those out of sight,
 * too. */
INLINE void score_block(const attend_args *a, const source *s, const float *const *q, int queries, int64_t block,
                        float (*scores)[SUB], int kind) {
  const int fields = fields_of(kind), bytes = SUB / fields, channel = SUB * bits_of_codes(kind) / 8;
  const int64_t dim = a->dim;
  const uint8_t *codes = (const uint8_t *)s->k.data + block * s->k.slot;
  float scale[2 * MAX_DIM + VL], scaled[TILE][MAX_DIM + VL];
  const float *middle = scale + dim;
  vf constant[TILE];
  floats_of_f16(s->k.scale + block * block_scales(dim), scale, 2 * dim);
  UNROLL for (int j = 0; j < queries; j++) {
    vf sum = vf_zero();
    for (int64_t d = 0; d < dim; d += VL) { /* what is beyond dim is not read, or times 0 */
      const int n = dim - d < VL ? (int)(dim - d) : VL;
      const vf x = n < VL ? load_part(F32, q[j], d, n) : vf_load(q[j] + d);
      vf_store(scaled[j] + d, vf_mul(x, vf_load(scale + d)));
      sum = vf_fma(x, n < VL ? load_part(F32, middle, d, n) : vf_load(middle + d), sum);
    }
    constant[j] = vf_set1(vf_sum(sum));
  }
  for (int part = 0; part < bytes; part += 4 * VL / fields) { /* there are registers for four vectors a query */
    vf acc[TILE][4];
    UNROLL for (int j = 0; j < queries; j++)
      UNROLL for (int n = 0; n < 4; n++) acc[j][n] = constant[j];
    for (int64_t d = 0; d < dim; d++) {
      vf k[4];
      UNROLL for (int n = 0; n < 4; n += fields)
        load_fields(kind, codes, d * channel, bytes, part + n / fields * VL, k + n);
      if (d * channel % 64 < channel && !part) prefetch_ahead(kind, codes, d * channel, s->k.ahead);
      UNROLL for (int j = 0; j < queries; j++) {
        const vf x = vf_set1(scaled[j][d]);
        UNROLL for (int n = 0; n < 4; n++) acc[j][n] = vf_fma(x, k[n], acc[j][n]);
      }
    }
    UNROLL for (int j = 0; j < queries; j++)
      UNROLL for (int n = 0; n < 4; n++)
        vf_store(scores[j] + n % fields * bytes + part + n / fields * VL, acc[j][n]);
  }
}

INLINE void score_vectors(const attend_args *a, const source *s, const float *const *q, int queries,
                          const ring_ranges *r, float (*scores)[SUB], int kind) {
  const float *own[TILE]; /* so that the compiler knows that nothing changes them */
  UNROLL for (int j = 0; j < queries; j++) own[j] = q[j];
  for (int run = 0; run < 2; run++) {
    if (!r->count[run]) continue;
    score(own, queries, s->k.data + r->from[run] * s->k.slot * size_of(kind), s->k.slot, a->dim, r->count[run],
          s->k.ahead, scores, r->at[run], kind);
    if (kind <= F16 && s->extra_key) add_extra_key(a, s, own, queries, r->from[run], r->count[run], scores, r->at[run]);
  }
  if (kind >= CODES8) times_scales(&s->k, r, scores, queries);
}

INLINE void add_all(const attend_args *a, const source *s, const partial_softmax *to, int queries, const ring_ranges *r,
                    float (*weights)[SUB], int kind) {
  if (kind >= CODES8) times_scales(&s->v, r, weights, queries);
  for (int run = 0; run < 2; run++)
    if (r->count[run])
      add_values(to, queries, s->v.data + r->from[run] * s->v.slot * size_of(kind), s->v.slot, a->dim_v, r->count[run],
                 s->v.ahead, weights, r->at[run], kind);
}

#define KIND(name, kind) \
  static void score_##name(const attend_args *a, const source *s, const float *const *q, int queries, \
                           const ring_ranges *r, int64_t block, float (*scores)[SUB]) { \
    (void)block; \
    FOR_QUERIES(score_vectors(a, s, q, N, r, scores, kind)) \
  } \
  static void add_##name(const attend_args *a, const source *s, const partial_softmax *to, int queries, \
                         const ring_ranges *r, float (*weights)[SUB]) { \
    FOR_QUERIES(add_all(a, s, to, N, r, weights, kind)) \
  }
KIND(f32, F32)
KIND(bf16, BF16)
KIND(f16, F16)
KIND(int8, CODES8)
KIND(int4, CODES4)
KIND(int3, CODES3)
KIND(int2, CODES2)
#define BLOCKS(name, kind) \
  static void score_blocks_##name(const attend_args *a, const source *s, const float *const *q, int queries, \
                                  const ring_ranges *r, int64_t block, float (*scores)[SUB]) { \
    (void)r; \
    FOR_QUERIES(score_block(a, s, q, N, block, scores, kind)) \
  }
BLOCKS(int4, CODES4)
BLOCKS(int3, CODES3)
BLOCKS(int2, CODES2)
static score_kind *const scores_of[] = {score_f32, score_bf16, score_f16, score_int8, score_int4, score_int3, score_int2};
static value_kind *const adds_of[] = {add_f32, add_bf16, add_f16, add_int8, add_int4, add_int3, add_int2};

/* What a kv head has stored as floats, and as codes; where keys are in blocks, the newest keys are floats and all
 * values codes. */
static source floats_of(const attend_args *a, const attend_plan *all, int64_t r, int64_t kv) {
  const int64_t size = size_of((int)a->kind), slots = all->codes ? all->codes->tail : a->slots;
  const int64_t row = r * a->table_row, k_head = kv * a->k_head, v_head = kv * a->v_head;
  source s = {.score = scores_of[a->kind], .add = adds_of[a->kind]};
  if (a->k_table) {
    s.k = stored_in_blocks(a->k_table + row, a->table_row, a->block, k_head, a->k_slot, size);
    if (a->v_table) s.v = stored_in_blocks(a->v_table + row, a->table_row, a->block, v_head, a->v_slot, size);
  } else {
    s.k = stored_in_ring(a->k, r * a->k_row + k_head, NULL, slots, a->k_slot, size);
    s.v = stored_in_ring(a->v, r * a->v_row + v_head, NULL, slots, a->v_slot, size);
  }
  if (all->extra_key) {
    s.extra_slot = all->extra_key->slot, s.extra_dim = all->extra_key->dim;
    if (all->extra_key->table) s.extra_table = all->extra_key->table + row;
    else s.extra_key = (const char *)all->extra_key->k + r * all->extra_key->row * size;
  }
  return s;
}

static source codes_of(const attend_args *a, const codes_args *c, int64_t r, int64_t kv) {
  const int64_t k = a->dim * c->bits / 8, v = a->dim_v * c->bits / 8;
  const int64_t scales = c->tail ? block_scales(a->dim) : 1;
  source s = {0};
  if (c->k_table) {
    const int64_t row = r * c->table_row, first = kv * c->block, n = c->table_row;
    s.k = stored_in_blocks(c->k_table + row, n, c->block, first * k, k, 1);
    s.v = stored_in_blocks(c->v_table + row, n, c->block, first * v, v, 1);
    s.k.scale_table = c->k_scale_table + row, s.k.scale_first = first * scales * 2;
    s.v.scale_table = c->v_scale_table + row, s.v.scale_first = first * 2;
  } else {
    const int64_t first = (r * a->kv_heads + kv) * a->slots;
    s.k = stored_in_ring(c->k, first * k, c->k_scale + first * scales, a->slots, k, 1);
    s.v = stored_in_ring(c->v, first * v, c->v_scale + first, a->slots, v, 1);
  }
  s.add = adds_of[codes_of_bits(c->bits)];
  if (c->tail) s.score = c->bits == 4 ? score_blocks_int4 : c->bits == 3 ? score_blocks_int3 : score_blocks_int2;
  else s.score = scores_of[codes_of_bits(c->bits)];
  return s;
}

#endif
