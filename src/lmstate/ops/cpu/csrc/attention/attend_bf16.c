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
  FEW = 16,          /* queries whose keys are read as they are stored */
  MOST_ROWS = 32     /* queries of a product */
};

typedef struct {
  _Alignas(64) uint32_t keys[SPAN_DIM / 2 * SPAN]; /* [positions / SUB, D / 2, SUB]: pairs of numbers of a key */
  tile_rows rows[SPAN / 16]; /* or where keys lie as they are stored, a task's few queries being in pairs */
  _Alignas(64) uint32_t pairs[MAX_DIM / 2 * WIDE]; /* [D / 2, WIDE], 16 of them used */
  _Alignas(64) float columns[SPAN / 16][16][16];   /* [positions, queries] */
  _Alignas(64) uint32_t values[SPAN_DIM / 2 * SPAN]; /* [DV / WIDE, positions / 2, WIDE]: pairs of positions */
  _Alignas(64) uint16_t queries[(BATCH + 2 * MOST_ROWS) * SPAN_DIM];
  uint16_t expanded[SUB * MAX_DIM];
  int64_t low[BATCH], end[BATCH]; /* the positions that a query sees */
  int64_t dim, positions;         /* of keys and queries, with zeros behind them; of the span */
  int few;                        /* whether keys are read as they are stored */
} kv_span;

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

/* The vectors of the positions first..last, of those from b on; zeros where nobody looks: weights of 0 must not meet
 * what was never stored. `bits`: of codes, or 0. */
static void rows_of(const stored *x, int64_t first, int64_t last, int64_t b, int64_t dim, int64_t bits,
                    uint16_t *expanded, const uint16_t **rows) {
  static const uint16_t nothing[MAX_DIM];
  const ring_ranges r = ring_ranges_of(x, first, last, b);
  for (int t = 0; t < SUB; t++) rows[t] = nothing;
  for (int run = 0; run < 2; run++)
    for (int64_t t = 0; t < r.count[run]; t++) {
      const int64_t slot = r.from[run] + t, at = r.at[run] + t;
      if (bits) expand_codes((const uint8_t *)x->data + slot * x->slot, x->scale[slot], dim, bits, expanded + at * dim);
      rows[at] = bits ? expanded + at * dim : (const uint16_t *)x->data + slot * x->slot;
    }
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

/* Sixteen rows as they are, or where they do not follow each other or fill no tile, copied with zeros behind them. */
static tile_rows rows_in_tile(const uint16_t *const *rows, int64_t slot, int64_t dim, int64_t padded, void *copy) {
  int follow = dim == padded;
  for (int i = 1; i < 16; i++) follow &= rows[i] == rows[0] + i * slot;
  if (follow) return (tile_rows){rows[0], slot};
  uint16_t *to = copy;
  memset(to, 0, (size_t)(16 * padded) * sizeof *to);
  for (int i = 0; i < 16; i++) memcpy(to + i * padded, rows[i], (size_t)dim * sizeof *to);
  return (tile_rows){to, padded};
}

/* What is stored as floats at the tile at b. */
static const source *floats_at(const bf16_task *t, int64_t b) {
  return t->leaving && b + SUB >= t->until ? t->leaving : t->floats;
}

/* Of the SUB positions from b on, the keys that some query of the task sees, as floats or as codes. */
static void lay_keys(const bf16_task *t, int64_t b, int coded, kv_span *to) {
  const attend_args *a = t->args;
  const stored k = at_tile(coded ? &t->coded->k : &floats_at(t, b)->k, b);
  const int64_t at = b % to->positions;
  uint32_t *keys = to->keys + at * (to->dim / 2);
  const uint16_t *rows[SUB];
  if (coded && t->codes->tail) {
    lay_channels(&k, b % k.slots, a->dim, t->codes->bits, keys);
  } else {
    rows_of(&k, t->from > b ? t->from : b, t->until < b + SUB ? t->until : b + SUB, b, a->dim,
            coded ? t->codes->bits : 0, to->expanded, rows);
    for (int i = 0; i < SUB; i += 16) {
      if (!t->codes)
        for (int j = i; j < i + 16; j++)
          for (int64_t d = 0; d < a->dim; d += 32) ask_ahead(BF16, rows[j], d, k.ahead);
      if (to->few) to->rows[(at + i) / 16] = rows_in_tile(rows + i, k.slot, a->dim, to->dim, keys + i * to->dim / 2);
      else transpose_all_pairs(rows + i, a->dim, keys + i);
    }
  }
  if (!to->few) memset(keys + a->dim / 2 * SUB, 0, (size_t)((to->dim - a->dim) / 2 * SUB) * sizeof *keys);
}

/* The same of the values. */
static void lay_values(const bf16_task *t, int64_t b, int coded, kv_span *to) {
  const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7); /* halves are taken of each quarter */
  const int64_t dim = t->args->dim_v;
  const stored v = at_tile(coded ? &t->coded->v : &floats_at(t, b)->v, b);
  const uint16_t *rows[SUB];
  rows_of(&v, t->from > b ? t->from : b, t->until < b + SUB ? t->until : b + SUB, b, dim, t->codes ? t->codes->bits : 0,
          to->expanded, rows);
  for (int64_t d = 0; d < dim; d += 32) {
    uint32_t *pairs = to->values + (d / WIDE * to->positions + b % to->positions) / 2 * WIDE + d % WIDE;
    const __mmask32 mask = dim - d < 32 ? (1u << (dim - d)) - 1 : ~0u;
    for (int i = 0; i < SUB; i += 2, pairs += WIDE) {
      if (!t->codes)
        for (int j = 0; j < 2; j++) ask_ahead(BF16, rows[i + j], d, v.ahead);
      const __m512i x = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi16(mask, rows[i] + d));
      const __m512i y = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi16(mask, rows[i + 1] + d));
      _mm512_store_si512(pairs, _mm512_unpacklo_epi16(x, y));
      _mm512_store_si512(pairs + 16, _mm512_unpackhi_epi16(x, y));
    }
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

