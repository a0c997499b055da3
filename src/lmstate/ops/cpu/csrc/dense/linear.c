/* y = residual + scale * norm(prologue(x) w^T + bias), for one row and for thousands.
 *
 * A thread takes whole outputs, reads their weights once and multiplies them with every row, a tile of rows at a time.
 * An output of a row is rounded and summed along the inputs in one way, whatever the tile, the rows beside it and the
 * threads. */
#include "dense/linear_args.h"

#include <omp.h>
#include <stdlib.h>

#include "dense/dequantize.h"
#include "dense/linear_tile.h"
#include "dense/prologue.h"
#include "dense/bfloat12.h"
#include "layout.h"
#include "simd/amx.h"
#include "team.h"

/* Tiles of up to TALL rows are stored together, group after group, so that a product walks through them in order. */
enum { TALL = 8 };

/* The first group of a row, and from there to its next one. */
static int64_t tile_rows(const linear_args *a, int64_t row) {
  const int64_t left = a->rows - row / TALL * TALL;
  return left < TALL ? left : TALL;
}
static int64_t first_group(const linear_args *a, int64_t row) {
  return row / TALL * TALL * (a->inputs / GROUP) + row % TALL;
}

static int grouped(const linear_args *a) { return is_grouped(a->kind); }

/* A row in groups, each `rows` behind the one before it. */
INLINE void round_row(const float *x, rounded *to, int64_t rows, int64_t groups, int bytes) {
  for (int64_t g = 0; g < groups; g++, to = (rounded *)rounded_at(to, rows, bytes), x += GROUP) {
    vf largest = vf_zero(), total = vf_zero();
    for (int i = 0; i < GROUP; i += VL) {
      const vf v = vf_load(x + i);
      largest = vf_max(largest, vf_abs(v));
      total = vf_add(total, v);
    }
    const float m = vf_largest(largest);
    const vf inverse = vf_set1(m > 0 ? 127.0f / m : 0.0f);
    vf sum = vf_zero(); /* of integers below 2^24: exact */
    for (int i = 0; i < GROUP; i += VL) {
      const vf v = vf_mul(vf_load(x + i), inverse);
      const vf high = vf_round_to_int8(to->q[0] + i, v);
      if (bytes == 1) {
        sum = vf_add(high, sum);
        continue;
      }
      const vf low = vf_round_to_int8(to->q[1] + i, vf_mul(vf_sub(v, high), vf_set1(256)));
      sum = vf_add(vf_fma(high, vf_set1(256), low), sum);
    }
    if (bytes == 2) join_parts(to);
    to->sum = (int32_t)vf_sum(sum);
    /* a NaN or an infinity must not vanish in the rounding */
    to->scale = m * (bytes == 1 ? 1.0f / 127 : 1.0f / (127 * 256)) + 0.0f * vf_sum(total);
    to->scaled_sum = to->scale * (float)to->sum;
  }
}

static void round_to_bytes(const linear_args *a, const float *x, rounded *to, int64_t rows) {
  if (activation_bytes(a->kind) == 1) round_row(x, to, rows, a->inputs / GROUP, 1);
  else round_row(x, to, rows, a->inputs / GROUP, 2);
}

/* The row that the product multiplies: x itself, or what the norm or the gate makes of it in `scratch`. */
static const float *prologue(const linear_args *a, int64_t row, float *scratch) {
  const int64_t n = a->inputs;
  if (a->gate != NO_GATE) gate_run((int)a->gate, a->x + row * 2 * n, a->x + row * 2 * n + n, scratch, n);
  else if (a->norm) rms_norm_row(a->x + row * n, a->norm, scratch, n, a->eps);
  else return a->x + row * n;
  return scratch;
}

/* The norm of whole rows, and what `linear_finish` left for after it. */
static void finish_rows(const linear_args *a) {
#pragma omp for schedule(static) nowait
  for (int64_t m = 0; m < a->rows; m++) {
    float *y = a->y + m * a->outputs;
    rms_norm_row(y, a->after, y, a->outputs, a->after_eps);
    if (a->scale != 0)
      for (int64_t n = 0; n < a->outputs; n++) y[n] *= (float)a->scale;
    if (a->residual)
      for (int64_t n = 0; n < a->outputs; n++) y[n] += a->residual[m * a->outputs + n];
  }
  team_barrier();
}

