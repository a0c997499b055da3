/* The short depthwise causal convolution: y[t] = act(bias + sum over c of taps[c] x[t - (C - 1) + c]). */
#include "recurrent/recurrent.h"
#include "layout.h"

enum { FEATURES = 512 }; /* that a thread takes at a time: their taps and inputs stay in the first cache */

/* Input number i of a row, counted from the start of its tail. */
INLINE const float *input(const causal_conv_args *a, int64_t row, int64_t i) {
  const int64_t before = a->kernel - 1;
  if (i < before) return a->tail + row * a->tail_row + i * a->width;
  return a->x + token_at(a->begins, row, i - before, a->x_row, a->x_token);
}

static float *output(const causal_conv_args *a, int64_t row, int64_t t) {
  return a->y + token_at(a->begins, row, t, a->tokens * a->width, a->width);
}

/* Token t, features first..last, to y. `kernel` is a constant where this is called, up to 4. */
INLINE void convolve_few(const causal_conv_args *a, int64_t row, int64_t t, int64_t first, int64_t last, float *y,
                         int kernel) {
  const float *in[4];
  UNROLL for (int c = 0; c < kernel; c++) in[c] = input(a, row, t + c);
  for (int64_t f = first; f < last; f += VL, y += VL) {
    const int64_t n = last - f;
    vf sum = a->bias ? load_some(a->bias + f, n) : vf_zero();
    UNROLL for (int c = 0; c < kernel; c++)
      sum = vf_fma(load_some(in[c] + f, n), load_some(a->taps + c * a->width + f, n), sum);
    store_some(y, a->silu ? activate(SILU, sum) : sum, n);
  }
}

static void convolve_many(const causal_conv_args *a, int64_t row, int64_t t, int64_t first, int64_t last, float *y) {
  for (int64_t f = first; f < last; f += VL, y += VL) {
    const int64_t n = last - f;
    vf sum = a->bias ? load_some(a->bias + f, n) : vf_zero();
    for (int64_t c = 0; c < a->kernel; c++)
      sum = vf_fma(load_some(input(a, row, t + c) + f, n), load_some(a->taps + c * a->width + f, n), sum);
    store_some(y, a->silu ? activate(SILU, sum) : sum, n);
  }
}

void conv_token(const causal_conv_args *a, int64_t row, int64_t t, int64_t first, int64_t last, float *y) {
  switch (a->kernel) {
    case 2: convolve_few(a, row, t, first, last, y, 2); break;
    case 3: convolve_few(a, row, t, first, last, y, 3); break;
    case 4: convolve_few(a, row, t, first, last, y, 4); break;
    default: convolve_many(a, row, t, first, last, y); break;
  }
}

/* The new tail, and the one at a mark. They may overwrite the old tail, which nobody reads after this. */
static void keep_tail(const causal_conv_args *a, int64_t row, int64_t first, int64_t last) {
  const int64_t count = real_tokens(a->counts, row, a->tokens), before = a->kernel - 1;
  const size_t bytes = (size_t)(last - first) * sizeof(float);
  const int64_t mark = a->marks ? a->marks[row] : 0;
  for (int64_t i = 0; mark && i < before; i++)
    memcpy(a->marked + (row * before + i) * a->width + first, input(a, row, mark + i) + first, bytes);
  for (int64_t i = 0; i < before; i++) {
    float *to = a->next + (row * before + i) * a->width + first;
    const float *from = input(a, row, count + i) + first;
    if (to != from) memcpy(to, from, bytes);
  }
}

static void convolve(const causal_conv_args *a, int64_t row, int64_t first, int64_t last) {
  const int64_t count = real_tokens(a->counts, row, a->tokens);
  for (int64_t t = 0; t < count; t++) conv_token(a, row, t, first, last, output(a, row, t) + first);
  const int64_t placed = placed_tokens(a->begins, count, a->tokens);
  for (int64_t t = count; t < placed; t++)
    memset(output(a, row, t) + first, 0, (size_t)(last - first) * sizeof(float));
  keep_tail(a, row, first, last);
}

/* Some features of every row after the other. */
static void each_block(const causal_conv_args *a, void (*run)(const causal_conv_args *, int64_t, int64_t, int64_t)) {
  const int64_t blocks = (a->width + FEATURES - 1) / FEATURES;
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < a->rows * blocks; i++) {
    const int64_t first = i % blocks * FEATURES;
    run(a, i / blocks, first, at_most(first + FEATURES, a->width));
  }
  team_barrier();
}

void conv_tails_run(const causal_conv_args *a) { each_block(a, keep_tail); }

void conv_run(const causal_conv_args *a) { each_block(a, convolve); }

void gated_conv_run(const causal_conv_args *a, const float *projected, float *taken) {
  const int64_t width = a->width, blocks = (width + FEATURES - 1) / FEATURES;
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < a->rows * blocks; i++) {
    const int64_t row = i / blocks, first = i % blocks * FEATURES, last = at_most(first + FEATURES, width);
    const int64_t begin = token_at(a->begins, row, 0, a->tokens, 1);
    const int64_t end = begin + placed_tokens(a->begins, real_tokens(a->counts, row, a->tokens), a->tokens);
    for (int64_t t = begin; t < end; t++)
      for (int64_t f = first; f < last; f++)
        taken[t * width + f] = projected[t * 3 * width + f] * projected[(t * 3 + 2) * width + f];
    convolve(a, row, first, last);
    for (int64_t t = begin; t < end; t++)
      for (int64_t f = first; f < last; f++) a->y[t * width + f] *= projected[(t * 3 + 1) * width + f];
  }
  team_barrier();
}

void lmstate_causal_conv(const causal_conv_args *a) {
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  conv_run(a);
}

EXPORT_SIZE(causal_conv_args);
