/* The selective scan of Mamba-1: h [N] a channel, h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t, y_t = C_t^T h_t + D x_t.
 * dt_t may come before its softplus, and y_t may be multiplied by silu(gate_t).
 *
 * The states of four channels stay in registers while the tokens of a run pass them. */
#include "recurrent/recurrent.h"
#include "layout.h"

typedef struct {
  const float *x, *dt;    /* [R, T, F] by their strides, their last axis dense as in all of these */
  const float *gate;      /* [R, T, F] or null */
  const float *A;         /* [F, N], contiguous */
  const float *B, *C;     /* [R, T, N] */
  const float *D;         /* [F] or null */
  const float *carry;     /* [R, F, N] by its row stride */
  const int64_t *counts;  /* [R] */
  float *y, *next;        /* [R, T, F] and the new carry, contiguous */
  int64_t rows, tokens, channels, states, softplus, threads;
  int64_t x_row, x_token, gate_row, gate_token, dt_row, dt_token, B_row, B_token, C_row, C_token, carry_row;
} selective_scan_args;

enum { TALL = 4, WIDE = 16 / VL, CHANNELS = 64 }; /* CHANNELS: that a thread takes at a time */

/* Channels f.. and states n.. over `count` tokens from `first` on, whose dt are CHANNELS apart; `whole` as in the state
 * space of Mamba-2. */
INLINE void tile(const selective_scan_args *a, int64_t r, int64_t first, int64_t count, int64_t f, int64_t n,
                 const float *dt, const float *from, float *to, int whole) {
  const int64_t tall = a->channels - f, wide = a->states - n, at = f * a->states + n;
  const float *x = a->x + r * a->x_row + first * a->x_token + f;
  const float *B = a->B + r * a->B_row + first * a->B_token + n;
  const float *C = a->C + r * a->C_row + first * a->C_token + n;
  float *y = a->y + (r * a->tokens + first) * a->channels + f;
  vf h[TALL][WIDE], A[TALL][WIDE];
  UNROLL for (int i = 0; i < TALL; i++)
    UNROLL for (int j = 0; j < WIDE; j++) {
      const int64_t some = whole ? VL : i < tall ? wide - j * VL : 0, here = at + i * a->states + j * VL;
      h[i][j] = load_some(from + here, some), A[i][j] = load_some(a->A + here, some);
    }
  for (int64_t t = 0; t < count; t++) {
    vf sum[TALL];
    float sums[TALL];
    UNROLL for (int i = 0; i < TALL; i++) {
      const float rate = whole || i < tall ? dt[i] : 0.0f, value = whole || i < tall ? dt[i] * x[i] : 0.0f;
      sum[i] = vf_zero();
      UNROLL for (int j = 0; j < WIDE; j++) {
        const int64_t some = whole ? VL : wide - j * VL;
        const vf decay = vf_exp(vf_mul(vf_set1(rate), A[i][j]));
        h[i][j] = vf_fma(vf_set1(value), load_some(B + j * VL, some), vf_mul(decay, h[i][j]));
        sum[i] = vf_fma(h[i][j], load_some(C + j * VL, some), sum[i]);
      }
    }
    vf_sum4(sum[0], sum[1], sum[2], sum[3], sums);
    UNROLL for (int i = 0; i < TALL; i++)
      if (whole || i < tall) y[i] += sums[i];
    x += a->x_token, dt += CHANNELS, B += a->B_token, C += a->C_token, y += a->channels;
  }
  UNROLL for (int i = 0; i < TALL; i++)
    UNROLL for (int j = 0; j < WIDE; j++)
      store_some(to + at + i * a->states + j * VL, h[i][j], whole ? VL : i < tall ? wide - j * VL : 0);
}

static void whole_tile(const selective_scan_args *a, int64_t r, int64_t first, int64_t count, int64_t f, int64_t n,
                       const float *dt, const float *from, float *to) {
  tile(a, r, first, count, f, n, dt, from, to, 1);
}
static void part_tile(const selective_scan_args *a, int64_t r, int64_t first, int64_t count, int64_t f, int64_t n,
                      const float *dt, const float *from, float *to) {
  tile(a, r, first, count, f, n, dt, from, to, 0);
}

static void run_channels(const selective_scan_args *a, int64_t r, int64_t begin, int64_t end) {
  const int64_t real = real_tokens(a->counts, r, a->tokens);
  const float *from = a->carry + r * a->carry_row;
  float *to = a->next + r * a->channels * a->states, *y = a->y + r * a->tokens * a->channels;
  for (int64_t first = 0; first < real; first += RUN, from = to) {
    const int64_t count = at_most(RUN, real - first);
    float dt[RUN * CHANNELS];
    for (int64_t t = first; t < first + count; t++) {
      const float *raw = a->dt + r * a->dt_row + t * a->dt_token;
      for (int64_t f = begin; f < end; f += VL) {
        const vf rate = load_some(raw + f, end - f);
        store_some(dt + (t - first) * CHANNELS + f - begin, a->softplus ? vf_softplus(rate) : rate, end - f);
      }
      for (int64_t f = begin; f < end; f++)
        y[t * a->channels + f] = a->D ? a->D[f] * a->x[r * a->x_row + t * a->x_token + f] : 0.0f;
    }
    for (int64_t f = begin; f < end; f += TALL)
      for (int64_t n = 0; n < a->states; n += WIDE * VL) {
        const int whole = f + TALL <= end && n + WIDE * VL <= a->states;
        (whole ? whole_tile : part_tile)(a, r, first, count, f, n, dt + f - begin, from, to);
      }
    for (int64_t t = first; t < first + count && a->gate; t++) {
      const float *gate = a->gate + r * a->gate_row + t * a->gate_token;
      float *out = y + t * a->channels;
      for (int64_t f = begin; f < end; f += VL) {
        const vf open = activate(SILU, load_some(gate + f, end - f));
        store_some(out + f, vf_mul(load_some(out + f, end - f), open), end - f);
      }
    }
  }
  if (!real)
    memcpy(to + begin * a->states, from + begin * a->states, (size_t)((end - begin) * a->states) * sizeof(float));
  for (int64_t t = real; t < a->tokens; t++)
    memset(y + t * a->channels + begin, 0, (size_t)(end - begin) * sizeof(float));
}

void lmstate_selective_scan(const selective_scan_args *a) {
  const int64_t blocks = (a->channels + CHANNELS - 1) / CHANNELS;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t i = 0; i < a->rows * blocks; i++) {
    const int64_t begin = i % blocks * CHANNELS;
    run_channels(a, i / blocks, begin, at_most(begin + CHANNELS, a->channels));
  }
}

EXPORT_SIZE(selective_scan_args);
