/* Products with quantized weights in tiles: a group of inputs of 16 rows by 16 outputs at once. The sums of bytes are
 * exact and what follows a group is done as in `grouped_tile`, so that the result has the same bits. */
#include "dense/linear_tile.h"
#include "simd/amx.h"

#ifdef LMSTATE_AMX
enum { SIDE = 16 };
/* With fewer rows, vector bodies are faster: they multiply weights without unpacking them to tiles. */
enum { FEW4 = 16, FEW8 = 32 };
/* Blocks of outputs that meet 16 rows while these are in the first cache: their sums are then written in longer
 * runs. */
enum { TOGETHER = 4, WIDTH = TOGETHER * SIDE };

/* A group of 16 rows, as in `rounded`; without the second bytes where there are none. */
typedef struct {
  int32_t sum[SIDE];
  float scale[SIDE], scaled_sum[SIDE];
  int8_t q[2][SIDE][GROUP];
} rounded_rows;
INLINE int64_t rows_size(int bytes) { return (int64_t)sizeof(rounded_rows) - (2 - bytes) * SIDE * GROUP; }
INLINE const rounded_rows *rows_at(const rounded_rows *x, int64_t group, int bytes) {
  return (const rounded_rows *)((const char *)x + group * rows_size(bytes));
}

/* A group of 16 outputs, as in `group`, with a zero of 0 or, for 8 bits, of 128. */
typedef struct {
  uint8_t w[GROUP / 4][4 * SIDE];
  float scale[SIDE], minimum[SIDE];
} unpacked;

int amx_applies(const linear_args *a) {
  return is_grouped(a->kind) && a->rows >= (weight_bits(a->kind) == 4 ? FEW4 : FEW8) && uses_amx();
}

size_t amx_rows_bytes(const linear_args *a) {
  return (size_t)((a->rows + SIDE - 1) / SIDE * (a->inputs / GROUP) * rows_size(activation_bytes(a->kind)));
}

void amx_lay_row(const linear_args *a, const rounded *x, int64_t row, void *rows) {
  const int64_t groups = a->inputs / GROUP, m = row % SIDE;
  const int bytes = activation_bytes(a->kind);
  for (int64_t g = 0; g < groups; g++, x = rounded_at(x, 1, bytes)) {
    rounded_rows *to = (rounded_rows *)rows_at(rows, row / SIDE * groups + g, bytes);
    for (int b = 0; b < bytes; b++) memcpy(to->q[b][m], x->q[b], GROUP);
    to->sum[m] = x->sum, to->scale[m] = x->scale, to->scaled_sum[m] = x->scaled_sum;
  }
}

INLINE void unpack_groups(const uint8_t *p, int64_t groups, int bits, unpacked *to) {
  const int bytes = bits == 4 ? BYTES4 : BYTES8;
  for (int64_t g = 0; g < groups; g++, p += bytes, to++) {
    for (int l = 0; l < bytes; l += 64) __builtin_prefetch(p + AHEAD + l, 0, 1);
    const group w = bits == 4 ? unpack4(p, 2) : unpack8(p, 2);
    UNROLL for (int j = 0; j < GROUP / 4; j++) _mm512_store_si512(to->w[j], w.w[j]);
    vf_store(to->scale, f16x_load_f16(p + (bits == 4 ? 256 : 512)));
    if (bits == 4) vf_store(to->minimum, f16x_load_f16(p + 288));
  }
}

#pragma GCC push_options
#pragma GCC target("amx-tile,amx-int8")
/* The sums of a group, of each byte of the activations, in two tiles. A macro, since tiles have numbers for names: the
 * sums of two groups are on their way at once. */
#define GROUP_SUMS(high, low, x, bytes, weights, sums) \
  do { \
    TILE_LOAD(4, (weights)->w, 64); \
    TILE_LOAD(5, (x)->q[0], GROUP); \
    _tile_zero(high); \
    _tile_dpbsud(high, 5, 4); \
    if ((bytes) == 2) { \
      TILE_LOAD(6, (x)->q[1], GROUP); \
      _tile_zero(low); \
      _tile_dpbsud(low, 6, 4); \
      _tile_stored(low, (sums)[1], 64); \
    } \
    _tile_stored(high, (sums)[0], 64); \
    __asm__ volatile("" ::: "memory"); \
  } while (0)