/* One block of 16 outputs for `rows` rows from `row` on. `rows`, `bits` and `bytes` are constants where this is
 * called. */
INLINE void grouped_tile(const linear_args *a, const rounded *x, const uint8_t *p, int64_t block, int64_t row, int rows,
                         int bits, int bytes) {
  f16x acc[TALL];
  UNROLL_ROWS for (int m = 0; m < rows; m++) acc[m] = f16x_zero();
  const int64_t beside = tile_rows(a, row);
  x = rounded_at(x, first_group(a, row), bytes);
  for (int64_t g = 0; g < a->inputs / GROUP; g++, x = rounded_at(x, beside, bytes)) {
    f16x dots[TALL];
    for (int l = 0; l < (bits == 4 ? BYTES4 : BYTES8); l += 64) __builtin_prefetch(p + AHEAD + l, 0, 1);
    const group w = bits == 4 ? unpack4(p, bytes) : unpack8(p, bytes);
    const f16x scale = f16x_load_f16(p + (bits == 4 ? 256 : 512));
    /* Where registers are few, the sums of some rows wait in memory: GCC would move them and the products' about. */
    if (VL == 8 && rows > 3 && rows < TALL) UNROLL_ROWS for (int m = 0; m < rows; m++) __asm__("" : "+m"(acc[m]));
    group_dots(&w, x, rows, bits, bytes, dots);
    UNROLL_ROWS for (int m = 0; m < rows; m++)
      acc[m] = f16x_fma(dots[m], f16x_fma1(scale, rounded_at(x, m, bytes)->scale, f16x_zero()), acc[m]);
    if (bits == 4) {
      const f16x minimum = f16x_load_f16(p + 288);
      UNROLL_ROWS for (int m = 0; m < rows; m++)
        acc[m] = f16x_fma1(minimum, rounded_at(x, m, bytes)->scaled_sum, acc[m]);
    }
    p += bits == 4 ? BYTES4 : BYTES8;
  }
  const int64_t first = block * BLOCK, left = a->outputs - first;
  if (left >= BLOCK && !a->bias && !a->factors && a->scale == 0 && !a->rest && !a->after) { /* as most have it */
    const float *before = a->residual ? a->residual + row * a->outputs + first : NULL;
    float *y = a->y + row * (a->y_row ? a->y_row : a->outputs) + first;
    UNROLL_ROWS for (int m = 0; m < rows; m++, y += a->y_row ? a->y_row : a->outputs)
      f16x_store(y, before ? f16x_fma1(acc[m], 1, f16x_load(before + m * a->outputs)) : acc[m]);
    return;
  }
  float tile[TALL][BLOCK];
  UNROLL_ROWS for (int m = 0; m < rows; m++) f16x_store(tile[m], acc[m]);
  linear_finish(a, tile[0], BLOCK, row, rows, first, left < BLOCK ? left : BLOCK);
}

/* Blocks of outputs that meet a tile of rows while it is in the first cache. */
enum { BLOCKS_TOGETHER = 4 };

/* The blocks begin..end for the rows of a span. */
INLINE void grouped_panels(const linear_args *a, const rounded *x, int64_t begin, int64_t end, span_of_rows of,
                           int bits, int bytes) {
  const int64_t size = a->inputs / GROUP * (bits == 4 ? BYTES4 : BYTES8);
  const int height = VL == 8 && bytes == 1 ? TALL / 2 : TALL; /* the sums fit the registers */
  for (int64_t first = begin, last; first < end; first = last) {
    last = first + BLOCKS_TOGETHER < end ? first + BLOCKS_TOGETHER : end;
    for (int64_t row = of.first; row < of.last; row += height)
      for (int64_t b = first; b < last; b++) {
        const uint8_t *p = (const uint8_t *)a->weight + b * size;
        switch (of.last - row) {
          case 1: grouped_tile(a, x, p, b, row, 1, bits, bytes); break;
          case 2: grouped_tile(a, x, p, b, row, 2, bits, bytes); break;
          case 3: grouped_tile(a, x, p, b, row, 3, bits, bytes); break;
          case 4: grouped_tile(a, x, p, b, row, 4, bits, bytes); break;
          case 5: grouped_tile(a, x, p, b, row, height < 5 ? height : 5, bits, bytes); break;
          case 6: grouped_tile(a, x, p, b, row, height < 6 ? height : 6, bits, bytes); break;
          case 7: grouped_tile(a, x, p, b, row, height < 7 ? height : 7, bits, bytes); break;
          default: grouped_tile(a, x, p, b, row, height, bits, bytes); break;
        }
      }
  }
}

