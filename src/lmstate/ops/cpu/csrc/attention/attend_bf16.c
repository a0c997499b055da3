/* Attention of a prompt over keys and values in bfloat16, or in few bits: queries and weights are rounded to bfloat16,
 * as the products around them are, and a block of positions is laid out once for many of them. */
#include "simd/bf16_dot.h"
#include "attention/kv_layout.h"

#ifdef LMSTATE_PAIRS
#include "simd/bf16_tiles.h"

enum {
  BATCH = 384,       /* queries that meet a span together; half of them where heads are wider than SPAN_DIM */
  SPAN = 4 * SUB,    /* positions whose largest score is found at once; half of them where heads are wider */
  SPAN_DIM = 256,
  FEW = 2 * ROWS,    /* queries that read keys and values as they are stored; in tiles as many as one has */
  FEW_IN_TILE = 16,
  MOST_ROWS = 32     /* queries of a product */
};

typedef struct {
  _Alignas(64) uint32_t keys[SPAN_DIM / 2 * SPAN]; /* [positions / SUB, D / 2, SUB]: pairs of numbers of a key */
  _Alignas(64) uint32_t values[SPAN_DIM / 2 * SPAN]; /* [DV / WIDE, positions / 2, WIDE]: pairs of positions */
  _Alignas(64) uint16_t queries[(BATCH + MOST_ROWS) * SPAN_DIM];
  _Alignas(64) uint16_t copies[16 * MAX_DIM]; /* see rows_at */
  int64_t low[BATCH], end[BATCH]; /* the positions that a query sees */
  int64_t dim, positions;         /* of keys and queries, with zeros behind them; of the span */
} kv_span;

/* The same for a task of few queries. */
typedef struct {
  _Alignas(64) uint16_t queries[FEW_IN_TILE * MAX_DIM];
  _Alignas(64) uint32_t pairs[MAX_DIM / 2 * WIDE];   /* [D / 2, WIDE]: pairs of numbers of them, 16 of these used */
  _Alignas(64) uint16_t copies[SPAN * SPAN_DIM];     /* see rows_at */
  _Alignas(64) float columns[SUB / 16][16][16];      /* [positions, queries] */
  _Alignas(64) float scores[SPAN / SUB][MOST_ROWS][SUB], sums[FEW_IN_TILE][WIDE];
  _Alignas(64) uint16_t weights[FEW_IN_TILE * SPAN];
  _Alignas(64) uint32_t values[SUB / 2 * WIDE];      /* [SUB / 2, WIDE]: pairs of positions */
} few_span;

int attends_bf16(const attend_args *a, const attend_plan *plan, int64_t r) {
  (void)r;
  /* Not where the weights decide what is forgotten, nor over keys that are codes alone; over codes at all not where a
   * decode step would wait for a layout that only a prompt in tiles pays for. */
  if (plan->codes && (uses_amx() || !plan->codes->tail)) return 0;
  return a->kind == BF16 && !plan->extra_key && !a->columns && rounds_to_bf16();
}

/* What number i of 16 is in `low` and `high`, as pairs. */
INLINE __m512i paired(__m256i low, __m256i high) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

/* A vector of codes times its scale. `kind` is a constant where this is called. */
INLINE void expand_kind(const uint8_t *codes, uint16_t scale, int64_t dim, int kind, uint16_t *to) {
  const int fields = fields_of(kind);
  const int64_t part = dim / fields;
  const vf times = vf_set1(f16_to_float_bits(scale));
  float x[MAX_DIM];
  vf each[4];
  int64_t d = 0;
  for (; d + VL <= part; d += VL) {
    load_fields(kind, codes, d, each);
    UNROLL for (int f = 0; f < fields; f++) vf_store(x + f * part + d, vf_mul(each[f], times));
  }
  if (d < part) {
    load_fields_part(kind, codes, d, (int)(part - d), each);
    for (int f = 0; f < fields; f++) store_part(x + f * part + d, vf_mul(each[f], times), (int)(part - d));
  }
  round_pairs(x, dim, to);
}

static void expand_codes(const uint8_t *codes, uint16_t scale, int64_t dim, int64_t bits, uint16_t *to) {
  if (bits == 8) expand_kind(codes, scale, dim, CODES8, to);
  else if (bits == 4) expand_kind(codes, scale, dim, CODES4, to);
  else expand_kind(codes, scale, dim, CODES2, to);
}

