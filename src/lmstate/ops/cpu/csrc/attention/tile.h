/* Products of a few queries with a tile of keys, and of its weights with values: what all attention is made of. */
#ifndef LMSTATE_TILE_H
#define LMSTATE_TILE_H

#include "simd/simd.h"

enum { SUB = 64 }; /* positions that are scored together */

/* The processor's own prefetch stops at every page, and keys and values take turns: ask for the same place of the tile
 * that comes next, `ahead` bytes from here, into the first cache, which has room for it. */
INLINE void prefetch_ahead(int kind, const void *base, int64_t at, int64_t ahead) {
  __builtin_prefetch((const char *)base + at * size_of(kind) + ahead);
}
enum { TILE = VL == 16 ? 4 : 3 }; /* queries that share a key in registers, with sums for four keys */

/* `call` with constants for the number of queries: those that a processor has registers for. */
#if VL == 16
#define FOR_QUERIES(call) switch (queries) { \
    case 1: { enum { N = 1 }; call; break; } \
    case 2: { enum { N = 2 }; call; break; } \
    case 3: { enum { N = 3 }; call; break; } \
    default: { enum { N = TILE }; call; } }
#else
#define FOR_QUERIES(call) switch (queries) { \
    case 1: { enum { N = 1 }; call; break; } \
    case 2: { enum { N = 2 }; call; break; } \
    default: { enum { N = TILE }; call; } }
#endif

/* A part of a softmax: largest score, sum of exponentials, then their sum with the values (dim_v floats). Where they
 * are asked for, also the exponentials of each tile of SUB positions, and the largest score that these are relative
 * to. */
typedef struct { float *largest, *sum, *values, *weights, *peaks; } partial_softmax;

/* scores[j][t] = q_j . k_t for `count` keys from `key` on. */
INLINE void score(const float *const *q, int queries, const void *key, int64_t stride, int64_t dim, int64_t count,
                  int64_t ahead, float (*scores)[SUB], int64_t at, int kind) {
  const int fields = fields_of(kind);
  const int64_t part = dim / fields;
  for (int64_t t = 0; t < count; t += 4) {
    int64_t rows[4];
    UNROLL for (int n = 0; n < 4; n++) rows[n] = (t + n < count ? t + n : count - 1) * stride;
    vf acc[TILE][4], k[4];
    UNROLL for (int j = 0; j < queries; j++)
      UNROLL for (int n = 0; n < 4; n++) acc[j][n] = vf_zero();
    int64_t d = 0;
    for (; d + VL <= part; d += VL) {
      if (d * size_of(kind) % 64 == 0)
        UNROLL for (int n = 0; n < 4; n++) prefetch_ahead(kind, key, rows[n] + d, ahead);
      vf x[TILE][4];
      UNROLL for (int j = 0; j < queries; j++)
        UNROLL for (int f = 0; f < fields; f++) x[j][f] = vf_load(q[j] + f * part + d);
      UNROLL for (int n = 0; n < 4; n++) {
        load_fields(kind, key, rows[n], part, d, k);
        UNROLL for (int f = 0; f < fields; f++)
          UNROLL for (int j = 0; j < queries; j++) acc[j][n] = vf_fma(x[j][f], k[f], acc[j][n]);
      }
    }
    if (d < part) {
      const int rest = (int)(part - d);
      vf x[TILE][4];
      UNROLL for (int j = 0; j < queries; j++)
        UNROLL for (int f = 0; f < fields; f++) x[j][f] = load_part(F32, q[j], f * part + d, rest);
      UNROLL for (int n = 0; n < 4; n++) {
        load_fields_part(kind, key, rows[n], part, d, rest, k);
        UNROLL for (int f = 0; f < fields; f++)
          UNROLL for (int j = 0; j < queries; j++) acc[j][n] = vf_fma(x[j][f], k[f], acc[j][n]);
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

/* values_j[d..] += sum over t of weights[j][t] * v_t[d..], for `vectors` vectors of d in every field. */
INLINE void add_vectors(const partial_softmax *to, int queries, const void *value, int64_t stride, int64_t part,
                        int64_t d,
                        int vectors, int64_t count, int64_t ahead, float (*weights)[SUB], int64_t at, int kind) {
  const int fields = fields_of(kind);
  vf acc[TILE][4][4];
  UNROLL for (int j = 0; j < queries; j++)
    UNROLL for (int i = 0; i < vectors; i++)
      UNROLL for (int f = 0; f < fields; f++) acc[j][i][f] = vf_load(to[j].values + f * part + d + i * VL);
  for (int64_t t = 0; t < count; t++) {
    vf v[4], w[TILE];
    UNROLL for (int j = 0; j < queries; j++) w[j] = vf_set1(weights[j][at + t]);
    UNROLL for (int i = 0; i < vectors; i++) {
      load_fields(kind, value, t * stride, part, d + i * VL, v);
      if (i * VL * size_of(kind) % 64 == 0) prefetch_ahead(kind, value, t * stride + d + i * VL, ahead);
      UNROLL for (int f = 0; f < fields; f++)
        UNROLL for (int j = 0; j < queries; j++) acc[j][i][f] = vf_fma(w[j], v[f], acc[j][i][f]);
    }
  }
  UNROLL for (int j = 0; j < queries; j++)
    UNROLL for (int i = 0; i < vectors; i++)
      UNROLL for (int f = 0; f < fields; f++) vf_store(to[j].values + f * part + d + i * VL, acc[j][i][f]);
}

INLINE void add_part(const partial_softmax *to, int queries, const void *value, int64_t stride, int64_t part, int64_t d,
                     int64_t count, float (*weights)[SUB], int64_t at, int kind) {
  const int fields = fields_of(kind), rest = (int)(part - d);
  vf acc[TILE][4], v[4];
  UNROLL for (int j = 0; j < queries; j++)
    UNROLL for (int f = 0; f < fields; f++) acc[j][f] = load_part(F32, to[j].values, f * part + d, rest);
  for (int64_t t = 0; t < count; t++) {
    load_fields_part(kind, value, t * stride, part, d, rest, v);
    UNROLL for (int j = 0; j < queries; j++)
      UNROLL for (int f = 0; f < fields; f++) acc[j][f] = vf_fma(vf_set1(weights[j][at + t]), v[f], acc[j][f]);
  }
  UNROLL for (int j = 0; j < queries; j++)
    UNROLL for (int f = 0; f < fields; f++) store_part(to[j].values + f * part + d, acc[j][f], rest);
}

INLINE void add_values(const partial_softmax *to, int queries, const void *value, int64_t stride, int64_t dim,
                       int64_t count, int64_t ahead, float (*weights)[SUB], int64_t at, int kind) {
  const int64_t part = dim / fields_of(kind);
  int64_t d = 0;
  if (fields_of(kind) == 1) /* there are registers for four vectors */
    for (; d + 4 * VL <= part; d += 4 * VL)
      add_vectors(to, queries, value, stride, part, d, 4, count, ahead, weights, at, kind);
  if (fields_of(kind) < 4)
    for (; d + 2 * VL <= part; d += 2 * VL)
      add_vectors(to, queries, value, stride, part, d, 2, count, ahead, weights, at, kind);
  for (; d + VL <= part; d += VL)
    add_vectors(to, queries, value, stride, part, d, 1, count, ahead, weights, at, kind);
  if (d < part) add_part(to, queries, value, stride, part, d, count, weights, at, kind);
}

#endif
