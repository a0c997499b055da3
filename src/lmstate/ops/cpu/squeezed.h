/* bfloat16 weights [outputs, inputs] in 12 bits each, exactly; see lmstate.ops.squeezed for the packing. */
#ifndef LMSTATE_SQUEEZED_H
#define LMSTATE_SQUEEZED_H
#include "lanes.h"

/* Four outputs lie together: of 64 inputs at a time their low bytes, and then their codes. */
enum { SPAN = 64, BESIDE = 4, CODES_AT = BESIDE * SPAN, SPAN_BYTES = CODES_AT + BESIDE * SPAN / 2, TABLE = 16 };

typedef struct {
  int32_t column;
  float value;
} rare;

typedef struct {
  uint8_t *spans;       /* [blocks, inputs / SPAN, SPAN_BYTES] */
  uint8_t *table;       /* [TABLE] */
  int32_t *first;       /* [outputs + 1]: where the rare ones of an output begin */
  rare *rares;
} squeezed;

INLINE squeezed squeezed_at(const void *packed, int64_t outputs, int64_t inputs) {
  uint8_t *p = (uint8_t *)packed;
  squeezed w = {.spans = p};
  w.table = p + (outputs + BESIDE - 1) / BESIDE * (inputs / SPAN) * SPAN_BYTES;
  w.first = (int32_t *)(w.table + TABLE);
  w.rares = (rare *)(w.first + outputs + 1);
  return w;
}

/* The span of one output that begins with `input`: its low bytes, its codes. */
INLINE uint8_t *lows_of(const squeezed *w, int64_t output, int64_t inputs, int64_t input) {
  return w->spans + (output / BESIDE * (inputs / SPAN) + input / SPAN) * SPAN_BYTES + output % BESIDE * SPAN;
}
INLINE uint8_t *codes_of(const squeezed *w, int64_t output, int64_t inputs, int64_t input) {
  return w->spans + (output / BESIDE * (inputs / SPAN) + input / SPAN) * SPAN_BYTES + CODES_AT + output % BESIDE * (SPAN / 2);
}

/* One output as floats of `kind`, F32 or BF16. */
void unsqueeze_row(const void *packed, int64_t outputs, int64_t inputs, int64_t output, int kind, void *out);

#endif
