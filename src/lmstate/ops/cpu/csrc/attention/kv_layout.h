/* Where the keys and values of one kv head are stored, and which of them a query sees. */
#ifndef LMSTATE_KV_LAYOUT_H
#define LMSTATE_KV_LAYOUT_H

#include "attention/attend_args.h"
#include "attention/tile.h"

/* The slots of a ring that hold the positions of a tile: one run of slots, or two where the ring ends between them. */
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

/* Address of the stored keys, or values, of one kv head of a row. */
typedef struct {
  const char *data;      /* slot 0, of the block that is read where there is a table */
  const uint16_t *scale; /* of codes, float16: see codes_args; of slot 0 as well */
  int64_t slots;         /* of the ring, or of a block */
  int64_t slot;          /* from slot to slot, in elements; in bytes where they are codes */
  int64_t bytes;         /* from slot to slot */
  int64_t ahead;         /* bytes from what is read to what is asked for meanwhile; 0: to the next tile */
  char *const *table, *const *scale_table; /* the row's blocks, or null */
  int64_t blocks, first, scale_first; /* in the table; bytes from the start of a block to slot 0 of the head */
} stored;

/* In a ring: `first` and `slot` are of `size` bytes each. */
INLINE stored stored_in_ring(const void *base, int64_t first, const uint16_t *scale, int64_t slots, int64_t slot,
                             int64_t size) {
  return (stored){.data = (const char *)base + first * size, .scale = scale, .slots = slots, .slot = slot,
                  .bytes = slot * size};
}

INLINE stored stored_in_blocks(char *const *table, int64_t blocks, int64_t block, int64_t first, int64_t slot,
                               int64_t size) {
  return (stored){.slots = block, .slot = slot, .bytes = slot * size, .table = table, .blocks = blocks,
                  .first = first * size};
}

INLINE const char *slot_of(const stored *x, int64_t position) {
  const char *data = x->table ? x->table[position / x->slots] + x->first : x->data;
  return data + position % x->slots * x->bytes;
}

/* The same for the tile at b: the block that it is in, and what comes ahead of it. */
INLINE stored at_tile(const stored *of, int64_t b) {
  stored x = *of;
  if (!x.ahead) x.ahead = SUB * x.bytes;
  if (!x.table) return x;
  const int64_t i = b / x.slots, next = (b + SUB) / x.slots;
  x.data = x.table[i] + x.first;
  if (x.scale_table) x.scale = (const uint16_t *)(x.scale_table[i] + x.scale_first);
  if (!of->ahead && next > i)
    x.ahead = next < x.blocks && x.table[next] ? x.table[next] - x.table[i] - (x.slots - SUB) * x.bytes : 0;
  return x;
}

struct source {
  stored k, v;
  score_kind *score; /* of the kind that keys are */
  value_kind *add;   /* of the kind that values are */
  const char *extra_key; /* slot 0 of the second part of the keys, in the block that is read; or null */
  char *const *extra_table;
  int64_t extra_slot, extra_dim;
};

INLINE source source_at_tile(const source *of, int64_t b) {
  source s = *of;
  s.k = at_tile(&of->k, b), s.v = at_tile(&of->v, b);
  if (s.extra_table) s.extra_key = s.extra_table[b / s.k.slots];
  return s;
}

INLINE ring_ranges ring_ranges_of(const stored *x, int64_t first, int64_t last, int64_t b) {
  const int64_t slot = first % x->slots, room = x->slots - slot, n = last - first < room ? last - first : room;
  return (ring_ranges){{slot, 0}, {first - b, first - b + n}, {n, last - first - n}};
}

/* Queries first..n of a kv head, counted over its row's new tokens and its group, over the positions from..until. */
typedef struct {
  const attend_args *args;
  const codes_args *codes; /* or null */
  const source *floats, *coded;
  const float *q;          /* of the row's first token */
  float *parts;            /* of query 0, dim_v + 2 floats each: see `part` */
  int64_t row, kv, first, n, from, until;
  const source *next_task;   /* floats at the last tile, which ask for another task's; or null */
} bf16_task;

/* Whether a row's queries may be rounded to bfloat16: many, over keys and values that are no more precise. Then what
 * attend_run does for some of them. */
int attends_bf16(const attend_args *a, const attend_plan *plan, int64_t r);
void attend_bf16(const bf16_task *t);
/* Around the tasks of a thread. */
void begin_attend_bf16(const attend_args *a, const attend_plan *plan);
void end_attend_bf16(const attend_args *a, const attend_plan *plan);

#endif
