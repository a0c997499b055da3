/* Rotary position embedding of queries and keys. */
#include <string.h>

#include "attention/attend_args.h"
#include "layout.h"

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

EXPORT_SIZE(rope_args);
