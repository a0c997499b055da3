/* Attention of many queries, as prompts have them, over keys and values in bfloat16, or in few bits: queries and
 * weights are rounded to bfloat16, as the products around them are, and a block of positions is laid out once for all
 * of them. Few queries: see attend_few.c. */
#include "simd/bf16_dot.h"
#include "attention/kv_layout.h"

#ifdef LMSTATE_BF16_DOT
#include "attention/bf16_rows.h"

enum { BATCH = 384 }; /* queries that meet a span together; half of them where heads are wider than SPAN_DIM */

/* What is laid out of a span, and the queries that meet it. */
typedef struct {
  _Alignas(64) uint32_t keys[SPAN_DIM / 2 * SPAN]; /* [positions / SUB, D / 2, SUB]: pairs of numbers of a key */
  _Alignas(64) uint32_t values[SPAN_DIM / 2 * SPAN]; /* [DV / WIDE, positions / 2, WIDE]: pairs of positions */
  _Alignas(64) uint16_t queries[(BATCH + MOST_ROWS) * SPAN_DIM];
  _Alignas(64) uint16_t copies[16 * MAX_DIM]; /* see rows_at */
  int64_t low[BATCH], end[BATCH]; /* the positions that a query sees */
  int64_t dim, positions;         /* of keys and queries, with zeros behind them; of the span */
} kv_span;

int attends_bf16(const attend_args *a, const attend_plan *plan, int64_t r) {
  (void)r;
  /* Not where the weights decide what is forgotten, nor over keys that are codes alone; over codes at all not where a
   * decode step would wait for a layout that only a prompt in tiles pays for. */
  if (plan->codes && (uses_amx() || !plan->codes->tail)) return 0;
  return a->kind == BF16 && !plan->extra_key && !a->columns && !a->slopes && !a->biases && rounds_to_bf16();
}

/* What number i of 16 is in `low` and `high`, as pairs. */
INLINE __m512i paired(__m256i low, __m256i high) {
  return _mm512_or_si512(_mm512_cvtepu16_epi32(low), _mm512_slli_epi32(_mm512_cvtepu16_epi32(high), 16));
}

/* Keys that are a block of codes, channel by channel. */
static void lay_channels(const stored *x, int64_t slot, int64_t dim, int64_t bits, uint32_t *to) {
  const int kind = codes_of_bits(bits), fields = fields_of(kind), bytes = SUB / fields;
  const uint8_t *codes = (const uint8_t *)x->data + slot * x->slot;
  float scale[2 * MAX_DIM + VL];
  floats_of_f16(x->scale + slot * block_scales(dim), scale, 2 * dim);
  for (int64_t d = 0; d < dim; d += 2, to += WIDE) {
    uint16_t channels[2][SUB];
    for (int c = 0; c < 2; c++) {
      float numbers[SUB];
      for (int i = 0; i < bytes; i += VL) {
        vf each[4];
        load_fields(kind, codes, (d + c) * SUB * bits / 8, bytes, i, each);
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
      if (rows.ahead) prefetch_rows(rows, rows.ahead, dim);
      transpose_all_pairs(rows, dim, keys + i);
    }
  memset(keys + dim / 2 * SUB, 0, (size_t)((to->dim - dim) / 2 * SUB) * sizeof *keys);
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

/* y[m] = the sums over n numbers of x[m] times those of WIDE others. */
INLINE void products(const uint16_t *x, const uint32_t *w, int64_t n, int64_t rows, float *y) {
  if (uses_amx()) sums_in_tiles(x, w, n, rows > 16 ? 32 : 16, y, WIDE);
  else sums_of(x, w, n, rows, y);
}

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
      /* The queries before this one are in this block or before it: they see keys of it as floats. */
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
