/* What attention over keys and values in bfloat16 does for many queries and for few: the vectors of some positions,
 * queries and weights that are rounded to bfloat16, and the softmax of a span. */
#ifndef LMSTATE_BF16_ROWS_H
#define LMSTATE_BF16_ROWS_H
#include "simd/bf16_tiles.h"
#include "attention/kv_layout.h"

enum {
  SPAN = 4 * SUB,    /* positions whose largest score is found at once; half of them where heads are wider */
  SPAN_DIM = 256,
  FEW = 2 * ROWS,    /* queries that read keys and values as they are stored; in tiles as many as one has */
  FEW_IN_TILE = 16,
  MOST_ROWS = 32     /* queries of a product */
};

/* A task of up to FEW queries, or FEW_IN_TILE of them; there are no codes. */
void attend_few(const bf16_task *t);

/* A vector of codes times its scale. `kind` is a constant where this is called. */
INLINE void expand_kind(const uint8_t *codes, uint16_t scale, int64_t dim, int kind, uint16_t *to) {
  const int fields = fields_of(kind);
  const int64_t part = dim / fields;
  const vf times = vf_set1(f16_to_float_bits(scale));
  float x[MAX_DIM];
  vf each[4];
  int64_t d = 0;
  for (; d + VL <= part; d += VL) {
    load_fields(kind, codes, 0, part, d, each);
    UNROLL for (int f = 0; f < fields; f++) vf_store(x + f * part + d, vf_mul(each[f], times));
  }
  if (d < part) {
    load_fields_part(kind, codes, 0, part, d, (int)(part - d), each);
    for (int f = 0; f < fields; f++) store_part(x + f * part + d, vf_mul(each[f], times), (int)(part - d));
  }
  round_pairs(x, dim, to);
}

static void expand_codes(const uint8_t *codes, uint16_t scale, int64_t dim, int64_t bits, uint16_t *to) {
  if (bits == 8) expand_kind(codes, scale, dim, CODES8, to);
  else if (bits == 4) expand_kind(codes, scale, dim, CODES4, to);
  else if (bits == 3) expand_kind(codes, scale, dim, CODES3, to);
  else expand_kind(codes, scale, dim, CODES2, to);
}

/* Prefetch n numbers of each row, `ahead` bytes further on. */
INLINE void prefetch_rows(tile_rows rows, int64_t ahead, int64_t n) {
  for (int i = 0; i < 16; i++)
    for (int64_t d = 0; d < n; d += 32) prefetch_ahead(BF16, rows.first, i * rows.stride + d, ahead);
}

/* The vectors of the 16 positions from p on in the tile that x is at: as they are stored, or copied where they are
 * codes of `bits`, are to be padded, or are not all seen or not side by side. What no query of the task sees is zeros:
 * weights of 0 must not meet what was never stored. */
static tile_rows rows_at(const bf16_task *t, const stored *x, int64_t p, int64_t dim, int64_t padded, int64_t bits,
                         uint16_t *copies) {
  const int64_t slot = p % x->slots;
  const tile_rows stored = {(const uint16_t *)(x->data + slot * x->bytes), x->slot, x->ahead};
  if (!bits && dim == padded && t->from <= p && p + 16 <= t->until && slot + 16 <= x->slots) return stored;
  if (stored.ahead) prefetch_rows(stored, stored.ahead, dim);
  memset(copies, 0, (size_t)(16 * padded) * sizeof *copies);
  for (int64_t q = t->from > p ? t->from : p; q < p + 16 && q < t->until; q++) {
    const char *const from = x->data + q % x->slots * x->bytes;
    uint16_t *const to = copies + (q - p) * padded;
    if (bits) expand_codes((const uint8_t *)from, x->scale[q % x->slots], dim, bits, to);
    else memcpy(to, from, (size_t)dim * sizeof *to);
  }
  return (tile_rows){copies, padded, 0};
}

/* What is stored as floats at the tile at b. */
static const source *floats_at(const bf16_task *t, int64_t b) {
  return t->next_task && b + SUB >= t->until ? t->next_task : t->floats;
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
    if (ahead) prefetch_ahead(BF16, one, 0, ahead), prefetch_ahead(BF16, other, 0, ahead);
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

/* The weights [rows, count] of positions whose scores are in blocks [MOST_ROWS, SUB]; `count` is a multiple of SUB, and
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

#endif