/* What lies ahead of n numbers of each row. */
INLINE void ask_rows(tile_rows rows, int64_t n) {
  if (!rows.ahead) return;
  for (int i = 0; i < 16; i++)
    for (int64_t d = 0; d < n; d += 32) ask_ahead(BF16, rows.first, i * rows.stride + d, rows.ahead);
}

/* The vectors of the 16 positions from p on in the tile that x is at: as they are stored, or copied where they are
 * codes of `bits`, are to be padded, or are not all seen or not side by side. What no query of the task sees is zeros:
 * weights of 0 must not meet what was never stored. */
static tile_rows rows_at(const bf16_task *t, const stored *x, int64_t p, int64_t dim, int64_t padded, int64_t bits,
                         uint16_t *copies) {
  const int64_t slot = p % x->slots;
  const tile_rows stored = {(const uint16_t *)(x->data + slot * x->bytes), x->slot, x->ahead};
  if (!bits && dim == padded && t->from <= p && p + 16 <= t->until && slot + 16 <= x->slots) return stored;
  ask_rows(stored, dim);
  memset(copies, 0, (size_t)(16 * padded) * sizeof *copies);
  for (int64_t q = t->from > p ? t->from : p; q < p + 16 && q < t->until; q++) {
    const char *const from = x->data + q % x->slots * x->bytes;
    uint16_t *const to = copies + (q - p) * padded;
    if (bits) expand_codes((const uint8_t *)from, x->scale[q % x->slots], dim, bits, to);
    else memcpy(to, from, (size_t)dim * sizeof *to);
  }
  return (tile_rows){copies, padded, 0};
}

/* Keys that are a block of codes, channel by channel. */
static void lay_channels(const stored *x, int64_t slot, int64_t dim, int64_t bits, uint32_t *to) {
  const int kind = bits == 4 ? CODES4 : CODES2, fields = fields_of(kind), bytes = SUB / fields;
  const uint8_t *codes = (const uint8_t *)x->data + slot * x->slot;
  float scale[2 * MAX_DIM + VL];
  floats_of_f16(x->scale + slot * block_scales(dim), scale, 2 * dim);
  for (int64_t d = 0; d < dim; d += 2, to += WIDE) {
    uint16_t channels[2][SUB];
    for (int c = 0; c < 2; c++) {
      float numbers[SUB];
      for (int i = 0; i < bytes; i += VL) {
        vf each[4];
        load_fields(kind, codes, (d + c) * bytes + i, each);
        for (int f = 0; f < fields; f++)
          vf_store(numbers + f * bytes + i, vf_fma(each[f], vf_set1(scale[d + c]), vf_set1(scale[dim + d + c])));
      }
      round_pairs(numbers, SUB, channels[c]);
    }
    for (int t = 0; t < SUB; t += VL)
      _mm512_store_si512(to + t, paired(_mm256_loadu_si256((const __m256i *)(channels[0] + t)),
                                        _mm256_loadu_si256((const __m256i *)(channels[1] + t))));
  }
}

/* What is stored as floats at the tile at b. */
static const source *floats_at(const bf16_task *t, int64_t b) {
  return t->leaving && b + SUB >= t->until ? t->leaving : t->floats;
}

/* Keys, or values, of the tile at b, and what to ask for meanwhile: nothing where there are codes. */
static stored tile_at(const bf16_task *t, const stored *of, int64_t b) {
  stored x = at_tile(of, b);
  if (t->codes) x.ahead = 0;
  return x;
}

/* Of the SUB positions from b on, the keys that some query of the task sees, as floats or as codes. */
static void lay_keys(const bf16_task *t, int64_t b, int coded, kv_span *to) {
  const int64_t dim = t->args->dim, bits = coded ? t->codes->bits : 0;
  const stored k = tile_at(t, coded ? &t->coded->k : &floats_at(t, b)->k, b);
  uint32_t *keys = to->keys + b % to->positions * (to->dim / 2);
  if (coded && t->codes->tail)
    lay_channels(&k, b % k.slots, dim, bits, keys);
  else
    for (int i = 0; i < SUB; i += 16) {
      const tile_rows rows = rows_at(t, &k, b + i, dim, dim, bits, to->copies);
      ask_rows(rows, dim);
      transpose_all_pairs(rows, dim, keys + i);
    }
  memset(keys + dim / 2 * SUB, 0, (size_t)((to->dim - dim) / 2 * SUB) * sizeof *keys);
}

