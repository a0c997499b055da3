/* The end of a step for slots in no order: the accepted tokens become real, and what is evicted moves to where a rewind
 * finds it. Slots of a row's kv head are filled from the front: the last one fills the hole that an evicted one
 * leaves. */
#include <stdint.h>
#include <string.h>

#include "simd/simd.h"
#include "layout.h"

typedef struct {
  char *stored, *undo_log; /* [R, K, S, bytes] and [R, K, G, bytes] */
  int64_t bytes;
} slot_array;

enum { ARRAYS = 8 };

typedef struct {
  slot_array arrays[ARRAYS]; /* what a slot has, but for its scores */
  int32_t *positions;        /* [R, K, S], which is one of them */
  float *scores;             /* [R, K, history, S]: after length L in L % history, as slots lay then; or null */
  int32_t *evicted_at, *slot; /* [R, K, G]: at which length those of the undo log were evicted, and from where */
  int64_t *filled, *undo_head; /* [R, K]: filled slots; slots that went into the undo log */
  const float *columns;      /* [R, K, planes, wide]: see attend_args; with scores */
  const uint8_t *evicted;    /* [R, K, S]: which ones go, or null */
  const float *queries;      /* [R, T, E], the step's */
  float *ring;               /* [R, Q, E]: that of position p in p % Q; or null */
  int64_t kv_heads, slots, undo_slots, count, history;
  int64_t planes, wide;
  int64_t lowest, budget, batch; /* lowest: of what exceeds the budget, `batch` at least, those of lowest score or */
  int64_t sinks, newest, by_scores; /* position go; positions below `sinks`, and of the `newest` tokens, do not */
  int64_t tokens, query_width, ring_size;
} slot_commit;

typedef struct {
  const int64_t *starts, *counts, *accepted; /* [R] */
  int64_t layers, rows, threads;
  slot_commit each[]; /* of all layers of a step */
} commit_slots_args;

/* The scores after each accepted token. Where a slot was not filled before the step, they begin at 0. */
static void add_scores(const slot_commit *a, int64_t head, int64_t start, int64_t count, int64_t accepted) {
  const int64_t end = a->filled[head] + count, filled = a->filled[head];
  float *all = a->scores + head * a->history * a->slots;
  const float *before = all + start % a->history * a->slots;
  int64_t plane = a->planes > count ? a->planes - count : 0, known = filled;
  for (; plane + count - a->planes < accepted; plane++) {
    const float *column = a->columns + (head * a->planes + plane) * a->wide;
    float *after = all + (start + plane + count - a->planes + 1) % a->history * a->slots;
    for (int64_t s = 0; s < known; s++) after[s] = before[s] + column[s];
    for (int64_t s = known; s < end; s++) after[s] = column[s];
    before = after, known = end;
  }
}

static void evict(const slot_commit *a, int64_t head, int64_t slot, int64_t length) {
  const int64_t last = --a->filled[head], undo = a->undo_slots;
  const int64_t entry = undo ? head * undo + a->undo_head[head]++ % undo : 0;
  for (const slot_array *x = a->arrays; x < a->arrays + a->count; x++) {
    char *stored = x->stored + head * a->slots * x->bytes;
    if (undo) memcpy(x->undo_log + entry * x->bytes, stored + slot * x->bytes, (size_t)x->bytes);
    if (slot != last) memcpy(stored + slot * x->bytes, stored + last * x->bytes, (size_t)x->bytes);
  }
  if (undo) a->evicted_at[entry] = (int32_t)length, a->slot[entry] = (int32_t)slot;
  if (!a->scores) return;
  float *scores = a->scores + (head * a->history + length % a->history) * a->slots;
  scores[slot] = scores[last];
}

/* The slot of lowest score or position, of equals the oldest; scores are not negative, and so in the order of their
 * bits. But a NaN may have a sign: as many slots go whatever the scores are, or there would be no room for the next. */
static int64_t lowest(const slot_commit *a, int64_t head, int64_t length) {
  const int64_t n = a->filled[head];
  const int32_t *positions = a->positions + head * a->slots;
  const int32_t sinks = (int32_t)a->sinks, late = (int32_t)(length - a->newest);
  const int32_t *ranks = positions;
  if (a->by_scores) ranks = (const int32_t *)(a->scores + (head * a->history + length % a->history) * a->slots);
  /* what is guarded counts as that: written so that the loops are vectors */
  int32_t least = INT32_MAX, oldest = INT32_MAX;
  for (int64_t s = 0; s < n; s++) {
    const int32_t p = positions[s], guarded = (p < sinks) | (p >= late), each = (ranks[s] | -guarded) & INT32_MAX;
    least = each < least ? each : least;
  }
  for (int64_t s = 0; s < n; s++) {
    const int32_t p = positions[s], other = (ranks[s] & INT32_MAX) != least;
    const int32_t guarded = (p < sinks) | (p >= late) | other, each = (p | -guarded) & INT32_MAX;
    oldest = each < oldest ? each : oldest;
  }
  int64_t slot = 0;
  while (slot < n && positions[slot] != oldest) slot++;
  return slot;
}

static void commit_row(const slot_commit *a, int64_t r, int64_t start, int64_t count, int64_t n) {
  const int64_t length = start + n;
  if (!n) return;
  for (int64_t head = r * a->kv_heads; head < (r + 1) * a->kv_heads; head++) {
    int32_t *positions = a->positions + head * a->slots;
    if (a->scores) add_scores(a, head, start, count, n);
    for (int64_t t = 0; t < n; t++) positions[a->filled[head] + t] = (int32_t)(start + t);
    a->filled[head] += n;
    if (a->evicted) {
      const uint8_t *evicted = a->evicted + head * a->slots;
      for (int64_t s = a->filled[head] - 1; s >= 0; s--)
        if (evicted[s]) evict(a, head, s, length);
    }
    if (!a->lowest || a->filled[head] <= a->budget) continue;
    const int64_t over = a->filled[head] - a->budget, goes = over > a->batch ? over : a->batch;
    for (int64_t i = 0; i < goes; i++) {
      const int64_t slot = lowest(a, head, length);
      if (slot < a->filled[head]) evict(a, head, slot, length);
    }
  }
  if (!a->ring) return;
  for (int64_t t = n > a->ring_size ? n - a->ring_size : 0; t < n; t++)
    memcpy(a->ring + (r * a->ring_size + (start + t) % a->ring_size) * a->query_width,
           a->queries + (r * a->tokens + t) * a->query_width, (size_t)a->query_width * sizeof(float));
}

void lmstate_commit_slots(const commit_slots_args *a) {
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1 && a->layers * a->rows > 1)
  for (int64_t i = 0; i < a->layers * a->rows; i++) {
    const int64_t r = i % a->rows;
    commit_row(&a->each[i / a->rows], r, a->starts[r], a->counts[r], a->accepted[r]);
  }
}

EXPORT_SIZE(slot_array);
EXPORT_SIZE(slot_commit);
EXPORT_SIZE(commit_slots_args);
