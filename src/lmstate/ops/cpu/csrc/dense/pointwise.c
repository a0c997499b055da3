/* What happens to activations between the products: norm, gate, and the largest logit. */
#include "dense/prologue.h"
#include "layout.h"

typedef struct {
  const void *x; /* [rows, width], or [rows, 2 width] before a gate, of `x_kind` */
  const float *weight;
  void *y; /* [rows, width] of `y_kind` */
  int64_t rows, width, gate, x_kind, y_kind, threads;
  double eps;
} rows_args;

/* A row of floats of a kind, in place where it is one of float32, else through `scratch`. */
static const float *row_in(const void *x, int64_t at, int64_t n, int64_t kind, float *scratch) {
  if (kind == F32) return (const float *)x + at;
  for (int64_t i = 0; i < n; i++) scratch[i] = bf16_to_float(((const uint16_t *)x)[at + i]);
  return scratch;
}

enum { PIECE = 512 }; /* numbers that a gate takes at a time */

/* x is float32. */
void lmstate_rms_norm(const rows_args *a) {
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t m = 0; m < a->rows; m++) {
    const float *x = (const float *)a->x + m * a->width;
    if (a->y_kind == F32) rms_norm_row(x, a->weight, (float *)a->y + m * a->width, a->width, a->eps);
    else {
      uint16_t *y = (uint16_t *)a->y + m * a->width;
      const float scale = rms_scale(x, a->width, a->eps);
      for (int64_t i = 0; i < a->width; i++) y[i] = float_to_bf16(x[i] * scale * a->weight[i]);
    }
  }
}

void lmstate_glu(const rows_args *a) {
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t m = 0; m < a->rows; m++)
    for (int64_t i = 0; i < a->width; i += PIECE) {
      float gates[PIECE], ups[PIECE], made[PIECE];
      const int64_t n = a->width - i < PIECE ? a->width - i : PIECE, at = 2 * m * a->width + i;
      const float *gate = row_in(a->x, at, n, a->x_kind, gates), *up = row_in(a->x, at + a->width, n, a->x_kind, ups);
      if (a->y_kind == F32) {
        gate_run((int)a->gate, gate, up, (float *)a->y + m * a->width + i, n);
      } else {
        gate_run((int)a->gate, gate, up, made, n);
        uint16_t *y = (uint16_t *)a->y + m * a->width + i;
        for (int64_t j = 0; j < n; j++) y[j] = float_to_bf16(made[j]);
      }
    }
}

typedef struct {
  const float *x; /* [rows, width] */
  float *largest; /* [rows] */
  int64_t *where; /* [rows] */
  int64_t rows, width, threads;
} argmax_args;

static void best_of_row(const float *x, int64_t width, float *largest, int64_t *where) {
  float best = -INFINITY;
  int64_t piece = 0;
  for (int64_t first = 0; first < width; first += PIECE) {
    const int64_t n = width - first < PIECE ? width - first : PIECE;
    vf most = vf_set1(-INFINITY);
    int64_t i = first;
    for (; i + VL <= first + n; i += VL) most = vf_max(most, vf_load(x + i));
    float m = vf_largest(most);
    for (; i < first + n; i++) m = fmaxf(m, x[i]);
    int strange = 0;
    for (i = first; i < first + n; i++) strange |= x[i] != x[i];
    if (strange) { /* no number is larger than what is none */
      for (i = first; x[i] == x[i]; i++) {}
      *largest = x[i], *where = i;
      return;
    }
    if (m > best) best = m, piece = first;
  }
  while (x[piece] != best) piece++;
  *largest = best, *where = piece;
}

void lmstate_argmax(const argmax_args *a) {
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t m = 0; m < a->rows; m++) best_of_row(a->x + m * a->width, a->width, a->largest + m, a->where + m);
}

EXPORT_SIZE(rows_args);
EXPORT_SIZE(argmax_args);
