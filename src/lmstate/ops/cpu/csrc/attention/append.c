/* Storing new keys and values, in a ring or in blocks. */
#include <string.h>

#include "attention/attend_args.h"
#include "simd/simd.h"
#include "layout.h"

void store_head(const float *x, void *y, int64_t n, int64_t kind) {
  if (kind == F32) {
    memcpy(y, x, (size_t)n * sizeof(float));
  } else if (kind == BF16) {
    for (int64_t i = 0; i < n; i++) ((uint16_t *)y)[i] = float_to_bf16(x[i]);
  } else {
    for (int64_t i = 0; i < n; i++) ((uint16_t *)y)[i] = float_to_f16_bits(x[i]);
  }
}

/* 0, or 1 + the row whose start or count does not fit: then nothing was stored. */
int64_t lmstate_append(const append_args *a) {
  for (int64_t r = 0; r < a->rows; r++)
    if (a->starts[r] < 0 || a->counts[r] < 0 || a->counts[r] > a->tokens || a->counts[r] > a->slots ||
        (a->tables[0] && a->counts[r] && a->starts[r] + a->counts[r] > a->slots))
      return 1 + r;
  const int64_t size = a->kind == F32 ? 4 : 2;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t i = 0; i < a->rows * a->kv_heads; i++) {
    const int64_t r = i / a->kv_heads, h = i % a->kv_heads;
    for (int which = 0; which < 2; which++) {
      const float *x = a->source[which] + r * a->source_row[which] + h * a->source_head[which];
      char *const *table = a->tables[which] ? a->tables[which] + r * a->table_row : NULL;
      for (int64_t t = 0; t < a->counts[r]; t++)
        store_head(x + t * a->source_token[which],
                   position_at(a->to[which], r * a->to_row[which] * size, table, a->block, a->slots,
                            h * a->to_head[which] * size, a->to_slot[which] * size, a->starts[r] + t),
                   a->dim[which], a->kind);
    }
  }
  return 0;
}

EXPORT_SIZE(append_args);
