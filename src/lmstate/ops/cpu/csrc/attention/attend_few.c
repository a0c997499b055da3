/* Attention of few queries over keys and values in bfloat16, as a step of decode has them: they are multiplied as they
 * are stored, each of which is read once, in the order of memory.
 *
 * Each line is asked for twice: SUB positions before it is read, evenly between products, since a core that waits for
 * as many lines as it can forgets what else it is asked for; and once more shortly before, where it was forgotten. */
#include "simd/bf16_dot.h"

#ifdef LMSTATE_BF16_DOT
#include "attention/bf16_rows.h"

/* What a task has for itself. */
typedef struct {
  _Alignas(64) uint16_t queries[FEW_IN_TILE * MAX_DIM];
  _Alignas(64) uint32_t pairs[MAX_DIM / 2 * WIDE];   /* [D / 2, WIDE]: pairs of numbers of them, 16 of these used */
  _Alignas(64) uint16_t copies[SPAN * SPAN_DIM];     /* see rows_at */
  _Alignas(64) float columns[SUB / 16][16][16];      /* [positions, queries] */
  _Alignas(64) float scores[SPAN / SUB][MOST_ROWS][SUB], sums[FEW_IN_TILE][WIDE];
  _Alignas(64) uint16_t weights[FEW_IN_TILE * SPAN];
  _Alignas(64) uint32_t values[SUB / 2 * WIDE];      /* [SUB / 2, WIDE]: pairs of positions */
} few_span;

#pragma GCC push_options
#pragma GCC target("avx512bf16")
/* To the scores of queries [queries, dim] with 16 keys, what `pairs` of numbers from d on add. */
INLINE void add_key_pairs(tile_rows keys, const uint16_t *q, int64_t dim, int64_t d, int pairs, int queries,
                          __m512 *scores) {
  __m512i all[16];
  load_transposed(keys, d, pairs, all);
  const char *const ahead = (const char *)(keys.first + 16 * d) + keys.ahead; /* line after line */
  UNROLL16 for (int i = 0; i < pairs; i++) {
    __builtin_prefetch(ahead + 64 * i);
    UNROLL for (int m = 0; m < queries; m++) {
      int32_t pair;
      memcpy(&pair, q + m * dim + d + 2 * i, 4);
      scores[m] = _mm512_dpbf16_ps(scores[m], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)all[i]);
    }
  }
}

/* Scores [queries, SUB] with 16 keys. `queries` is a constant where this is called. */
INLINE void score_keys(tile_rows keys, const uint16_t *q, int64_t dim, int queries, float *scores) {
  __m512 acc[ROWS];
  UNROLL for (int m = 0; m < queries; m++) acc[m] = vf_zero();
  int64_t d = 0;
  for (; d + 32 <= dim; d += 32) add_key_pairs(keys, q, dim, d, 16, queries, acc);
  if (d < dim) add_key_pairs(keys, q, dim, d, (int)(dim - d) / 2, queries, acc);
  UNROLL for (int m = 0; m < queries; m++) vf_store(scores + m * SUB, acc[m]);
}

/* Sums [queries, WIDE] of the numbers from d on of the values of `tiles` times 16 positions, times weights
 * [queries, count]. `queries` is a constant where this is called. */
INLINE void sum_values(const tile_rows *values, int64_t tiles, int64_t d, int64_t dim, const uint16_t *weights,
                       int64_t count, int queries, float *sums) {
  enum { VECTORS = WIDE / VL };
  const number_masks masks = masks_of(d, dim);
  __m512 acc[ROWS][VECTORS];
  UNROLL for (int m = 0; m < queries; m++)
    UNROLL for (int v = 0; v < VECTORS; v++) acc[m][v] = vf_zero();
  for (int64_t t = 0; t < tiles; t++) {
    const uint16_t *at = values[t].first + d;
    if (t + 1 < tiles && values[t + 1].ahead) prefetch_rows(values[t + 1], 2 * d, dim - d < WIDE ? dim - d : WIDE);
    for (int i = 0; i < 16; i += 2, at += 2 * values[t].stride) {
      __m512i pairs[VECTORS];
      load_pair(at, values[t].stride, &masks, values[t].ahead, pairs);
      UNROLL for (int m = 0; m < queries; m++) {
        int32_t pair;
        memcpy(&pair, weights + m * count + t * 16 + i, 4);
        const __m512i both = _mm512_set1_epi32(pair);
        UNROLL for (int v = 0; v < VECTORS; v++)
          acc[m][v] = _mm512_dpbf16_ps(acc[m][v], (__m512bh)both, (__m512bh)pairs[v]);
      }
    }
  }
  UNROLL for (int m = 0; m < queries; m++)
    UNROLL for (int v = 0; v < VECTORS; v++) vf_store(sums + m * WIDE + v * VL, acc[m][v]);
}

