/* Attention of a prompt over keys and values in bfloat16, or in few bits: queries and weights are rounded to bfloat16,
 * as the products around them are, and a block of positions is laid out once for many of them. */
#include "simd/bf16_dot.h"
#include "attention/kv_layout.h"

#ifdef LMSTATE_PAIRS
enum { BATCH = 16 * ROWS }; /* queries that meet a block together */

typedef struct {
  _Alignas(64) uint32_t keys[MAX_DIM / 2 * SUB]; /* [D / 2, SUB]: pairs of numbers of a key */
  _Alignas(64) uint32_t values[SUB / 2 * MAX_DIM]; /* [DV / WIDE, SUB / 2, WIDE]: pairs of positions */
  uint16_t queries[BATCH * MAX_DIM], expanded[SUB * MAX_DIM];
  int64_t low[BATCH], end[BATCH]; /* the positions that a query sees */
} kv_block;

int attends_bf16(const attend_args *a, const attend_plan *plan, int64_t r) {
  (void)r;
  /* Not where the weights decide what is forgotten, nor over keys that are codes alone. */
  return a->kind == BF16 && !(plan->codes && !plan->codes->tail) && !plan->extra_key && !a->columns && uses_bf16_dot();
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

/* Of the positions from b on, those that some query of the task sees: keys as floats or as codes, and values. */
static void lay_block(const bf16_task *t, int64_t b, int coded, kv_block *to) {
  const attend_args *a = t->args;
  const source *s = coded ? t->coded : t->floats;
  const int64_t first = t->from > b ? t->from : b, last = t->until < b + SUB ? t->until : b + SUB;
  const int64_t bits = t->codes ? t->codes->bits : 0;
  const uint16_t *rows[SUB];
  if (coded && t->codes->tail) {
    lay_channels(&s->k, b % s->k.slots, a->dim, bits, to->keys);
  } else {
    rows_of(&s->k, first, last, b, a->dim, coded ? bits : 0, to->expanded, rows);
    for (int i = 0; i < SUB; i += 16) transpose_all_pairs(rows + i, a->dim, to->keys + i);
  }
  rows_of(&s->v, first, last, b, a->dim_v, bits, to->expanded, rows);
  for (int64_t d = 0; d < a->dim_v; d += VL) {
    uint32_t *pairs = to->values + d / WIDE * (SUB / 2) * WIDE + d % WIDE;
    const __mmask16 mask = a->dim_v - d < VL ? (__mmask16)((1 << (a->dim_v - d)) - 1) : 0xffff;
    for (int i = 0; i < SUB; i += 2, pairs += WIDE)
      _mm512_store_si512(pairs, paired(_mm256_maskz_loadu_epi16(mask, rows[i] + d),
                                       _mm256_maskz_loadu_epi16(mask, rows[i + 1] + d)));
  }
}

INLINE vf power_of_two(vf x) {
  x = vf_max(vf_set1(-160), x); /* 0 then; a NaN stays one */
  const vf n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT), r = vf_sub(x, n);
  vf p = vf_set1(1.3333558e-3f);
  p = vf_fma(p, r, vf_set1(9.6181291e-3f));
  p = vf_fma(p, r, vf_set1(5.5504109e-2f));
  p = vf_fma(p, r, vf_set1(2.4022651e-1f));
  p = vf_fma(p, r, vf_set1(6.9314718e-1f));
  p = vf_fma(p, r, vf_set1(1));
  return _mm512_scalef_ps(p, n);
}

