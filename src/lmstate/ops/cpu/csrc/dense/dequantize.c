/* Packed blocks back to rows of floats: all of a matrix for torch's product, or some rows of an embedding. */
#include "dense/dequantize.h"
#include "dense/linear_args.h"
#include "dense/bfloat12.h"
#include "layout.h"

typedef struct {
  const uint8_t *packed;
  const int64_t *ids; /* the outputs wanted, or null: `first` on, in order */
  void *out;          /* [count, inputs] of `kind` */
  int64_t first, count, outputs, inputs, stored, kind, threads; /* stored: the kind of the weight */
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
static void expand_row(const uint8_t *p, int bits, int64_t inputs, int n, int kind, char *out) {
  const int64_t size = size_of(kind);
  for (int64_t g = 0; g < inputs / GROUP; g++, p += bits == 4 ? BYTES4 : BYTES8) {
    uint8_t numbers[GROUP];
    for (int i = 0; i < GROUP; i++)
      numbers[i] = bits == 4 ? p[i / 8 * 64 + 4 * n + i % 4] >> (i & 4) & 15 : p[i / 4 * 64 + 4 * n + i % 4];
    const uint8_t *scales = p + (bits == 4 ? 256 : 512) + 2 * n;
    uint16_t half[2] = {0, 0};
    memcpy(half, scales, 2);
    if (bits == 4) memcpy(half + 1, scales + 32, 2);
    scale_group(numbers, f16_to_float_bits(half[0]), f16_to_float_bits(half[1]), bits, kind, out + g * GROUP * size);
  }
}

/* The outputs first..last of one block, into rows of `out`. `bits` and `kind` are constants where this is called. */
INLINE void expand_some(const uint8_t *p, int bits, int64_t inputs, int first, int last, int kind, char *out) {
  const int64_t size = size_of(kind);
  for (int64_t g = 0; g < inputs / GROUP; g++, p += bits == 4 ? BYTES4 : BYTES8) {
    uint32_t words[GROUP / 4][BLOCK], numbers[BLOCK][GROUP / 4]; /* a word: four inputs of an output */
    if (bits == 8) memcpy(words, p, sizeof words);
    else
      for (int j = 0; j < GROUP / 8; j++)
        for (int n = 0; n < BLOCK; n++) {
          uint32_t both;
          memcpy(&both, p + 64 * j + 4 * n, 4);
          words[2 * j][n] = both & 0x0f0f0f0f;
          words[2 * j + 1][n] = both >> 4 & 0x0f0f0f0f;
        }
    for (int j = 0; j < GROUP / 4; j++)
      for (int n = 0; n < BLOCK; n++) numbers[n][j] = words[j][n];
    float scale[BLOCK], minimum[BLOCK] = {0};
    f16x_store(scale, f16x_load_f16(p + (bits == 4 ? 256 : 512)));
    if (bits == 4) f16x_store(minimum, f16x_load_f16(p + 288));
    for (int n = first; n < last; n++)
      scale_group((const uint8_t *)numbers[n], scale[n], minimum[n], bits, kind,
                  out + ((n - first) * inputs + g * GROUP) * size);
  }
}

static void expand_block(const uint8_t *p, int stored, int64_t inputs, int first, int last, int kind, char *out) {
  if (last - first == 1) expand_row(p, stored == INT4 ? 4 : 8, inputs, first, kind, out);
  else if (stored == INT4 && kind == F32) expand_some(p, 4, inputs, first, last, F32, out);
  else if (stored == INT4) expand_some(p, 4, inputs, first, last, BF16, out);
  else if (kind == F32) expand_some(p, 8, inputs, first, last, F32, out);
  else expand_some(p, 8, inputs, first, last, BF16, out);
}

static void expand_floats(const uint16_t *row, int stored, int64_t inputs, int kind, char *out) {
  for (int64_t i = 0; i < inputs; i++) {
    const float number = stored == BF16 ? bf16_to_float(row[i]) : f16_to_float_bits(row[i]);
    if (kind == F32) ((float *)out)[i] = number;
    else ((uint16_t *)out)[i] = float_to_bf16(number);
  }
}

void dequantize(const void *weight, int stored, int64_t outputs, int64_t inputs, int64_t first, int64_t count, int kind,
            void *out) {
  const int64_t beside = stored == BFLOAT12 ? BESIDE : stored == INT4 || stored == INT8 ? BLOCK : 1;
  const int64_t end = first + count;
  const int64_t bytes = inputs / GROUP * (stored == INT4 ? BYTES4 : BYTES8), row = inputs * size_of(kind);
  char *to = out;
  for (int64_t block = first / beside; block * beside < end; block++) {
    const int64_t from = block * beside > first ? block * beside : first;
    const int64_t until = (block + 1) * beside < end ? (block + 1) * beside : end;
    const uint8_t *p = (const uint8_t *)weight + block * bytes;
    if (stored == BFLOAT12) unpack_bfloat12(weight, outputs, inputs, from, until - from, kind, to);
    else if (beside == 1) expand_floats((const uint16_t *)weight + block * inputs, stored, inputs, kind, to);
    else expand_block(p, stored, inputs, (int)(from % BLOCK), (int)(until - block * BLOCK), kind, to);
    to += (until - from) * row;
  }
}

void lmstate_dequantize(const dequantize_args *a) {
  const int64_t row = a->inputs * size_of((int)a->kind), first = a->first / BLOCK * BLOCK, end = a->first + a->count;
  const int64_t tasks = a->ids ? a->count : (end - first + BLOCK - 1) / BLOCK;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t i = 0; i < tasks; i++) {
    const int64_t from = a->ids ? a->ids[i] : i ? first + i * BLOCK : a->first;
    const int64_t until = a->ids ? from + 1 : first + (i + 1) * BLOCK < end ? first + (i + 1) * BLOCK : end;
    char *out = (char *)a->out + (a->ids ? i : from - a->first) * row;
    dequantize(a->packed, (int)a->stored, a->outputs, a->inputs, from, until - from, (int)a->kind, out);
  }
}

EXPORT_SIZE(dequantize_args);
