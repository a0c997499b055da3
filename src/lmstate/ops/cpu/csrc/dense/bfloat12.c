/* bfloat16 weights into 12 bits each, and out of them again. */
#include "dense/bfloat12.h"
#include "layout.h"

typedef struct {
  const uint16_t *matrix; /* [outputs, inputs] */
  void *packed;
  int64_t outputs, inputs, threads;
} to_bfloat12_args;

typedef struct {
  const uint16_t *matrix;
  int64_t *seen; /* [256] zeros: how often each high byte is there */
  int64_t count, threads;
} count_args;

void lmstate_count_high_bytes(const count_args *a) {
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    int64_t seen[2][256] = {{0}}; /* two, for equal neighbors would wait for each other */
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->count / 2; i++) {
      seen[0][a->matrix[2 * i] >> 8]++;
      seen[1][a->matrix[2 * i + 1] >> 8]++;
    }
#pragma omp critical
    for (int h = 0; h < 256; h++) a->seen[h] += seen[0][h] + seen[1][h];
  }
  if (a->count % 2) a->seen[a->matrix[a->count - 1] >> 8]++;
}

/* The spans of one output; returns how many of its numbers are rare. */
static int32_t to_bfloat12_row(const bfloat12 *w, const uint8_t *code, const uint16_t *row, int64_t output,
    int64_t inputs) {
  int32_t rares = 0;
  for (int64_t i = 0; i < inputs; i += SPAN) {
    uint8_t *span = span_of(w, output, inputs, i), each[SPAN];
    uint8_t *codes = span + codes_at(output % BESIDE), *lows = span + lows_at(output % BESIDE);
    for (int j = 0; j < SPAN; j++) {
      const uint16_t number = row[i + j];
      const int high = number >> 8, at = place_of(j), known = code[high] < TABLE;
      each[at] = known ? code[high] : 0;
      lows[at] = known ? (uint8_t)number : 0;
      rares += !known;
    }
    for (int j = 0; j < SPAN / 2; j++) codes[j] = (uint8_t)(each[j] | each[j + SPAN / 2] << 4);
  }
  return rares;
}

/* The table is in its place, and there is room for all rare numbers. */
void lmstate_to_bfloat12(const to_bfloat12_args *a) {
  const int64_t inputs = a->inputs;
  const bfloat12 w = bfloat12_at(a->packed, a->outputs, inputs);
  uint8_t code[256];
  memset(code, TABLE, sizeof code);
  for (int c = TABLE - 1; c >= 0; c--) code[w.table[c]] = (uint8_t)c;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t n = 0; n < a->outputs; n++)
      w.first[n + 1] = to_bfloat12_row(&w, code, a->matrix + n * inputs, n, inputs);
#pragma omp single
    for (int64_t n = w.first[0] = 0; n < a->outputs; n++) w.first[n + 1] += w.first[n];
#pragma omp for schedule(static)
    for (int64_t n = 0; n < a->outputs; n++) {
      rare *to = w.rares + w.first[n];
      for (int64_t i = 0; to < w.rares + w.first[n + 1]; i++) {
        const uint16_t number = a->matrix[n * inputs + i];
        if (code[number >> 8] == TABLE) *to++ = (rare){(int32_t)n, (int32_t)i, bf16_to_float(number)};
      }
    }
  }
}

void unpack_bfloat12(const void *packed, int64_t outputs, int64_t inputs, int64_t first, int64_t count, int kind,
                     void *out) {
  const bfloat12 w = bfloat12_at(packed, outputs, inputs);
  const int64_t size = size_of(kind);
  for (int64_t i = 0; i < inputs; i += SPAN) {
    const uint8_t *span = span_of(&w, first, inputs, i);
    for (int l = 0; l < SPAN_BYTES; l += 64) __builtin_prefetch(span + AHEAD + l, 0, 1);
    for (int64_t n = 0; n < count; n++) {
      const int64_t beside = (first + n) % BESIDE;
      vf numbers[SPAN / VL];
      float values[SPAN];
      vf_load_bfloat12(span + lows_at(beside), span + codes_at(beside), w.table, numbers);
      for (int j = 0; j < SPAN / VL; j++) vf_store(values + j * VL, numbers[j]);
      void *to = (char *)out + (n * inputs + i) * size;
      if (kind == F32) memcpy(to, values, sizeof values);
      else
        for (int j = 0; j < SPAN; j++) ((uint16_t *)to)[j] = (uint16_t)(to_bits(values[j]) >> 16);
    }
  }
  for (int64_t n = 0; n < count; n++)
    for (int32_t r = w.first[first + n]; r < w.first[first + n + 1]; r++) {
      const rare *number = w.rares + r;
      const int64_t at = n * inputs + number->column;
      if (kind == F32) ((float *)out)[at] = number->value;
      else ((uint16_t *)out)[at] = (uint16_t)(to_bits(number->value) >> 16);
    }
}

EXPORT_SIZE(to_bfloat12_args);
EXPORT_SIZE(count_args);
