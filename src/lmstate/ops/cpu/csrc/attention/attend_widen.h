/* A tile's keys and values as float32. */
#ifndef LMSTATE_ATTEND_WIDEN_H
#define LMSTATE_ATTEND_WIDEN_H

#include "attention/kv_read.h"

/* A tile's keys and values as float32, for queries enough to pay for it: each product would widen them again. */
enum { WIDENED_DIM = 256, WIDENED_QUERIES = 4 * TILE };
typedef struct {
  float k[SUB * WIDENED_DIM], v[SUB * WIDENED_DIM];
} widened_tile;

static int widens(const attend_args *a, const attend_plan *all, int64_t queries) {
  return a->kind != F32 && !all->codes && !all->extra_key && queries >= WIDENED_QUERIES && a->dim <= WIDENED_DIM &&
         a->dim_v <= WIDENED_DIM;
}

INLINE void widen_kind(const stored *x, const ring_ranges *r, int64_t dim, int kind, float *to) {
  const int64_t width = (dim + VL - 1) / VL * VL;
  for (int run = 0; run < 2; run++)
    for (int64_t t = 0; t < r->count[run]; t++) {
      const int64_t from = (r->from[run] + t) * x->slot, at = (r->at[run] + t) * width;
      for (int64_t d = 0; d < dim; d += VL) {
        if (d * size_of(kind) % 64 == 0) prefetch_ahead(kind, x->data, from + d, x->ahead);
        const vf numbers = dim - d < VL ? load_part(kind, x->data, from + d, (int)(dim - d)) : load(kind, x->data, from + d);
        vf_store(to + at + d, numbers);
      }
    }
}

static stored widen(const stored *x, int64_t first, int64_t last, int64_t b, int64_t dim, int64_t kind, float *to) {
  const ring_ranges ranges = ring_ranges_of(x, first, last, b);
  if (kind == BF16) widen_kind(x, &ranges, dim, BF16, to);
  else widen_kind(x, &ranges, dim, F16, to);
  return stored_in_ring(to, 0, NULL, SUB, (dim + VL - 1) / VL * VL, sizeof(float));
}

/* The positions from..until of the tile at b. */
static source widened(const attend_args *a, const source *of, int64_t b, int64_t from, int64_t until,
                      widened_tile *to) {
  const source here = source_at_tile(of, b);
  const int64_t first = from > b ? from : b, last = until < b + SUB ? until : b + SUB;
  return (source){.k = widen(&here.k, first, last, b, a->dim, a->kind, to->k),
                  .v = widen(&here.v, first, last, b, a->dim_v, a->kind, to->v),
                  .score = score_f32, .add = add_f32};
}

#endif