#define GROUPED_PANELS(name, bits, bytes) \
  static void name(const linear_args *a, const rounded *x, int64_t begin, int64_t end, span_of_rows of) { \
    grouped_panels(a, x, begin, end, of, bits, bytes); \
  }
GROUPED_PANELS(grouped_panels4, 4, 2)
GROUPED_PANELS(grouped_panels8, 8, 2)
GROUPED_PANELS(grouped_panels4_by_bytes, 4, 1)
GROUPED_PANELS(grouped_panels8_by_bytes, 8, 1)

/* The most threads that share a parallel region, each of which makes rows in memory of its own. */
static int64_t most_threads(const linear_args *a) { return a->threads > 1 ? a->threads : 1; }

/* Bytes of a row as it is multiplied, of those that are made first; of all rows. */
static size_t row_bytes(const linear_args *a) {
  const size_t k = (size_t)a->inputs;
  if (grouped(a)) return k / GROUP * (size_t)rounded_size(activation_bytes(a->kind));
  return k * (bf16_applies(a) ? sizeof(uint16_t) : sizeof(float));
}
static size_t rows_bytes(const linear_args *a) {
  const size_t bytes = (size_t)a->rows * row_bytes(a) + (bf16_in_tiles(a) ? BF16_BEHIND : 0);
  return amx_applies(a) ? amx_rows_bytes(a) : (bytes + 63) / 64 * 64;
}

/* Whether the rows that it multiplies are made first, and by blocks of how many outputs it goes. */
static int prepares(const linear_args *a) { return grouped(a) || bf16_applies(a) || a->gate != NO_GATE || a->norm; }
static int64_t block_of(const linear_args *a) { return grouped(a) || bf16_in_tiles(a) ? BLOCK : OUTPUTS; }
static int64_t first_block(const linear_args *a) { return a->begin / block_of(a); }
static int64_t blocks_of(const linear_args *a) {
  const int64_t end = a->end ? a->end : a->glu ? a->outputs / 2 : a->outputs;
  return (end + block_of(a) - 1) / block_of(a) - first_block(a);
}

int linear_gates(const linear_args *a) {
  return rows_interleaved(a) > 1 && a->outputs % (2 * OUTPUTS) == 0 && !a->bias && !a->factors;
}

/* Floats that a thread has for itself: a row before it is rounded, or a panel of weights. */
static int64_t scratch_of(const linear_args *a) {
  if (bf16_in_tiles(a)) return padded_inputs(a->inputs) * LINEAR_SCRATCH + LINEAR_ROOM;
  const int64_t panel = bf16_applies(a) ? panel_of(a) / 2 : panel_of(a); /* of packed weights */
  const int64_t each = grouped(a) || a->rows <= few_rows(a) ? 1 : panel;
  return padded_inputs(a->inputs) * (amx_applies(a) ? AMX_SCRATCH : each);
}

size_t linear_memory(const linear_args *a) {
  return rows_bytes(a) + (size_t)(most_threads(a) * scratch_of(a)) * sizeof(float);
}

