/* Products with bfloat16 weights in tiles: 16 outputs by 16 rows, one row at decode and thousands at a prompt alike.
 * The weights are multiplied as they are stored, and the activations are stored in pairs of inputs. */
#include <omp.h>

#include "dense/bfloat12.h"
#include "dense/linear_tile.h"
#include "simd/amx.h"
#include "simd/bf16_dot.h"

#ifdef LMSTATE_AMX
/* Of a tile; inputs of one product of tiles; tiles of outputs that meet the activations of a tile of rows. */
enum { SIDE = 16, STEP = 32, TILES = 4, WIDTH = TILES * SIDE };
/* Inputs whose weights stay in the first cache, for one tile of rows and for many; rows that share weights where they
 * are. */
enum { DEEP = 128, DEEPER = 256, FEW = 2 * SIDE };
/* Of a row alone: inputs that are unpacked together, and products whose halves each thread tries both ways. */
enum { ROW_PART = 64, TRIED = 32 };

int bf16_in_tiles(const linear_args *a) { return bf16_applies(a) && uses_amx(); }

static int64_t rows_beside(const linear_args *a, int64_t row) {
  const int64_t left = a->rows - row / SIDE * SIDE;
  return left < SIDE ? left : SIDE;
}

void bf16_lay_rows(const linear_args *a, const uint16_t *from, int64_t row, int64_t count, uint16_t *memory) {
  const int64_t k = a->inputs, column = row % SIDE, width = rows_beside(a, row);
  uint32_t *to = (uint32_t *)(memory + row / SIDE * SIDE * k) + column;
  if (width == 1) {
    memcpy(to, from, (size_t)k * sizeof(*from));
    return;
  }
  const __mmask16 mask = (__mmask16)((1 << count) - 1);
  for (int64_t i = 0; i < k; i += STEP, to += SIDE * width) {
    __m512i r[SIDE];
    UNROLL16 for (int m = 0; m < SIDE; m++) r[m] = _mm512_loadu_si512(from + (m < count ? m : 0) * k + i);
    transpose16(r);
    UNROLL16 for (int p = 0; p < SIDE; p++) _mm512_mask_storeu_epi32(to + p * width, mask, r[p]);
  }
}

/* Where the weights of some outputs and inputs are, tile after tile, in numbers. */
typedef struct {
  const uint16_t *at;
  int64_t row, tile, step; /* from an output to the next one, from 16 to the next 16, from 32 inputs to the next */
  int64_t prefetched;           /* bytes to ask for with each tile: those that were not while these were packed */
} weights;

/* Bytes of some outputs that are stored together. */
static int64_t bytes_of(const linear_args *a, int64_t outputs) {
  return a->kind == BFLOAT12 ? outputs / BESIDE * (a->inputs / SPAN) * SPAN_BYTES : outputs * a->inputs * 2;
}

/* Memory that is asked for in its order while other weights are multiplied, a line for each that is read: outputs are
 * too many runs for the processor's own prefetch. */
typedef struct {
  const char *at, *end;
} ahead;

INLINE void prefetch(ahead *next, int64_t bytes) {
  const char *end = next->end - next->at < bytes ? next->end : next->at + bytes;
  for (; next->at < end; next->at += 64) __builtin_prefetch(next->at, 0, 1);
}