/* Masks of the WIDE numbers from d on of `dim`, 32 each. */
typedef struct { __mmask32 of[2]; } number_masks;
INLINE number_masks masks_of(int64_t d, int64_t dim) {
  const int64_t n = dim - d;
  return (number_masks){{n < 32 ? (1u << n) - 1 : ~0u, n >= 64 ? ~0u : n > 32 ? (1u << (n - 32)) - 1 : 0}};
}

/* Of two positions that begin at x and are `stride` numbers apart, WIDE values beside each other: quarters of a vector
 * are put together, so that columns come in the order that `add_sums` knows. */
INLINE void load_pair(const uint16_t *x, int64_t stride, const number_masks *masks, int64_t ahead, __m512i *pairs) {
  UNROLL for (int h = 0; h < 2; h++) {
    const uint16_t *const one = x + 32 * h, *const other = one + stride;
    if (ahead) ask_ahead(BF16, one, 0, ahead), ask_ahead(BF16, other, 0, ahead);
    const __m512i first = _mm512_maskz_loadu_epi16(masks->of[h], one);
    const __m512i second = _mm512_maskz_loadu_epi16(masks->of[h], other);
    pairs[2 * h] = _mm512_unpacklo_epi16(first, second);
    pairs[2 * h + 1] = _mm512_unpackhi_epi16(first, second);
  }
}

/* WIDE numbers from d on of the values of 16 positions as pairs [8, WIDE]. */
INLINE void pair_values(tile_rows rows, int64_t d, int64_t dim, uint32_t *pairs) {
  const number_masks masks = masks_of(d, dim);
  const uint16_t *at = rows.first + d;
  for (int i = 0; i < 16; i += 2, at += 2 * rows.stride, pairs += WIDE) {
    __m512i two[WIDE / VL];
    load_pair(at, rows.stride, &masks, rows.ahead, two);
    UNROLL for (int v = 0; v < WIDE / VL; v++) _mm512_store_si512(pairs + v * VL, two[v]);
  }
}

/* The values of the same positions, which are codes where there are any. */
static void lay_values(const bf16_task *t, int64_t b, int coded, kv_span *to) {
  const int64_t dim = t->args->dim_v, bits = t->codes ? t->codes->bits : 0;
  const stored v = tile_at(t, coded ? &t->coded->v : &floats_at(t, b)->v, b);
  for (int i = 0; i < SUB; i += 16) {
    const tile_rows rows = rows_at(t, &v, b + i, dim, dim, bits, to->copies);
    for (int64_t d = 0; d < dim; d += WIDE)
      pair_values(rows, d, dim, to->values + (d / WIDE * to->positions + b % to->positions + i) / 2 * WIDE);
  }
}

/* 0 where it would be no normal number; a NaN stays one. */
INLINE vf power_of_two(vf x) {
  const vf r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF);
  vf p = vf_set1(1.3426690e-2f);
  p = vf_fma(p, r, vf_set1(5.2242465e-2f));
  p = vf_fma(p, r, vf_set1(2.4128021e-1f));
  p = vf_fma(p, r, vf_set1(6.9304484e-1f));
  p = vf_fma(p, r, vf_set1(1));
  return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(x, vf_set1(-126), _CMP_NLT_UQ), p, x);
}

/* Of the scores of SUB positions, those of low..end alone are seen. */
INLINE void hide(float *scores, int64_t low, int64_t end) {
  for (int64_t i = 0; i < SUB; i += VL) {
    const int64_t first = low - i, last = end - i;
    const uint32_t until = last >= VL ? 0xffff : last > 0 ? (1u << last) - 1 : 0;
    const uint32_t before = first >= VL ? 0xffff : first > 0 ? (1u << first) - 1 : 0;
    _mm512_mask_storeu_ps(scores + i, (__mmask16)~(until & ~before), vf_set1(-INFINITY));
  }
}

/* Which of the positions whose scores it has a query sees: low..end, in the blocks of SUB first..last. */
typedef struct { int64_t low, end, first, last; } seen;

