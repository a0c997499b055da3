/* Packed blocks back to rows of floats: all of a matrix for torch's product, or some rows of an embedding. */
#include "squeezed.h"

enum { BLOCK = 16, GROUP = 32, BYTES4 = 320, BYTES8 = 544 };

typedef struct {
  const uint8_t *packed;
  const int64_t *ids; /* the outputs wanted, or null: `first` on, in order */
  void *out;          /* [count, inputs] of `kind` */
  int64_t first, count, outputs, inputs, bits, kind, threads; /* bits: 4, 8, or 12 of a bfloat16 */
} dequantize_args;

/* 32 numbers of one output -> floats of `kind`. */
INLINE void scale_group(const uint8_t *numbers, float scale, float minimum, int bits, int kind, void *out) {
  const float zero = bits == 4 ? 0.0f : 128.0f;
  float values[GROUP];
  for (int i = 0; i < GROUP; i++) values[i] = scale * ((float)numbers[i] - zero) + minimum;
  if (kind == F32) {
    memcpy(out, values, sizeof values);
  } else {
    uint16_t half[GROUP];
    for (int i = 0; i < GROUP; i++) half[i] = float_to_bf16(values[i]);
    memcpy(out, half, sizeof half);
  }
}

/* One output, of an embedding say. */
static void expand_row(const dequantize_args *a, int64_t output, char *out) {
  if (a->bits == 12) {
    unsqueeze(a->packed, a->outputs, a->inputs, output, 1, (int)a->kind, out);
    return;
  }
  const int64_t groups = a->inputs / GROUP, n = output % BLOCK, size = a->kind == F32 ? 4 : 2;
  const int bits = (int)a->bits;
  const uint8_t *p = a->packed + output / BLOCK * groups * (bits == 4 ? BYTES4 : BYTES8);
  for (int64_t g = 0; g < groups; g++, p += bits == 4 ? BYTES4 : BYTES8) {
    uint8_t numbers[GROUP];
    for (int i = 0; i < GROUP; i++)
      numbers[i] = bits == 4 ? p[i / 8 * 64 + 4 * n + i % 4] >> (i & 4) & 15 : p[i / 4 * 64 + 4 * n + i % 4];
    const uint8_t *scales = p + (bits == 4 ? 256 : 512) + 2 * n;
    uint16_t half[2] = {0, 0};
    memcpy(half, scales, 2);
    if (bits == 4) memcpy(half + 1, scales + 32, 2);
    scale_group(numbers, f16_to_float_bits(half[0]), f16_to_float_bits(half[1]), bits, (int)a->kind,
                out + g * GROUP * size);
  }
}

/* The outputs first..last of one block, into rows of `out`. `bits` and `kind` are constants where this is called. */
INLINE void expand_block(const dequantize_args *a, const uint8_t *p, int first, int last, char *out, int bits, int kind) {
  const int64_t groups = a->inputs / GROUP, size = kind == F32 ? 4 : 2;
  for (int64_t g = 0; g < groups; g++, p += bits == 4 ? BYTES4 : BYTES8) {
    const group unpacked = bits == 4 ? unpack4(p) : unpack8(p);
    uint32_t words[GROUP / 4][BLOCK], numbers[BLOCK][GROUP / 4]; /* a word: four inputs of an output */
    memcpy(words, &unpacked, sizeof words);
    for (int j = 0; j < GROUP / 4; j++)
      for (int n = 0; n < BLOCK; n++) numbers[n][j] = words[j][n];
    float scale[BLOCK], minimum[BLOCK] = {0};
    lanes_store(scale, lanes_load_f16(p + (bits == 4 ? 256 : 512)));
    if (bits == 4) lanes_store(minimum, lanes_load_f16(p + 288));
    for (int n = first; n < last; n++)
      scale_group((const uint8_t *)numbers[n], scale[n], minimum[n], bits, kind,
                  out + ((n - first) * a->inputs + g * GROUP) * size);
  }
}

static void expand_block_of(const dequantize_args *a, const uint8_t *p, int first, int last, char *out) {
  if (a->bits == 4 && a->kind == F32) expand_block(a, p, first, last, out, 4, F32);
  else if (a->bits == 4) expand_block(a, p, first, last, out, 4, BF16);
  else if (a->kind == F32) expand_block(a, p, first, last, out, 8, F32);
  else expand_block(a, p, first, last, out, 8, BF16);
}

void lmstate_dequantize(const dequantize_args *a) {
  const int64_t bytes = a->inputs / GROUP * (a->bits == 4 ? BYTES4 : BYTES8), size = a->kind == F32 ? 4 : 2;
  const int64_t end = a->first + a->count, beside = a->bits == 12 ? BESIDE : BLOCK, first_block = a->first / beside;
  const int64_t tasks = a->ids ? a->count : (end + beside - 1) / beside - first_block;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t i = 0; i < tasks; i++) {
    if (a->ids) {
      expand_row(a, a->ids[i], (char *)a->out + i * a->inputs * size);
      continue;
    }
    const int64_t block = first_block + i, from = block * beside;
    const int first = a->first > from ? (int)(a->first - from) : 0;
    const int last = end < from + beside ? (int)(end - from) : (int)beside;
    char *out = (char *)a->out + (from + first - a->first) * a->inputs * size;
    if (a->bits == 12) unsqueeze(a->packed, a->outputs, a->inputs, from + first, last - first, (int)a->kind, out);
    else expand_block_of(a, a->packed + block * bytes, first, last, out);
  }
}