/* Outputs first..first + count, inputs from..from + part, as tiles. */
static weights pack_tiles(const linear_args *a, const bfloat12 *in_bits, int64_t first, int64_t count, int64_t from,
                          int64_t part, ahead *next, uint16_t *to) {
  const int64_t k = a->inputs, step = SIDE * STEP, tile = part * SIDE;
  for (int64_t n = 0; n < count; n += a->kind == BFLOAT12 ? BESIDE : 1) {
    uint16_t *there = to + n / SIDE * tile + n % SIDE * STEP;
    if (a->kind == BFLOAT12) {
      const uint8_t *p = span_of(in_bits, first + n, k, from), *after = (const uint8_t *)next->at;
      const int64_t bytes = part / SPAN * BF16_PREFETCHED;
      const int more = next->end - next->at >= bytes;
      if (more) next->at += bytes;
      bf16_unpack(p, more ? after : p, in_bits->table, part, there, STEP, step);
      continue;
    }
    prefetch(next, part * 2);
    const uint16_t *own = (const uint16_t *)a->weight + (first + n) * k + from;
    for (int64_t i = 0; i < part; i += STEP, there += step) _mm512_store_si512(there, _mm512_loadu_si512(own + i));
  }
  const int64_t left = SIDE * STEP * (SPAN_BYTES - BF16_PREFETCHED) / (SPAN * BESIDE);
  return (weights){to, STEP, tile, step, a->kind == BFLOAT12 ? left : 0};
}

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-bf16")
/* Add the products of `steps` times 32 inputs to the sums in the first `tiles` tiles. `tiles` is a constant where
 * this is called. */
INLINE void add_products(weights w, const uint16_t *x, int64_t width, int64_t steps, int tiles, ahead *next) {
  const size_t row = (size_t)w.row * sizeof(*w.at), pair = (size_t)width * 2 * sizeof(*x);
  for (int64_t s = 0; s < steps; s++, w.at += w.step, x += STEP * width) {
    if (next) prefetch(next, tiles * w.prefetched);
    TILE_LOAD(4, x, pair);
    TILE_LOAD(5, w.at, row);
    _tile_dpbf16ps(0, 5, 4);
    if (tiles > 1) {
      TILE_LOAD(6, w.at + w.tile, row);
      _tile_dpbf16ps(1, 6, 4);
    }
    if (tiles > 2) {
      TILE_LOAD(7, w.at + 2 * w.tile, row);
      _tile_dpbf16ps(2, 7, 4);
    }
    if (tiles > 3) {
      TILE_LOAD(5, w.at + 3 * w.tile, row);
      _tile_dpbf16ps(3, 5, 4);
    }
  }
}

static void add_products_of(weights w, const uint16_t *x, int64_t width, int64_t steps, int64_t tiles, ahead *next) {
  switch (tiles) {
    case 1: add_products(w, x, width, steps, 1, next); break;
    case 2: add_products(w, x, width, steps, 2, next); break;
    case 3: add_products(w, x, width, steps, 3, next); break;
    default: add_products(w, x, width, steps, 4, next); break;
  }
}

/* The sums of four tiles, as they go on along the inputs; zeros at first. */
typedef float tile_sums[TILES][SIDE][SIDE];

