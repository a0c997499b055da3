/* The end of a product: bias, factors, scale and residual of the sums of a tile. */
#include "dense/linear_tile.h"

void linear_finish(const linear_args *a, const float *tile, int64_t width, int64_t row, int64_t rows, int64_t first,
                   int64_t count) {
  const int64_t before = a->rest_begin - first; /* those of y */
  if (a->rest && before > 0 && before < count) {
    linear_finish(a, tile, width, row, rows, first, before);
    linear_finish(a, tile + before, width, row, rows, a->rest_begin, count - before);
    return;
  }
  const int elsewhere = a->rest && before <= 0;
  const int64_t y_row = elsewhere ? a->rest_row : a->y_row ? a->y_row : a->outputs;
  const float *residual = a->after ? NULL : a->residual;
  const double scale = a->after ? 0 : a->scale;
  for (int64_t m = row; m < row + rows; m++, tile += width) {
    const int64_t at = m * a->outputs + first;
    float *y = (elsewhere ? a->rest - before : a->y + first) + m * y_row;
    int64_t n = 0;
    for (; n + VL <= count; n += VL) {
      vf v = vf_load(tile + n);
      if (a->bias) v = vf_add(v, vf_load(a->bias + first + n));
      if (a->factors) v = vf_mul(v, vf_load(a->factors + first + n));
      if (scale != 0) v = vf_mul(v, vf_set1((float)scale));
      if (residual) v = vf_add(v, vf_load(residual + at + n));
      vf_store(y + n, v);
    }
    for (; n < count; n++) {
      float v = tile[n];
      if (a->bias) v += a->bias[first + n];
      if (a->factors) v *= a->factors[first + n];
      if (scale != 0) v *= (float)scale;
      if (residual) v += residual[at + n];
      y[n] = v;
    }
  }
}
