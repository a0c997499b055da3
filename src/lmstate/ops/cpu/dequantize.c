/* Quantised blocks back to rows of floats: all of a matrix for torch's product, or some rows of an embedding. */
#include "lanes.h"

enum { BLOCK = 16, GROUP = 32, BYTES4 = 320, BYTES8 = 544 };

typedef struct {
  const uint8_t *packed;
  const int64_t *ids; /* the outputs wanted, or null: `first` on, in order */
  void *out;          /* [count, inputs] of `kind` */
  int64_t first, count, inputs, bits, kind, threads;
} dequantize_args;

/* Input i of the group, of the output whose bytes begin at p. */
static void expand(const uint8_t *p, int64_t bits, uint8_t *numbers) {
  if (bits == 4) {
    for (int j = 0; j < 4; j++)
      for (int b = 0; b < 4; b++) {
        numbers[8 * j + b] = p[64 * j + b] & 15;
        numbers[8 * j + 4 + b] = p[64 * j + b] >> 4;
      }
  } else {
    for (int j = 0; j < 8; j++) memcpy(numbers + 4 * j, p + 64 * j, 4);
  }
}

void lmstate_dequantize(const dequantize_args *a) {
  const int64_t groups = a->inputs / GROUP, bytes = a->bits == 4 ? BYTES4 : BYTES8;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t i = 0; i < a->count; i++) {
    const int64_t output = a->ids ? a->ids[i] : a->first + i, n = output % BLOCK;
    const uint8_t *p = a->packed + output / BLOCK * groups * bytes;
    for (int64_t g = 0; g < groups; g++, p += bytes) {
      uint8_t numbers[GROUP];
      expand(p + 4 * n, a->bits, numbers);
      uint16_t half[2] = {0, 0};
      const uint8_t *scales = p + (a->bits == 4 ? 256 : 512) + 2 * n;
      memcpy(half, scales, 2);
      const float scale = f16_to_float_bits(half[0]);
      float values[GROUP];
      if (a->bits == 4) {
        memcpy(half + 1, scales + 32, 2);
        const float minimum = f16_to_float_bits(half[1]);
        for (int b = 0; b < GROUP; b++) values[b] = scale * (float)numbers[b] + minimum;
      } else {
        for (int b = 0; b < GROUP; b++) values[b] = scale * ((float)numbers[b] - 128.0f);
      }
      const int64_t at = i * a->inputs + g * GROUP;
      if (a->kind == F32) {
        memcpy((float *)a->out + at, values, sizeof values);
      } else {
        uint16_t *out = (uint16_t *)a->out + at;
        for (int b = 0; b < GROUP; b++) out[b] = float_to_bf16(values[b]);
      }
    }
  }
}