static void prepare(const linear_args *a, int64_t row, char *memory, float *scratch) {
  const int64_t k = a->inputs;
  if (grouped(a)) {
    const float *x = prologue(a, row, scratch);
    if (amx_applies(a)) {
      rounded *own = (rounded *)(scratch + k);
      round_to_bytes(a, x, own, 1);
      amx_lay_row(a, own, row, memory);
    } else {
      const rounded *to = rounded_at((const rounded *)memory, first_group(a, row), activation_bytes(a->kind));
      round_to_bytes(a, x, (rounded *)to, tile_rows(a, row));
    }
  } else if (bf16_applies(a)) {
    const int64_t beside = rows_interleaved(a), first = row / beside * beside;
    uint16_t *own = (uint16_t *)memory + first * k + (row - first) * 32;
    bf16_round(a, prologue(a, row, scratch), own, step_of(a, first, beside));
  } else {
    prologue(a, row, (float *)memory + row * k);
  }
}

static void prepare_rows(const linear_args *a, int64_t begin, int64_t end, char *memory, float *scratch) {
  const int64_t k = a->inputs;
  if (!bf16_in_tiles(a)) {
    for (int64_t m = begin; m < end; m++) prepare(a, m, memory, scratch);
    return;
  }
  uint16_t *const made = (uint16_t *)(scratch + k);
  for (int64_t row = begin, next; row < end; row = next) { /* as many as go into one tile */
    next = row / BLOCK * BLOCK + BLOCK < end ? row / BLOCK * BLOCK + BLOCK : end;
    for (int64_t m = row; m < next; m++) bf16_round(a, prologue(a, m, scratch), made + (m - row) * k, 32);
    bf16_lay_rows(a, made, row, next - row, (uint16_t *)memory);
  }
}

/* Rows that are multiplied with one block after another, a multiple of every tile. Those of quantized weights stay in
 * the second cache meanwhile; others may come from the third, since a tile of them reads them for more outputs. They
 * are at least enough to pay for packing weights. */
static int64_t rows_together(const linear_args *a) {
  if (bf16_in_tiles(a)) return BF16_TILES * BLOCK;
  const int64_t fit = (int64_t)((grouped(a) ? 512 << 10 : 8 << 20) / row_bytes(a)) / 48 * 48;
  const int64_t least = grouped(a) || bf16_applies(a) ? 48 : a->inputs <= 4096 ? 192 : 384;
  return fit < least ? least : fit;
}

static void multiply(const linear_args *a, int64_t begin, int64_t end, const char *memory, float *scratch) {
  const bfloat12 w = bfloat12_at(a->weight, a->outputs, a->inputs); /* where it is one */
  const void *x = prepares(a) ? (const void *)memory : a->x;
  const int bytes = amx_applies(a), pairs_in_tiles = bf16_in_tiles(a);
  const int64_t step = rows_together(a), beside = rows_interleaved(a), panel = panel_of(a) / (a->glu ? 2 : 1);
  if (bytes || pairs_in_tiles) begin_tiles(bytes ? GROUP : 2 * GROUP);
  for (int64_t row = 0; row < a->rows; row += step) {
    const span_of_rows of = {row, row + step < a->rows ? row + step : a->rows};
    if (!grouped(a) && !pairs_in_tiles) {
      const int64_t last = OUTPUTS * end < a->outputs ? OUTPUTS * end : a->outputs;
      for (int64_t n = OUTPUTS * begin; n < last; n += panel) {
        const int64_t count = last - n < panel ? last - n : panel;
        if (beside > 1 || of.last - of.first > few_rows(a)) packed_panel(a, &w, x, n, count, of, scratch);
        else stored_panel(a, &w, x, n, count, of);
      }
      continue;
    }
    if (bytes || pairs_in_tiles) {
      if (bytes) amx_blocks(a, memory, begin, end, of, scratch);
      else bf16_blocks(a, (const uint16_t *)memory, begin, end, of, scratch);
      continue;
    }
    const rounded *own = (const rounded *)memory;
    switch (a->kind) {
      case INT4: grouped_panels4(a, own, begin, end, of); break;
      case INT8: grouped_panels8(a, own, begin, end, of); break;
      case INT4_BY_BYTES: grouped_panels4_by_bytes(a, own, begin, end, of); break;
      default: grouped_panels8_by_bytes(a, own, begin, end, of); break;
    }
  }
  if (bytes || pairs_in_tiles) end_tiles();
}