/* What some queries see of the positions whose scores they have: low[m]..end[m], cut to whole blocks of SUB. */
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
  _Alignas(64) float before[MOST_ROWS], largest[MOST_ROWS], base[MOST_ROWS];
  for (int64_t m = 0; m < rows; m++) {
    const int64_t l = low[m] - from, e = end[m] - from;
    of[m] = (seen){l, e, l > 0 ? l / SUB * SUB : 0, e < count ? (e + SUB - 1) / SUB * SUB : count};
    if (of[m].first >= of[m].last) of[m].first = of[m].last = 0;
    largest[m] = largest_score(a, scores + m * SUB, of + m);
    before[m] = parts[m * stride];
  }
  for (int64_t m = 0; m < rows; m += VL) {
    const vf log2e = vf_set1(1.44269504f), was = vf_load(before + m);
    const vf now = vf_max(vf_mul(vf_load(largest + m), vf_set1(scale)), was);
    const __mmask16 grows = _mm512_cmp_ps_mask(now, was, _CMP_GT_OQ);
    const __mmask16 sees = _mm512_cmp_ps_mask(now, vf_set1(-INFINITY), _CMP_NEQ_UQ);
    vf_store(keep + m, _mm512_mask_mov_ps(vf_set1(1), grows, power_of_two(vf_mul(vf_sub(was, now), log2e))));
    vf_store(base + m, _mm512_maskz_mul_ps(sees, vf_sub(vf_zero(), now), log2e));
    vf_store(largest + m, now);
  }
  for (int64_t m = 0; m < rows; m++) {
    const float sum = weigh(scores + m * SUB, of + m, count, vf_set1(scale * 1.44269504f), vf_set1(base[m]),
                            weights + m * count);
    parts[m * stride] = largest[m];
    parts[m * stride + 1] = parts[m * stride + 1] * keep[m] + sum;
  }
}
#pragma GCC pop_options

