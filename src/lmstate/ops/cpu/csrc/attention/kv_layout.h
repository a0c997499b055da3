/* Where the keys and values that one kv head has stored lie, and which of them a query sees. */
#ifndef LMSTATE_STORED_H
#define LMSTATE_STORED_H

#include "attention/attend_args.h"
#include "attention/tile.h"

/* Where the positions of a tile lie in a ring: in one run of slots, or two where the ring ends between them. */
typedef struct { int64_t from[2], at[2], count[2]; } ring_ranges;

/* The first position that a query at `own` sees. */
INLINE int64_t low_of(const attend_args *a, int64_t own) {
  int64_t low = 0;
  if (a->window && own - a->window + 1 > low) low = own - a->window + 1;
  if (a->chunk && own / a->chunk * a->chunk > low) low = own / a->chunk * a->chunk;
  return low;
}

typedef struct source source;
/* scores[j][at..] = q_j . keys; to_j += weights[j][at..] times values. `block`: the slot of the tile's first
 * position. */
typedef void score_kind(const attend_args *a, const source *s, const float *const *q, int queries, const ring_ranges *r,
                        int64_t block, float (*scores)[SUB]);
typedef void value_kind(const attend_args *a, const source *s, const partial_softmax *to, int queries,
                        const ring_ranges *r, float (*weights)[SUB]);

/* The keys, or the values, that one kv head of a row has stored: where they lie. */
typedef struct {
  const char *data;      /* slot 0 */
  const uint16_t *scale; /* of codes, float16: see codes_args */
  int64_t slots, slot;   /* from slot to slot, in elements; in bytes where they are codes */
  int64_t bytes;         /* from slot to slot */
  int64_t ahead;         /* bytes from what is read to what is asked for meanwhile */
} stored;

/* `slot`: as there, of `size` bytes each. Ahead is the next tile. */
INLINE stored stored_at(const void *base, int64_t first, const uint16_t *scale, int64_t slots, int64_t slot,
    int64_t size) {
  const stored x = {(const char *)base + first * size, scale, slots, slot, slot * size, SUB * slot * size};
  return x;
}

INLINE const char *slot_of(const stored *x, int64_t position) { return x->data + position % x->slots * x->bytes; }

struct source {
  stored k, v;
  score_kind *score; /* of the kind that keys are */
  value_kind *add;   /* of the kind that values are */
  const char *extra_key; /* slot 0 of the second part of the keys, or null */
  int64_t extra_slot, extra_dim;
};

INLINE ring_ranges ring_ranges_of(const stored *x, int64_t first, int64_t last, int64_t b) {
  const int64_t slot = first % x->slots, room = x->slots - slot, n = last - first < room ? last - first : room;
  return (ring_ranges){{slot, 0}, {first - b, first - b + n}, {n, last - first - n}};
}

/* Queries first..n of a kv head, counted over its row's new tokens and its group, over the positions from..until. */
typedef struct {
  const attend_args *args;
  const codes_args *codes; /* or null */
  const source *floats, *coded;
  float *parts;            /* of query 0, dim_v + 2 floats each: see `part` */
  int64_t row, kv, first, n, from, until;
} bf16_task;

/* Whether a row's queries may be rounded to bfloat16: many, over keys and values that are no more precise. Then what
 * attend_run does for some of them. */
int attends_bf16(const attend_args *a, const attend_plan *plan, int64_t r);
void attend_bf16(const bf16_task *t);

#endif
