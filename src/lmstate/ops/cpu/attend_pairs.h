/* Many queries over what a kv head has stored in bfloat16: the queries, and then their weights, are rounded to it too. */
#ifndef LMSTATE_ATTEND_PAIRS_H
#define LMSTATE_ATTEND_PAIRS_H
#include "attend_stored.h"
#include "pairs.h"

/* Below this many new tokens of a row its queries stay as they are. lmstate.ops.linear has the same number. */
enum { FEW = 32 };

#ifdef LMSTATE_PAIRS
/* The keys and values of SUB positions: in pairs of numbers of a key [D / 2, SUB], and in pairs of positions, as many
 * numbers of a value at a time as are summed together [DV / WIDE, SUB / 2, WIDE]. */
struct pair_block {
  _Alignas(64) uint32_t keys[MAX_DIM / 2 * SUB], values[MAX_DIM * SUB / 2];
};

/* Zeros where nobody looks: weights of 0 must not meet what was never stored. */
static void rows_of(const stored *x, int64_t first, int64_t last, int64_t b, const uint16_t **rows) {
  static const uint16_t nothing[MAX_DIM];
  const runs r = runs_of(x, first, last, b);
  for (int t = 0; t < SUB; t++) rows[t] = nothing;
  for (int run = 0; run < 2; run++)
    for (int64_t t = 0; t < r.count[run]; t++)
      rows[r.at[run] + t] = (const uint16_t *)x->data + (r.from[run] + t) * x->slot;
}

/* The positions first..last, of those from b on. */
static void lay_block(const attend_args *a, const source *s, int64_t first, int64_t last, int64_t b) {
  const uint16_t *rows[SUB];
  rows_of(&s->k, first, last, b, rows);
  for (int t = 0; t < SUB; t += 16) all_across(rows + t, a->dim, s->block->keys + t);
  rows_of(&s->v, first, last, b, rows);
  for (int64_t d = 0; d < a->dim_v; d += VL) {
    uint32_t *to = s->block->values + d / WIDE * (SUB / 2) * WIDE + d % WIDE;
    const __mmask16 mask = a->dim_v - d < VL ? (__mmask16)((1 << (a->dim_v - d)) - 1) : 0xffff;
    for (int t = 0; t < SUB; t += 2, to += WIDE) {
      const __m512i one = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, rows[t] + d));
      const __m512i next = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(mask, rows[t + 1] + d));
      _mm512_store_si512(to, _mm512_or_si512(one, _mm512_slli_epi32(next, 16)));
    }
  }
}

static void score_pairs(const attend_args *a, const source *s, const float *const *q, int queries, const runs *r,
                        int64_t block, float (*scores)[SUB]) {
  (void)r, (void)block;
  uint16_t rounded[ROWS * MAX_DIM];
  for (int j = 0; j < queries; j++) round_pairs(q[j], a->dim, rounded + j * a->dim);
  sums_of(rounded, s->block->keys, a->dim, queries, scores);
}

static void add_pairs(const attend_args *a, const source *s, const part *to, int queries, const runs *r,
                      float (*weights)[SUB]) {
  (void)r;
  uint16_t rounded[ROWS * SUB];
  round_pairs(weights[0], queries * SUB, rounded);
  for (int64_t d = 0; d < a->dim_v; d += WIDE) {
    const int64_t n = a->dim_v - d < WIDE ? a->dim_v - d : WIDE;
    float more[ROWS][WIDE];
    sums_of(rounded, s->block->values + d * (SUB / 2), SUB, queries, more);
    for (int j = 0; j < queries; j++)
      for (int64_t i = 0; i < n; i++) to[j].values[d + i] += more[j][i];
  }
}
#else
struct pair_block {
  char none;
};
static void lay_block(const attend_args *a, const source *s, int64_t first, int64_t last, int64_t b) {
  (void)a, (void)s, (void)first, (void)last, (void)b;
}
static score_kind *const score_pairs = 0;
static value_kind *const add_pairs = 0;
#endif
#endif
