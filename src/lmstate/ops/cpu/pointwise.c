/* What happens to activations between the products: norm, gate, rotation, and storing keys and values. */
#include "attend.h"
#include "prologue.h"

typedef struct {
  const float *x, *weight;
  float *y;
  int64_t rows, width, gate, threads;
  double eps;
} rows_args;

void lmstate_rms_norm(const rows_args *a) {
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t m = 0; m < a->rows; m++)
    rms_norm_row(a->x + m * a->width, a->weight, a->y + m * a->width, a->width, a->eps);
}

/* width: of the result; x is twice as wide. */
void lmstate_glu(const rows_args *a) {
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t m = 0; m < a->rows; m++)
    gate_row((int)a->gate, a->x + m * 2 * a->width, a->y + m * a->width, a->width);
}

void rotate_head(const float *x, const float *cos, const float *sin, float *y, int64_t dim, int64_t half,
                 int64_t interleaved) {
  if (interleaved) {
    for (int64_t i = 0; i < half; i++) {
      const float u = x[2 * i], w = x[2 * i + 1];
      y[2 * i] = u * cos[i] - w * sin[i];
      y[2 * i + 1] = w * cos[i] + u * sin[i];
    }
  } else {
    for (int64_t i = 0; i < half; i++) {
      const float u = x[i], w = x[i + half];
      y[i] = u * cos[i] - w * sin[i];
      y[i + half] = w * cos[i] + u * sin[i];
    }
  }
  if (2 * half < dim) memcpy(y + 2 * half, x + 2 * half, (size_t)(dim - 2 * half) * sizeof(float));
}

void lmstate_rope(const rope_args *a) {
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t i = 0; i < a->rows * a->tokens; i++) {
    const float *x = a->x + i / a->tokens * a->x_row + i % a->tokens * a->x_token;
    for (int64_t h = 0; h < a->heads; h++)
      rotate_head(x + h * a->x_head, a->cos + i * a->half, a->sin + i * a->half, a->y + (i * a->heads + h) * a->dim,
                  a->dim, a->half, a->interleaved);
  }
}

void store_head(const float *x, void *y, int64_t n, int64_t kind) {
  if (kind == F32) {
    memcpy(y, x, (size_t)n * sizeof(float));
  } else if (kind == BF16) {
    for (int64_t i = 0; i < n; i++) ((uint16_t *)y)[i] = float_to_bf16(x[i]);
  } else {
    for (int64_t i = 0; i < n; i++) ((uint16_t *)y)[i] = float_to_f16_bits(x[i]);
  }
}

void lmstate_append(const append_args *a) {
  const int64_t size = a->kind == F32 ? 4 : 2;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t i = 0; i < a->rows * a->kv_heads; i++) {
    const int64_t r = i / a->kv_heads, h = i % a->kv_heads;
    for (int which = 0; which < 2; which++) {
      const float *x = a->from[which] + r * a->from_row[which] + h * a->from_head[which];
      char *y = (char *)a->to[which] + (r * a->to_row[which] + h * a->to_head[which]) * size;
      for (int64_t t = 0; t < a->counts[r]; t++) {
        const int64_t slot = (a->starts[r] + t) % a->slots;
        store_head(x + t * a->from_token[which], y + slot * a->to_slot[which] * size, a->dim[which], a->kind);
      }
    }
  }
}
