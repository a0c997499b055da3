/* Products of many rows in bfloat16, on processors that multiply pairs of them: y = residual + x w^T + bias, or
 * act(gate) * up of it.
 *
 * The work is a list of tiles, some rows by 64 outputs, panel by panel; a thread takes a stretch of it. It expands a
 * panel once, as the pairs of inputs that an instruction multiplies, into memory that stays in its second cache, and
 * sums a tile along all inputs in registers. So a weight is read as it is stored, and no product but the result is
 * written. A row of y has the same bits whatever rows and threads are beside it. */
#include "dense/dequantize.h"
#include "dense/linear.h"
#include "simd/bf16_dot.h"
#include "dense/prologue.h"
#include "layout.h"

typedef struct {
  const uint16_t *x; /* [rows, inputs], bfloat16 */
  const void *weight;
  const float *bias, *residual; /* or null: [outputs]; as y */
  void *y;                      /* [rows, stride]: float32, or bfloat16 after a gate */
  uint16_t *scratch;            /* [threads, WIDE + BLOCK, inputs] */
  int64_t rows, inputs, outputs, kind;
  int64_t first, count;         /* the outputs wanted; with a gate all, of which the second half is gated */
  int64_t stride, gate, threads;
} gemm_args;

#ifdef LMSTATE_PAIRS
#include <omp.h>

/* Whether the processor multiplies bfloat16 in vectors. Where it has units for whole matrices too, torch's product uses
 * them, and is faster. */
int64_t lmstate_has_gemm(const void *nothing) {
  (void)nothing;
  return has_bf16_dot() && !__builtin_cpu_supports("amx-bf16");
}

/* Where the group of 16 outputs of a panel begins, and how many of them there are. */
static int64_t group_of(const gemm_args *a, int64_t panel, int64_t group, int64_t *first) {
  const int64_t in = a->gate ? WIDE / 2 : WIDE, at = panel * in + group * BLOCK % in;
  *first = a->gate ? group * BLOCK / in * a->count + at : a->first + at;
  return a->count - at < BLOCK ? a->count - at : BLOCK;
}

static void dequantize_panel(const gemm_args *a, int64_t panel, uint32_t *pairs, uint16_t *scratch) {
  for (int64_t group = 0; group < WIDE / BLOCK; group++) {
    int64_t first, n = group_of(a, panel, group, &first);
    const uint16_t *rows[BLOCK];
    if (n <= 0) continue;
    if (a->kind != BF16) dequantize(a->weight, (int)a->kind, a->outputs, a->inputs, first, n, BF16, scratch);
    for (int64_t i = 0; i < BLOCK; i++) { /* the last one again where there are fewer */
      const int64_t own = i < n ? i : n - 1;
      rows[i] = a->kind == BF16 ? (const uint16_t *)a->weight + (first + own) * a->inputs : scratch + own * a->inputs;
    }
    transpose_all_pairs(rows, a->inputs, pairs + group * BLOCK);
  }
}

/* A row's sums of a panel into y. */
static void leave(const gemm_args *a, float *made, int64_t row, int64_t panel) {
  const int64_t in = a->gate ? WIDE / 2 : WIDE, at = panel * in, n = a->count - at < in ? a->count - at : in;
  if (a->bias)
    for (int64_t group = 0; group < WIDE / BLOCK; group++) {
      int64_t first, some = group_of(a, panel, group, &first);
      for (int64_t i = 0; i < some; i++) made[group * BLOCK + i] += a->bias[first + i];
    }
  if (a->gate) {
    uint16_t *y = (uint16_t *)a->y + row * a->stride + at;
    gate_run((int)a->gate, made, made + WIDE / 2, made, n);
    for (int64_t i = 0; i < n; i++) y[i] = float_to_bf16(made[i]);
    return;
  }
  float *y = (float *)a->y + row * a->stride + at;
  if (a->residual) {
    const float *residual = a->residual + row * a->stride + at;
    for (int64_t i = 0; i < n; i++) y[i] = made[i] + residual[i];
  } else {
    memcpy(y, made, (size_t)n * sizeof(float));
  }
}

void lmstate_gemm(const gemm_args *a) {
  const int64_t in = a->gate ? WIDE / 2 : WIDE, panels = (a->count + in - 1) / in, tiles = (a->rows + ROWS - 1) / ROWS;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    const int64_t thread = omp_get_thread_num(), threads = omp_get_num_threads();
    const int64_t end = panels * tiles * (thread + 1) / threads;
    uint16_t *scratch = a->scratch + thread * (WIDE + BLOCK) * a->inputs;
    uint32_t *pairs = (uint32_t *)(scratch + BLOCK * a->inputs);
    int64_t expanded = -1;
    for (int64_t i = panels * tiles * thread / threads; i < end; i++) {
      const int64_t panel = i / tiles, row = i % tiles * ROWS, rows = a->rows - row < ROWS ? a->rows - row : ROWS;
      _Alignas(64) float y[ROWS][WIDE];
      if (panel != expanded) dequantize_panel(a, expanded = panel, pairs, scratch);
      sums_of(a->x + row * a->inputs, pairs, a->inputs, rows, y[0], WIDE, 0);
      for (int64_t m = 0; m < rows; m++) leave(a, y[m], row + m, panel);
    }
  }
}
#else
int64_t lmstate_has_gemm(const void *nothing) {
  (void)nothing;
  return 0;
}

void lmstate_gemm(const gemm_args *a) { (void)a; }
#endif

EXPORT_SIZE(gemm_args);