INLINE void add_group(const rounded_rows *x, const unpacked *w, const int32_t (*sums)[SIDE][SIDE], int rows, int bits,
                      int bytes, f16x *acc) {
  const f16x scale = vf_load(w->scale), minimum = vf_load(w->minimum);
  UNROLL16 for (int m = 0; m < rows; m++) {
    __m512i sum = _mm512_load_si512(sums[0][m]);
    if (bytes == 2) sum = _mm512_add_epi32(_mm512_slli_epi32(sum, 8), _mm512_load_si512(sums[1][m]));
    if (bits == 8) sum = _mm512_sub_epi32(sum, _mm512_set1_epi32(128 * x->sum[m]));
    acc[m] = f16x_fma(_mm512_cvtepi32_ps(sum), f16x_fma1(scale, x->scale[m], f16x_zero()), acc[m]);
    if (bits == 4) acc[m] = f16x_fma1(minimum, x->scaled_sum[m], acc[m]);
  }
}

/* One block of outputs for the first `rows` of 16 rows. `rows`, `bits` and `bytes` are constants where this is
 * called. */
INLINE void amx_tile(const rounded_rows *x, const unpacked *w, int64_t groups, int rows, int bits, int bytes,
                     float (*to)[WIDTH]) {
  _Alignas(64) int32_t sums[2][2][SIDE][SIDE];
  f16x acc[SIDE];
  UNROLL16 for (int m = 0; m < rows; m++) acc[m] = f16x_zero();
  GROUP_SUMS(0, 1, x, bytes, w, sums[0]);
  for (int64_t g = 0; g < groups; g++, w++) { /* the sums of the next group are made while these are added */
    const rounded_rows *next = rows_at(x, 1, bytes);
    if (g + 1 < groups && g % 2 == 0) GROUP_SUMS(2, 3, next, bytes, w + 1, sums[1]);
    else if (g + 1 < groups) GROUP_SUMS(0, 1, next, bytes, w + 1, sums[0]);
    add_group(x, w, (const int32_t(*)[SIDE][SIDE])sums[g % 2], rows, bits, bytes, acc);
    x = next;
  }
  UNROLL16 for (int m = 0; m < rows; m++) f16x_store(to[m], acc[m]);
}

INLINE void amx_panel(const linear_args *a, const rounded_rows *x, int64_t begin, int64_t end, span_of_rows of,
                      int bits, int bytes, unpacked *scratch) {
  const int64_t groups = a->inputs / GROUP, first = begin * SIDE;
  const int64_t count = end * SIDE < a->outputs ? (end - begin) * SIDE : a->outputs - first;
  const uint8_t *p = (const uint8_t *)a->weight + begin * groups * (bits == 4 ? BYTES4 : BYTES8);
  unpack_groups(p, (end - begin) * groups, bits, scratch);
  for (int64_t row = of.first; row < of.last; row += SIDE) {
    const rounded_rows *own = rows_at(x, row / SIDE * groups, bytes);
    const int64_t rows = of.last - row < SIDE ? of.last - row : SIDE;
    float tile[SIDE][WIDTH];
    for (int64_t b = 0; b < end - begin; b++) {
      float(*to)[WIDTH] = (float(*)[WIDTH])(tile[0] + b * SIDE);
      if (rows > SIDE / 2) amx_tile(own, scratch + b * groups, groups, SIDE, bits, bytes, to);
      else amx_tile(own, scratch + b * groups, groups, SIDE / 2, bits, bytes, to);
    }
    linear_finish(a, tile[0], WIDTH, row, rows, first, count);
  }
}

void amx_blocks(const linear_args *a, const void *rows, int64_t begin, int64_t end, span_of_rows of, void *scratch) {
  const int64_t together = of.last - of.first > SIDE ? TOGETHER : 1;
  for (int64_t b = begin, next; b < end; b = next) {
    next = b + together < end ? b + together : end;
    switch (a->kind) {
      case INT4: amx_panel(a, rows, b, next, of, 4, 2, scratch); break;
      case INT8: amx_panel(a, rows, b, next, of, 8, 2, scratch); break;
      case INT4_BY_BYTES: amx_panel(a, rows, b, next, of, 4, 1, scratch); break;
      default: amx_panel(a, rows, b, next, of, 8, 1, scratch); break;
    }
  }
}
#pragma GCC pop_options
#else
int amx_applies(const linear_args *a) {
  (void)a;
  return 0;
}

size_t amx_rows_bytes(const linear_args *a) {
  (void)a;
  return 0;
}

void amx_lay_row(const linear_args *a, const rounded *x, int64_t row, void *rows) {
  (void)a, (void)x, (void)row, (void)rows;
}

void amx_blocks(const linear_args *a, const void *rows, int64_t begin, int64_t end, span_of_rows of, void *scratch) {
  (void)a, (void)rows, (void)begin, (void)end, (void)of, (void)scratch;
}
#endif
