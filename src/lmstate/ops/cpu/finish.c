/* What torch's own product of many rows leaves: rounded numbers, which go back into the stream. */
#include "lanes.h"

typedef struct {
  const uint16_t *x;            /* [rows, count], bfloat16 */
  const float *bias, *residual; /* or null: [count]; as y */
  float *y;                     /* [rows, count] of `stride` */
  int64_t rows, count, stride, threads;
} finish_args;

void lmstate_finish(const finish_args *a) {
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t m = 0; m < a->rows; m++) {
    const uint16_t *x = a->x + m * a->count;
    const float *residual = a->residual ? a->residual + m * a->stride : 0;
    float *y = a->y + m * a->stride;
    for (int64_t n = 0; n < a->count; n++) y[n] = bf16_to_float(x[n]);
    if (a->bias)
      for (int64_t n = 0; n < a->count; n++) y[n] += a->bias[n];
    if (residual)
      for (int64_t n = 0; n < a->count; n++) y[n] += residual[n];
  }
}