static void begin_sums(tile_sums *from) {
  if (from) {
    TILE_LOAD(0, (*from)[0], 64);
    TILE_LOAD(1, (*from)[1], 64);
    TILE_LOAD(2, (*from)[2], 64);
    TILE_LOAD(3, (*from)[3], 64);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
}

static void end_sums(tile_sums *to) {
  _tile_stored(0, (*to)[0], 64);
  _tile_stored(1, (*to)[1], 64);
  _tile_stored(2, (*to)[2], 64);
  _tile_stored(3, (*to)[3], 64);
  __asm__ volatile("" ::: "memory");
}
#pragma GCC pop_options

/* What the rare numbers of a 12-bit weight add to the sums of an output. */
INLINE void add_rares(const bfloat12 *w, int64_t output, const uint16_t *x, int64_t rows, float *to) {
  vf sum = vf_load(to);
  for (int32_t r = w->first[output]; r < w->first[output + 1]; r++) {
    const int64_t place = bf16_place_in_row(w->rares[r].column);
    const __m512i pairs = _mm512_loadu_si512(x + place / 2 * 2 * rows);
    const __m512i with = place % 2 ? _mm512_srli_epi32(pairs, 16) : pairs;
    sum = vf_add(sum, vf_mul(vf_set1(w->rares[r].value), _mm512_castsi512_ps(_mm512_slli_epi32(with, 16))));
  }
  vf_store(to, sum);
}

/* Sums [outputs, rows] to where they belong. */
static void finish_tiles(const linear_args *a, const bfloat12 *in_bits, const uint16_t *x, tile_sums *from, int64_t row,
                         int64_t rows, int64_t first, int64_t count) {
  _Alignas(64) float tile[SIDE][WIDTH];
  for (int64_t n = 0; n < count && a->kind == BFLOAT12; n++)
    add_rares(in_bits, first + n, x, rows, (*from)[n / SIDE][n % SIDE]);
  for (int64_t t = 0; t < (count + SIDE - 1) / SIDE; t++) {
    __m512i r[SIDE];
    UNROLL16 for (int n = 0; n < SIDE; n++) r[n] = _mm512_load_si512((*from)[t][n]);
    transpose16(r);
    UNROLL16 for (int m = 0; m < SIDE; m++) _mm512_store_si512(tile[m] + t * SIDE, r[m]);
  }
  linear_finish(a, tile[0], WIDTH, row, rows, first, count);
}

/* The sums of 16 outputs for a row alone, in vectors: these take weights as they come, where tiles wait for the
 * memory. */
INLINE vf row_sums(const linear_args *a, const bfloat12 *in_bits, const float *x, int64_t first) {
  const int64_t k = a->inputs, last = a->outputs - 1;
  _Alignas(64) __m512i words[ROW_PART / STEP][SIDE];
  vf sum = vf_zero();
  for (int64_t i = 0, part; i < k; i += part) {
    part = a->kind == BF16 ? STEP : k - i < ROW_PART ? k - i : ROW_PART;
    if (a->kind == BF16)
      UNROLL16 for (int n = 0; n < SIDE; n++) {
        const uint16_t *own = (const uint16_t *)a->weight + (first + n < last ? first + n : last) * k + i;
        words[0][n] = _mm512_loadu_si512(own);
        __builtin_prefetch(own + SIDE * k, 0, 1);
      }
    else
      for (int n = 0; n < SIDE && first + n <= last; n += BESIDE) {
        const uint8_t *p = span_of(in_bits, first + n, k, i);
        const uint8_t *next = p + SIDE / BESIDE * (k / SPAN) * SPAN_BYTES;
        bf16_unpack(p, next, in_bits->table, part, (uint16_t *)&words[0][n], STEP, SIDE * STEP);
      }
    for (int64_t s = 0; s < part / STEP; s++) {
      /* The lines that bf16_unpack does not ask for: few at a time, so that they are on their way while it computes. */
      for (int n = 0; n < SIDE && a->kind == BFLOAT12; n += BESIDE)
        __builtin_prefetch(span_of(in_bits, first + SIDE + n, k, i) + BF16_PREFETCHED + s * 64, 0, 1);
      transpose16(words[s]);
      sum = add_as_tile(x + i + s * STEP, words[s], sum);
    }
  }
  return sum;
}

static void blocks_in_vectors(const linear_args *a, const uint16_t *row, int64_t begin, int64_t end, float *x) {
  const bfloat12 in_bits = bfloat12_at(a->weight, a->outputs, a->inputs); /* where it is one */
  for (int64_t i = 0; i < a->inputs; i++) x[i] = bf16_to_float(row[i]);
  for (int64_t b = begin; b < end; b++) {
    const int64_t first = b * SIDE, count = a->outputs - first < SIDE ? a->outputs - first : SIDE;
    _Alignas(64) float sums[SIDE];
    const unsigned before = begin_flushing();
    vf_store(sums, end_flushing(before, row_sums(a, &in_bits, x, first)));
    for (int64_t n = 0; n < count && a->kind == BFLOAT12; n++)
      for (int32_t r = in_bits.first[first + n]; r < in_bits.first[first + n + 1]; r++)
        sums[n] += in_bits.rares[r].value * x[bf16_place_in_row(in_bits.rares[r].column)];
    linear_finish(a, sums, SIDE, 0, 1, first, count);
  }
}

static void blocks_in_tiles(const linear_args *a, const uint16_t *memory, int64_t begin, int64_t end, span_of_rows of,
                            float *scratch) {
  const int64_t k = a->inputs, most_deep = of.last - of.first > SIDE ? DEEPER : DEEP;
  const int64_t parts = (k + most_deep - 1) / most_deep, deep = (k / parts + SPAN - 1) / SPAN * SPAN;
  const int64_t last = end * SIDE < a->outputs ? end * SIDE : a->outputs;
  const bfloat12 in_bits = bfloat12_at(a->weight, a->outputs, k); /* where it is one */
  tile_sums *const between = (tile_sums *)scratch;
  uint16_t *const panel = (uint16_t *)(between + BF16_TILES);
  const char *own = (const char *)a->weight + bytes_of(a, begin * SIDE);
  ahead next = {own, own + bytes_of(a, last - begin * SIDE)};
  prefetch(&next, bytes_of(a, WIDTH));
  for (int64_t b = begin, tiles; b < end; b += tiles) {
    tiles = end - b < TILES ? end - b : TILES;
    const int64_t first = b * SIDE, count = last - first < tiles * SIDE ? last - first : tiles * SIDE;
    const int packed = a->kind == BFLOAT12 || of.last - of.first > FEW || count < tiles * SIDE;
    const int kept = of.last - of.first <= SIDE; /* sums of one tile of rows stay where they are */
    for (int64_t from = 0, part; from < k; from += part) {
      part = packed && k - from > deep ? deep : k - from;
      const weights w = packed ? pack_tiles(a, &in_bits, first, count, from, part, &next, panel)
                               : (weights){(const uint16_t *)a->weight + first * k, k, SIDE * k, STEP,
                                           SIDE * STEP * 2};
      for (int64_t row = of.first, t = 0; row < of.last; row += SIDE, t++) {
        const uint16_t *x = memory + row * k;
        const int64_t rows = rows_beside(a, row);
        if (from == 0) begin_sums(NULL);
        else if (!kept) begin_sums(between + t);
        add_products_of(w, x + from * rows, rows, part / STEP, tiles, t ? NULL : &next);
        if (kept && from + part < k) continue;
        end_sums(between + t);
        if (from + part == k) finish_tiles(a, &in_bits, x, between + t, row, rows, first, count);
      }
    }
  }
}

/* Blocks begin..end of 16 outputs. Where vectors give a row alone the same bits, a thread tries its first products both
 * ways, and goes on with the one that was faster in most of them. */
void bf16_blocks(const linear_args *a, const uint16_t *memory, int64_t begin, int64_t end, span_of_rows of,
                 float *scratch) {
  static _Thread_local struct { int products, wins; } trials[2];
  const int kind = a->kind == BFLOAT12, either = a->rows == 1 && adds_as_tiles();
  if (!either || (trials[kind].products == TRIED && 2 * trials[kind].wins <= TRIED)) {
    blocks_in_tiles(a, memory, begin, end, of, scratch);
  } else if (trials[kind].products == TRIED || end - begin < 2) {
    blocks_in_vectors(a, memory, begin, end, scratch);
  } else {
    const int64_t middle = (begin + end) / 2;
    const double start = omp_get_wtime();
    blocks_in_vectors(a, memory, begin, middle, scratch);
    const double between = omp_get_wtime();
    blocks_in_tiles(a, memory, middle, end, of, scratch);
    const double each = (between - start) / (double)(middle - begin);
    trials[kind].wins += each < (omp_get_wtime() - between) / (double)(end - middle);
    trials[kind].products++;
  }
}
#else
int bf16_in_tiles(const linear_args *a) {
  (void)a;
  return 0;
}

void bf16_lay_rows(const linear_args *a, const uint16_t *from, int64_t row, int64_t count, uint16_t *memory) {
  (void)a, (void)from, (void)row, (void)count, (void)memory;
}

void bf16_blocks(const linear_args *a, const uint16_t *memory, int64_t begin, int64_t end, span_of_rows of,
                 float *scratch) {
  (void)a, (void)memory, (void)begin, (void)end, (void)of, (void)scratch;
}
#endif