/* The weights of the positions low..end of a block; what was summed before is scaled to the new largest score. */
static void softmax_update(const attend_args *a, float *scores, float *part, int64_t low, int64_t end,
    uint16_t *weights) {
  enum { VECTORS = SUB / VL };
  const vf scale = vf_set1((float)a->scale), cap = vf_set1((float)a->softcap), log2e = vf_set1(1.44269504f);
  vf s[VECTORS], largest = vf_set1(-INFINITY), sum = vf_zero();
  UNROLL for (int i = 0; i < VECTORS; i++) {
    s[i] = vf_mul(vf_load(scores + i * VL), scale);
    if (a->softcap != 0) s[i] = vf_mul(cap, vf_tanh(vf_div(s[i], cap)));
    const int64_t first = low - i * VL, last = end - i * VL;
    if (first > 0 || last < VL) {
      const uint32_t until = last >= VL ? 0xffff : last > 0 ? (1u << last) - 1 : 0;
      const uint32_t before = first >= VL ? 0xffff : first > 0 ? (1u << first) - 1 : 0;
      s[i] = _mm512_mask_mov_ps(vf_set1(-INFINITY), (__mmask16)(until & ~before), s[i]);
    }
    largest = vf_max(largest, s[i]);
  }
  const float before = part[0], here = vf_largest(largest), now = here > before ? here : before;
  const vf base = vf_set1(now == -INFINITY ? 0 : -now * 1.44269504f);
  float rounded[SUB];
  UNROLL for (int i = 0; i < VECTORS; i++) {
    const vf w = power_of_two(vf_fma(s[i], log2e, base));
    vf_store(rounded + i * VL, w);
    sum = vf_add(sum, w);
  }
  round_pairs(rounded, SUB, weights);
  if (now > before) {
    const float keep = expf(before - now);
    part[1] *= keep;
    for (int64_t d = 0; d < a->dim_v; d++) part[2 + d] *= keep;
    part[0] = now;
  }
  part[1] += vf_sum(sum);
}

/* Up to ROWS queries, from number j of the batch on, over the block from b on. */
static void tile(const bf16_task *t, const kv_block *on, int64_t j, int64_t rows, int64_t b, float *parts) {
  const attend_args *a = t->args;
  const int64_t stride = a->dim_v + 2;
  _Alignas(64) float scores[ROWS][SUB];
  uint16_t weights[ROWS * SUB];
  sums_of(on->queries + j * a->dim, on->keys, a->dim, rows, scores[0], SUB, 0);
  for (int64_t m = 0; m < rows; m++)
    softmax_update(a, scores[m], parts + m * stride, on->low[j + m] - b, on->end[j + m] - b, weights + m * SUB);
  for (int64_t d = 0; d < a->dim_v; d += WIDE) {
    const uint32_t *values = on->values + d * (SUB / 2);
    const int64_t n = a->dim_v - d;
    if (n >= WIDE) {
      sums_of(weights, values, SUB, rows, parts + 2 + d, stride, 1);
      continue;
    }
    sums_of(weights, values, SUB, rows, scores[0], WIDE, 0);
    for (int64_t m = 0; m < rows; m++)
      for (int64_t i = 0; i < n; i++) parts[m * stride + 2 + d + i] += scores[m][i];
  }
}

void attend_bf16(const bf16_task *t) {
  const attend_args *a = t->args;
  const int64_t group = a->heads / a->kv_heads, start = a->starts[t->row];
  kv_block on;
  for (int64_t first = t->first; first < t->n; first += BATCH) {
    const int64_t count = t->n - first < BATCH ? t->n - first : BATCH;
    for (int64_t j = 0; j < count; j++) {
      const int64_t token = (first + j) / group, head = t->kv * group + (first + j) % group;
      on.low[j] = low_of(a, start + token), on.end[j] = start + token + 1;
      round_pairs(a->q + t->row * a->q_row + token * a->q_token + head * a->q_head, a->dim, on.queries + j * a->dim);
    }
    const int64_t until = t->until < on.end[count - 1] ? t->until : on.end[count - 1];
    for (int64_t b = (t->from > on.low[0] ? t->from : on.low[0]) / SUB * SUB; b < until; b += SUB) {
      /* The queries before this one stand in this block or before it: they see keys of it as floats. */
      const int64_t far = !t->codes ? count : t->codes->tail ? (b + SUB - start) * group - first : 0;
      const int64_t ends[2] = {far < 0 ? 0 : far < count ? far : count, count};
      for (int coded = 0; coded < 2; coded++) {
        int64_t j = coded ? ends[0] : 0;
        while (j < ends[coded] && on.end[j] <= b) j++;
        if (j == ends[coded]) continue;
        lay_block(t, b, coded, &on);
        for (int64_t rows; j < ends[coded]; j += rows) {
          rows = ends[coded] - j < ROWS ? ends[coded] - j : ROWS;
          if (on.low[j] < b + SUB) tile(t, &on, j, rows, b, t->parts + (first + j) * (a->dim_v + 2));
        }
      }
    }
  }
}
#else
int attends_bf16(const attend_args *a, const attend_plan *plan, int64_t r) {
  (void)a, (void)plan, (void)r;
  return 0;
}

void attend_bf16(const bf16_task *t) { (void)t; }
#endif
