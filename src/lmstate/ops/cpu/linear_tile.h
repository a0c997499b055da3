/* What the products of all kinds of weights share: where the sums of some outputs of a row go. */
#ifndef LMSTATE_LINEAR_TILE_H
#define LMSTATE_LINEAR_TILE_H
#include "linear.h"
#include "lanes.h"

/* y[row, first..] = residual + scale * factors * (sums + bias); a norm of whole rows leaves the first two for later. */
INLINE void finish(const linear_args *a, float *tile, int64_t row, int64_t first, int64_t count) {
  float *y = a->y + row * a->outputs + first;
  for (int64_t n = 0; n < count; n++) {
    float v = tile[n];
    if (a->bias) v += a->bias[first + n];
    if (a->factors) v *= a->factors[first + n];
    if (!a->after) {
      if (a->scale != 0) v *= (float)a->scale;
      if (a->residual) v += a->residual[row * a->outputs + first + n];
    }
    y[n] = v;
  }
}

/* Rows first..last of a product, which a thread multiplies with four outputs before it goes on to others. */
typedef struct {
  int64_t first, last;
} span_of_rows;

/* Products of pairs of bfloat16, of bfloat16 weights on processors that have them: see linear_pairs.c. */
int pairs_apply(const linear_args *a);
/* A row of floats, rounded as those products take it: [inputs] bfloat16. */
void pairs_round(const linear_args *a, const float *x, uint16_t *to);
/* Outputs first..first + 4; `scratch`: 4 * inputs bfloat16 numbers of the thread. */
void pairs_block(const linear_args *a, const uint16_t *x, int64_t first, span_of_rows rows, uint16_t *scratch);

#endif