/* y[m] = the sums over n numbers of x[m] times those of WIDE others. */
INLINE void products(const uint16_t *x, const uint32_t *w, int64_t n, int64_t rows, float *y) {
  if (uses_amx()) sums_in_tiles(x, w, n, rows > 16 ? 32 : 16, y, WIDE);
  else sums_of(x, w, n, rows, y, WIDE, 0);
}

/* Some queries, from number j of the batch on, over the span from b on. */
static void tile(const bf16_task *t, const kv_span *on, int64_t j, int64_t rows, int64_t b, float *parts) {
  const attend_args *a = t->args;
  const int64_t stride = a->dim_v + 2;
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
    if (on->few) scores_of_columns(on->columns + i / 16, rows, scores[i / SUB][0]);
    else products(on->queries + j * on->dim, on->keys + i * (on->dim / 2), on->dim, rows, scores[i / SUB][0]);
  const int64_t count = last - first;
  softmax_update_bf16(a, scores[first / SUB][0], rows, count, on->low + j, on->end + j, b + first, parts, keep, weights);
  for (int64_t d = 0; d < a->dim_v; d += WIDE) {
    products(weights, on->values + (d / WIDE * on->positions + first) / 2 * WIDE, count, rows, scores[0][0]);
    const int64_t n = a->dim_v - d < WIDE ? a->dim_v - d : WIDE;
    for (int64_t m = 0; m < rows; m++) {
      float *to = parts + m * stride + 2 + d, *x = scores[0][m];
      const vf times = vf_set1(keep[m]);
      for (int64_t i = 0; i < n; i += VL) {
        const __mmask16 mask = n - i < VL ? (__mmask16)((1 << (n - i)) - 1) : 0xffff;
        const vf before = _mm512_maskz_loadu_ps(keep[m] != 0 ? mask : 0, to + i); /* or nothing is there yet */
        _mm512_mask_storeu_ps(to + i, mask, vf_fma(before, times, vf_load(x + i)));
      }
    }
  }
}

void attend_bf16(const bf16_task *t) {
  const attend_args *a = t->args;
  const int64_t group = a->heads / a->kv_heads, start = a->starts[t->row], most = uses_amx() ? MOST_ROWS : ROWS;
  kv_span on;
  on.dim = uses_amx() ? (a->dim + 31) / 32 * 32 : a->dim;
  on.positions = t->codes ? SUB : a->dim > SPAN_DIM || a->dim_v > SPAN_DIM ? SPAN / 2 : SPAN;
  on.few = uses_amx() && t->n - t->first <= FEW;
  const int64_t batch = a->dim > SPAN_DIM ? BATCH / 2 : BATCH;
  for (int64_t first = t->first; first < t->n; first += batch) {
    const int64_t count = t->n - first < batch ? t->n - first : batch;
    for (int64_t j = 0; j < count; j++) {
      const int64_t token = (first + j) / group, head = t->kv * group + (first + j) % group;
      uint16_t *query = on.queries + j * on.dim;
      on.low[j] = low_of(a, start + token), on.end[j] = start + token + 1;
      round_pairs(t->q + token * a->q_token + head * a->q_head, a->dim, query);
      memset(query + a->dim, 0, (size_t)(on.dim - a->dim) * sizeof *query);
    }
    if (on.few) {
      const uint16_t *rows[FEW];
      for (int64_t i = 0; i < FEW; i++) rows[i] = on.queries + (i < count ? i : 0) * on.dim;
      transpose_all_pairs(rows, on.dim, on.pairs);
    }
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
        const int64_t tiles = (low - b) / 16;
        for (int64_t i = low; i < end; i += SUB) lay_keys(t, i, coded, &on);
        if (on.few) scores_in_tiles(on.rows + tiles, end - low, on.pairs, on.dim, on.columns + tiles);
        for (int64_t i = low; i < end; i += SUB) lay_values(t, i, coded, &on); /* while tiles are multiplied */
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