static void score_few(tile_rows keys, const uint16_t *q, int64_t dim, int64_t queries, float *scores) {
  for (; queries > 0; queries -= ROWS, q += ROWS * dim, scores += ROWS * SUB, keys.ahead = 0)
    FOR_ROWS(queries, score_keys(keys, q, dim, N, scores))
}

static void sum_few(const tile_rows *values, int64_t tiles, int64_t d, int64_t dim, const uint16_t *weights,
                    int64_t count, int64_t queries, float *sums) {
  for (; queries > 0; queries -= ROWS, weights += ROWS * count, sums += ROWS * WIDE)
    FOR_ROWS(queries, sum_values(values, tiles, d, dim, weights, count, N, sums))
}
#pragma GCC pop_options

/* The SUB positions from b on, 16 each. */
static void tiles_of(const bf16_task *t, const stored *of, int64_t b, int64_t dim, int64_t padded, uint16_t *copies,
                     tile_rows *tiles) {
  const stored x = at_tile(of, b);
  for (int i = 0; i < SUB; i += 16) tiles[i / 16] = rows_at(t, &x, b + i, dim, padded, 0, copies + i * padded);
}

void attend_few(const bf16_task *t) {
  const attend_args *a = t->args;
  const int64_t count = t->n - t->first, dim = uses_amx() ? (a->dim + 31) / 32 * 32 : a->dim, positions = span_of(a);
  float *parts = t->parts + t->first * (a->dim_v + 2);
  int64_t low[FEW_IN_TILE], end[FEW_IN_TILE];
  _Alignas(64) float keep[MOST_ROWS];
  tile_rows tiles[SPAN / 16];
  few_span on;
  for (int64_t j = 0; j < count; j++) lay_query(t, t->first + j, dim, low + j, end + j, on.queries + j * dim);
  if (uses_amx()) transpose_all_pairs((tile_rows){on.queries, dim, 0}, dim, on.pairs);
  const int64_t from = t->from > low[0] ? t->from : low[0];
  const int64_t until = t->until < end[count - 1] ? t->until : end[count - 1];
  for (int64_t b = from / SUB * SUB, last; b < until; b = last) {
    last = b / positions * positions + positions;
    if (last > until) last = (until + SUB - 1) / SUB * SUB;
    const int64_t n = last - b;
    for (int64_t i = 0; i < n; i += SUB) {
      float *scores = on.scores[i / SUB][0];
      tiles_of(t, &floats_at(t, b + i)->k, b + i, a->dim, dim, on.copies, tiles);
      if (uses_amx()) {
        scores_in_tiles(tiles, on.pairs, dim, on.columns);
        scores_of_columns(on.columns, count, scores);
      } else {
        for (int64_t j = 0, p = b + i; j < SUB / 16; j++, p += 16)
          if (p < until && p + 16 > from) {
            const tile_rows next = tiles[(j + 1) % (SUB / 16)];
            if (next.ahead) prefetch_rows(next, j + 1 < SUB / 16 ? 0 : next.ahead, dim);
            score_few(tiles[j], on.queries, dim, count, scores + 16 * j);
          }
      }
    }
    softmax_update_bf16(a, on.scores[0][0], count, n, low, end, b, parts, keep, on.weights);
    for (int64_t i = 0; i < n; i += SUB)
      tiles_of(t, &floats_at(t, b + i)->v, b + i, a->dim_v, a->dim_v, on.copies + i * a->dim_v, tiles + i / 16);
    for (int64_t d = 0; d < a->dim_v; d += WIDE) {
      if (uses_amx()) {
        begin_tile_sums();
        for (int64_t i = 0; i < n; i += SUB) {
          for (int j = 0; j < SUB; j += 16) pair_values(tiles[(i + j) / 16], d, a->dim_v, on.values + j / 2 * WIDE);
          add_tile_sums(on.weights + i, n, on.values, SUB);
        }
        end_tile_sums(on.sums[0], WIDE);
      } else {
        sum_few(tiles, ((until < last ? until : last) - b + 15) / 16, d, a->dim_v, on.weights, n, count, on.sums[0]);
      }
      add_sums(a, on.sums[0], count, d, keep, parts);
    }
  }
}
#endif