/* What thread `id` takes of `total` units: as in a static loop, so that a row alone is the first thread's, which has
 * most of what it is made of. */
typedef struct {
  int64_t begin, end;
} part;
static part part_of(int64_t total, int64_t id) {
  const int64_t threads = omp_get_num_threads(), each = total / threads, more = total % threads;
  const int64_t begin = id * each + (id < more ? id : more);
  return (part){begin, begin + each + (id < more)};
}

/* Of units of which some came `before`, those of a part, at least 0 and at most `count`. */
static part within(part p, int64_t before, int64_t count) {
  const int64_t begin = p.begin - before, end = p.end - before;
  return (part){begin > 0 ? begin : 0, end < count ? end : count};
}

/* The blocks of some products, one after the other, that are in a part. */
static void multiply_part(const linear_args *each, int64_t count, part all, char *memory, float *scratch) {
  for (int64_t i = 0, before = 0; i < count; memory += rows_bytes(each + i++)) {
    const int64_t own = blocks_of(each + i), from = first_block(each + i);
    const part p = within(all, before, own);
    if (p.begin < p.end) multiply(each + i, from + p.begin, from + p.end, memory, scratch);
    before += own;
  }
}

/* Of many rows a thread leaves the last eighth of its part, in pieces of a panel, to whoever is first: one that was
 * interrupted would keep all others waiting. */
enum { SHARED = 8, MANY = 96 };
static void multiply_all(const linear_args *each, int64_t count, int64_t blocks, char *memory, float *scratch) {
  const int64_t id = omp_get_thread_num(), threads = omp_get_num_threads(), piece = PANEL / block_of(each);
  const part own = part_of(blocks, id);
  if (threads == 1 || each->rows < MANY) {
    multiply_part(each, count, own, memory, scratch);
    return;
  }
  const int64_t pieces = blocks / threads / SHARED / piece; /* of each thread */
  multiply_part(each, count, (part){own.begin, own.end - pieces * piece}, memory, scratch);
  for (int64_t taken; (taken = team_take()) < threads * pieces;) {
    const int64_t end = part_of(blocks, taken % threads).end - taken / threads * piece;
    multiply_part(each, count, (part){end - piece, end}, memory, scratch);
  }
}

void linear_run_all(const linear_args *each, int64_t count, void *memory) {
  int64_t rows = 0, blocks = 0, before = 0;
  for (int64_t i = 0; i < count; i++) {
    if (prepares(each + i)) rows += each[i].rows;
    blocks += blocks_of(each + i);
  }
  /* The threads' own memory comes first: they need that of one product at a time. */
  int64_t own = 0;
  for (int64_t i = 0; i < count; i++) own = own > scratch_of(each + i) ? own : scratch_of(each + i);
  float *const scratch = (float *)memory + omp_get_thread_num() * own;
  char *const first = (char *)((float *)memory + most_threads(each) * own), *at = first;
  if (rows) {
    for (int64_t i = 0; i < count; at += rows_bytes(each + i++)) {
      if (!prepares(each + i)) continue;
      const part p = within(part_of(rows, omp_get_thread_num()), before, each[i].rows);
      prepare_rows(each + i, p.begin, p.end, at, scratch);
      before += each[i].rows;
    }
    team_barrier();
  }
  multiply_all(each, count, blocks, first, scratch);
  team_barrier();
  for (int64_t i = 0; i < count; i++)
    if (each[i].after) finish_rows(each + i);
}

void linear_run(const linear_args *a, void *memory) { linear_run_all(a, 1, memory); }

/* 0, or -1 where there was no memory. */
int64_t lmstate_linear(const linear_args *a) {
  if (a->rows == 0 || a->outputs == 0) return 0;
  void *memory = aligned_alloc(64, (linear_memory(a) + 63) / 64 * 64);
  if (!memory) return -1;
  team together = {0};
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    team_begin(&together);
    linear_run(a, memory);
    team_end();
  }
  free(memory);
  return 0;
}

EXPORT_SIZE(linear_args);