/* The largest score of what a query sees, and -inf in the place of those that it does not see. */
INLINE float largest_score(const attend_args *a, float *scores, const seen *of) {
  vf largest = vf_set1(-INFINITY);
  for (int64_t b = of->first; b < of->last; b += SUB) {
    float *s = scores + b / SUB * MOST_ROWS * SUB;
    if (a->softcap != 0) {
      const vf cap = vf_set1((float)a->softcap);
      for (int i = 0; i < SUB; i += VL)
        vf_store(s + i, vf_mul(cap, vf_tanh(vf_div(vf_mul(vf_load(s + i), vf_set1((float)a->scale)), cap))));
    }
    if (of->low > b || of->end < b + SUB) hide(s, of->low - b, of->end - b);
    UNROLL for (int i = 0; i < SUB; i += VL) largest = vf_max(largest, vf_load(s + i));
  }
  return vf_largest(largest);
}

#pragma GCC push_options
#pragma GCC target("avx512bf16")
/* The weights of what a query sees, zeros beside them, and their sum. */
INLINE float weigh(const float *scores, const seen *of, int64_t count, vf times, vf base, uint16_t *weights) {
  vf sum = vf_zero();
  memset(weights, 0, (size_t)of->first * sizeof *weights);
  for (int64_t b = of->first; b < of->last; b += SUB)
    UNROLL for (int i = 0; i < SUB; i += 2 * VL) {
      const float *s = scores + b / SUB * MOST_ROWS * SUB + i;
      const vf w[2] = {power_of_two(vf_fma(vf_load(s), times, base)),
                       power_of_two(vf_fma(vf_load(s + VL), times, base))};
      sum = vf_add(sum, vf_add(w[0], w[1]));
      _mm512_storeu_si512(weights + b + i, (__m512i)_mm512_cvtne2ps_pbh(w[1], w[0]));
    }
  memset(weights + of->last, 0, (size_t)(count - of->last) * sizeof *weights);
  return vf_sum(sum);
}

/* The weights [rows, count] of positions whose scores lie in blocks [MOST_ROWS, SUB]; `count` is a multiple of SUB, and
 * query m sees low[m]..end[m]. What was summed before is to be multiplied by keep[m]. Each step is made for all queries
 * before the next one: one query's would wait for each other. */
static void softmax_update_bf16(const attend_args *a, float *scores, int64_t rows, int64_t count, const int64_t *low,
                                const int64_t *end, int64_t from, float *parts, float *keep, uint16_t *weights) {
  const int64_t stride = a->dim_v + 2;
  const float scale = a->softcap != 0 ? 1 : (float)a->scale;
  seen of[MOST_ROWS];
  float largest[MOST_ROWS];
  _Alignas(64) float grown[MOST_ROWS] = {0};
  for (int64_t m = 0; m < rows; m++) {
    const int64_t l = low[m] - from, e = end[m] - from;
    of[m] = (seen){l, e, l > 0 ? l / SUB * SUB : 0, e < count ? (e + SUB - 1) / SUB * SUB : count};
    if (of[m].first >= of[m].last) of[m].first = of[m].last = 0;
    const float here = largest_score(a, scores + m * SUB, of + m) * scale, before = parts[m * stride];
    largest[m] = here > before ? here : before;
    if (here > before) grown[m] = (before - here) * 1.44269504f;
  }
  for (int64_t m = 0; m < rows; m += VL) vf_store(keep + m, power_of_two(vf_load(grown + m)));
  for (int64_t m = 0; m < rows; m++) {
    const vf base = vf_set1(largest[m] == -INFINITY ? 0 : -largest[m] * 1.44269504f);
    const float sum = weigh(scores + m * SUB, of + m, count, vf_set1(scale * 1.44269504f), base, weights + m * count);
    parts[m * stride] = largest[m];
    parts[m * stride + 1] = parts[m * stride + 1] * keep[m] + sum;
  }
}
#pragma GCC pop_options

/* y[m] = the sums over n numbers of x[m] times those of WIDE others. */
INLINE void products(const uint16_t *x, const uint32_t *w, int64_t n, int64_t rows, float *y) {
  if (uses_amx()) sums_in_tiles(x, w, n, rows > 16 ? 32 : 16, y, WIDE);
  else sums_of(x, w, n, rows, y);
}

/* What the values of a span add to WIDE of their sums, from number d on; sums of before are kept by keep[m], and where
 * that is 0 nothing may be there yet. Of the 32 columns of a half the first vector has those that are below 4 of 8. */
