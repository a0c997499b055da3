/* bfloat16 weights [outputs, inputs] in 12 bits each, exactly; see lmstate.ops.weights.bfloat12 for the packing. */
#ifndef LMSTATE_BFLOAT12_H
#define LMSTATE_BFLOAT12_H
#include "simd/simd.h"

/* Four outputs are stored together, two and two: of 64 inputs at a time the codes of both, and then their low bytes.
 * In the order in which they are read: a processor that sees a stream of lines asks for the next by itself. */
enum { SPAN = 64, BESIDE = 4, CODES = SPAN / 2, PAIR = 2 * (CODES + SPAN), SPAN_BYTES = BESIDE / 2 * PAIR, TABLE = 16 };

typedef struct {
  int32_t output, column;
  float value;
} rare;

typedef struct {
  uint8_t *spans;       /* [blocks, inputs / SPAN, SPAN_BYTES] */
  uint8_t *table;       /* [TABLE] */
  int32_t *first;       /* [outputs + 1]: where the rare ones of an output begin */
  rare *rares;
} bfloat12;

INLINE bfloat12 bfloat12_at(const void *packed, int64_t outputs, int64_t inputs) {
  uint8_t *p = (uint8_t *)packed;
  bfloat12 w = {.spans = p};
  w.table = p + (outputs + BESIDE - 1) / BESIDE * (inputs / SPAN) * SPAN_BYTES;
  w.first = (int32_t *)(w.table + TABLE);
  w.rares = (rare *)(w.first + outputs + 1);
  return w;
}

/* In a span: the codes of its output n, and its low bytes. */
INLINE int64_t codes_at(int64_t n) { return n / 2 * PAIR + n % 2 * CODES; }
INLINE int64_t lows_at(int64_t n) { return n / 2 * PAIR + 2 * CODES + n % 2 * SPAN; }

/* The span of an output that begins with `input`. */
INLINE uint8_t *span_of(const bfloat12 *w, int64_t output, int64_t inputs, int64_t input) {
  return w->spans + (output / BESIDE * (inputs / SPAN) + input / SPAN) * SPAN_BYTES;
}

/* `count` outputs that are stored together, as floats of `kind`, F32 or BF16. */
void unpack_bfloat12(const void *packed, int64_t outputs, int64_t inputs, int64_t first, int64_t count, int kind,
                     void *out);

/* How far ahead to ask for bytes of weights, into the second cache: measured with eight rows, half as fast again as
 * without. */
enum { AHEAD = 16384 };

#endif
