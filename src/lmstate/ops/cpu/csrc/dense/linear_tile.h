/* What the products of all kinds of weights share: where the sums of some outputs of a row go. */
#ifndef LMSTATE_LINEAR_TILE_H
#define LMSTATE_LINEAR_TILE_H
#include "dense/linear.h"
#include "simd/simd.h"

/* y[row.., first..] = residual + scale * factors * (tile + bias), for `rows` rows, of which `tile` has `width` sums
 * each; a norm of whole rows leaves residual and scale for later. A function: a copy in every tile takes long to
 * compile. */
void linear_finish(const linear_args *a, const float *tile, int64_t width, int64_t row, int64_t rows, int64_t first,
                   int64_t count);

/* Rows first..last of a product, which a thread multiplies with four outputs before it goes on to others. */
typedef struct {
  int64_t first, last;
} span_of_rows;

/* Products of pairs of bfloat16, of bfloat16 weights on processors that have them: see linear_bf16.c. */
int bf16_applies(const linear_args *a);
/* A row of floats, rounded as those products take it: [inputs] bfloat16. */
void bf16_round(const linear_args *a, const float *x, uint16_t *to);
/* Outputs first..first + 4; `scratch`: 4 * inputs bfloat16 numbers of the thread. */
void bf16_block(const linear_args *a, const uint16_t *x, int64_t first, span_of_rows rows, uint16_t *scratch);

#endif