INLINE void add_sums(const attend_args *a, const float *sums, int64_t rows, int64_t d, const float *keep,
                     float *parts) {
  const __m512i first = _mm512_setr_epi32(0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23);
  const __m512i second = _mm512_add_epi32(first, _mm512_set1_epi32(8));
  const int64_t n = a->dim_v - d < WIDE ? a->dim_v - d : WIDE;
  for (int64_t m = 0; m < rows; m++) {
    float *to = parts + m * (a->dim_v + 2) + 2 + d;
    for (int64_t i = 0; i < n; i += VL) {
      const __mmask16 mask = n - i < VL ? (__mmask16)((1 << (n - i)) - 1) : 0xffff;
      const vf before = _mm512_maskz_loadu_ps(keep[m] != 0 ? mask : 0, to + i);
      const float *half = sums + m * WIDE + i / (2 * VL) * 2 * VL;
      const vf here = _mm512_permutex2var_ps(vf_load(half), i & VL ? second : first, vf_load(half + VL));
      _mm512_mask_storeu_ps(to + i, mask, vf_fma(before, vf_set1(keep[m]), here));
    }
  }
}

/* Query j of a task, rounded, with zeros behind it, and which positions it sees. */
static void lay_query(const bf16_task *t, int64_t j, int64_t dim, int64_t *low, int64_t *end, uint16_t *to) {
  const attend_args *a = t->args;
  const int64_t group = a->heads / a->kv_heads, token = j / group, head = t->kv * group + j % group;
  const int64_t own = a->starts[t->row] + token;
  *low = low_of(a, own), *end = own + 1;
  round_pairs(t->q + token * a->q_token + head * a->q_head, a->dim, to);
  memset(to + a->dim, 0, (size_t)(dim - a->dim) * sizeof *to);
}

/* Positions whose largest score is found at once. */
static int64_t span_of(const attend_args *a) { return a->dim > SPAN_DIM || a->dim_v > SPAN_DIM ? SPAN / 2 : SPAN; }

/* Some queries, from number j of the batch on, over the span from b on. */
static void tile(const bf16_task *t, const kv_span *on, int64_t j, int64_t rows, int64_t b, float *parts) {
  const attend_args *a = t->args;
  _Alignas(64) float scores[SPAN / SUB][MOST_ROWS][SUB];
  _Alignas(64) uint16_t weights[MOST_ROWS * SPAN];
  _Alignas(64) float keep[MOST_ROWS];
  int64_t first = b + on->positions, last = b;
  for (int64_t m = j; m < j + rows; m++) {
    if (on->low[m] < first) first = on->low[m];
    if (on->end[m] > last) last = on->end[m];
  }
  first = first > b ? (first - b) / SUB * SUB : 0;
  last = last < b + on->positions ? (last - b + SUB - 1) / SUB * SUB : on->positions;
  if (first >= last) return;
  for (int64_t i = first; i < last; i += SUB)
    products(on->queries + j * on->dim, on->keys + i * (on->dim / 2), on->dim, rows, scores[i / SUB][0]);
  const int64_t count = last - first;
  softmax_update_bf16(a, scores[first / SUB][0], rows, count, on->low + j, on->end + j, b + first, parts, keep,
                      weights);
  for (int64_t d = 0; d < a->dim_v; d += WIDE) {
    products(weights, on->values + (d / WIDE * on->positions + first) / 2 * WIDE, count, rows, scores[0][0]);
    add_sums(a, scores[0][0], rows, d, keep, parts);
  }
}

#pragma GCC push_options
#pragma GCC target("avx512bf16")
/* To the scores of queries [queries, dim] with 16 keys, what `pairs` of numbers from d on add. */
INLINE void add_key_pairs(tile_rows keys, const uint16_t *q, int64_t dim, int64_t d, int pairs, int queries,
                          __m512 *scores) {
  __m512i all[16];
  load_transposed(keys, d, pairs, all);
  UNROLL16 for (int i = 0; i < pairs; i++)
    UNROLL for (int m = 0; m < queries; m++) {
      int32_t pair;
      memcpy(&pair, q + m * dim + d + 2 * i, 4);
      scores[m] = _mm512_dpbf16_ps(scores[m], (__m512bh)_mm512_set1_epi32(pair), (__m512bh)all[i]);
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
  ask_rows(keys, dim);
  for (; queries > 0; queries -= ROWS, q += ROWS * dim, scores += ROWS * SUB, keys.ahead = 0)
    switch (queries) {
#define CASE(n) case n: score_keys(keys, q, dim, n, scores); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
      default: score_keys(keys, q, dim, ROWS, scores);
#undef CASE
    }
}

static void sum_few(const tile_rows *values, int64_t tiles, int64_t d, int64_t dim, const uint16_t *weights,
                    int64_t count, int64_t queries, float *sums) {
  for (; queries > 0; queries -= ROWS, weights += ROWS * count, sums += ROWS * WIDE)
    switch (queries) {
#define CASE(n) case n: sum_values(values, tiles, d, dim, weights, count, n, sums); break;
      CASE(1) CASE(2) CASE(3) CASE(4) CASE(5)
      default: sum_values(values, tiles, d, dim, weights, count, ROWS, sums);
#undef CASE
    }
}
#pragma GCC pop_options

/* The SUB positions from b on, 16 each. */
static void tiles_of(const bf16_task *t, const stored *of, int64_t b, int64_t dim, int64_t padded, uint16_t *copies,
                     tile_rows *tiles) {
  const stored x = at_tile(of, b);
  for (int i = 0; i < SUB; i += 16) tiles[i / 16] = rows_at(t, &x, b + i, dim, padded, 0, copies + i * padded);
}

/* Few queries: they multiply keys and values as they are stored, each of which is read once, in the order of memory. */
static void attend_few(const bf16_task *t) {
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
          if (p < until && p + 16 > from) score_few(tiles[j], on.queries, dim, count, scores + 16 * j);
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

void attend_bf16(const bf16_task *t) {
  const attend_args *a = t->args;
  if (!t->codes && t->n - t->first <= (uses_amx() ? FEW_IN_TILE : FEW)) {
    attend_few(t);
    return;
  }
  const int64_t group = a->heads / a->kv_heads, start = a->starts[t->row], most = uses_amx() ? MOST_ROWS : ROWS;
  kv_span on;
  on.dim = uses_amx() ? (a->dim + 31) / 32 * 32 : a->dim;
  on.positions = t->codes ? SUB : span_of(a);
  const int64_t batch = a->dim > SPAN_DIM ? BATCH / 2 : BATCH;
  for (int64_t first = t->first; first < t->n; first += batch) {
    const int64_t count = t->n - first < batch ? t->n - first : batch;
    for (int64_t j = 0; j < count; j++)
      lay_query(t, first + j, on.dim, on.low + j, on.end + j, on.queries + j * on.dim);
    const int64_t from = t->from > on.low[0] ? t->from : on.low[0];
    const int64_t until = t->until < on.end[count - 1] ? t->until : on.end[count - 1];
    for (int64_t b = from / on.positions * on.positions; b < until; b += on.positions) {
      /* The queries before this one stand in this block or before it: they see keys of it as floats. */
      const int64_t far = !t->codes ? count : t->codes->tail ? (b + SUB - start) * group - first : 0;
      const int64_t ends[2] = {far < 0 ? 0 : far < count ? far : count, count};
      for (int coded = 0; coded < 2; coded++) {
        int64_t j = coded ? ends[0] : 0;
        while (j < ends[coded] && on.end[j] <= b) j++;
        if (j == ends[coded]) continue;
        const int64_t low = from > b ? from / SUB * SUB : b, end = until < b + on.positions ? until : b + on.positions;
        for (int64_t i = low; i < end; i += SUB) {
          lay_keys(t, i, coded, &on);
          lay_values(t, i, coded, &on);
        }
        for (int64_t rows; j < ends[coded]; j += rows) {
          rows = ends[coded] - j < most ? ends[coded] - j : most;
          if (on.low[j] < b + on.positions) tile(t, &on, j, rows, b, t->parts + (first + j) * (a->dim_v + 2));
        }
      }
    }
  }
}

void begin_attend_bf16(const attend_args *a, const attend_plan *plan) {
  if (uses_amx() && attends_bf16(a, plan, 0)) begin_tiles(64);
}

void end_attend_bf16(const attend_args *a, const attend_plan *plan) {
  if (uses_amx() && attends_bf16(a, plan, 0)) end_tiles();
}
#else
int attends_bf16(const attend_args *a, const attend_plan *plan, int64_t r) {
  (void)a, (void)plan, (void)r;
  return 0;
}

void attend_bf16(const bf16_task *t) { (void)t; }
void begin_attend_bf16(const attend_args *a, const attend_plan *plan) { (void)a, (void)plan; }
void end_attend_bf16(const attend_args *a, const attend_plan *plan) { (void)a, (void)plan; }
#endif
