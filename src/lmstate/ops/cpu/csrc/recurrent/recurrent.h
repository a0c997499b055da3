/* What the recurrences share. They take the tokens of a row in runs of RUN, so that what a run reads stays in the first
 * cache; between runs the state is in the new carry. A token's arithmetic is the same wherever a run begins and ends.
 * The old carry is never written, and tokens from a row's count on are never read. */
#ifndef LMSTATE_RECURRENT_H
#define LMSTATE_RECURRENT_H

#include <omp.h>
#include <stdlib.h>

#include "dense/prologue.h"
#include "team.h"

enum { RUN = 32 };

/* The first n of VL numbers, and zeros; n may be 0 or less, or more than VL. */
INLINE vf load_some(const float *p, int64_t n) {
  return n >= VL ? vf_load(p) : n > 0 ? load_part(F32, p, 0, (int)n) : vf_zero();
}

INLINE void store_some(float *p, vf x, int64_t n) {
  if (n >= VL) vf_store(p, x);
  else if (n > 0) store_part(p, x, (int)n);
}

/* Fetch n numbers that will be read, and n that will be written (null: none), into the second cache: single tokens are
 * bound by memory, and their carries are in short runs. */
INLINE void ahead(const float *from, float *to, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    __builtin_prefetch(from + i, 0, 1);
    if (to) __builtin_prefetch(to + i, 1, 1);
  }
}

INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

/* Real tokens of a row. */
INLINE int64_t real_tokens(const int64_t *counts, int64_t row, int64_t tokens) {
  const int64_t n = counts[row];
  return n < 0 ? 0 : at_most(n, tokens);
}

/* Where token t of row r is: tokens are `token` apart, and rows `row`, or without padding each behind the begins[r]
 * tokens of those before it. */
INLINE int64_t token_at(const int64_t *begins, int64_t r, int64_t t, int64_t row, int64_t token) {
  return begins ? (begins[r] + t) * token : r * row + t * token;
}

/* Tokens of a row that have a place, with padding if there is any. */
INLINE int64_t placed_tokens(const int64_t *begins, int64_t count, int64_t tokens) { return begins ? count : tokens; }

/* log(1 + exp(x)) = max(x, 0) + log1p(u) with u = exp(-|x|), and log1p(u) = 2 atanh(u / (2 + u)), a short series. */
INLINE vf vf_softplus(vf x) {
  const vf u = vf_exp(vf_sub(vf_zero(), vf_abs(x)));
  const vf s = vf_div(u, vf_add(vf_set1(2), u)), square = vf_mul(s, s);
  vf p = vf_set1(1.0f / 15);
  UNROLL for (int i = 13; i > 0; i -= 2) p = vf_fma(p, square, vf_set1(1.0f / (float)i));
  return vf_fma(vf_add(s, s), p, vf_max(x, vf_zero()));
}

INLINE float softplus(float x) {
  float lanes[VL];
  vf_store(lanes, vf_softplus(vf_set1(x)));
  return lanes[0];
}

INLINE float dot(const float *x, const float *y, int64_t n) {
  vf sum = vf_zero();
  for (int64_t i = 0; i < n; i += VL) sum = vf_fma(load_some(x + i, n - i), load_some(y + i, n - i), sum);
  return vf_sum(sum);
}

/* Whether a carry is written past the caches: where it is large, that saves reading what is overwritten, and until it
 * is read again the weights of all other layers have gone through them. Its lines are whole. */
INLINE int bypasses(const float *to, int64_t line, int64_t size) {
  return size >= 1 << 16 && line % VL == 0 && (uintptr_t)to % (VL * sizeof(float)) == 0;
}

/* ---- the bodies, which `mixers.c` also runs one after the other. Each `_run` is for every thread of a
 * parallel region that is open; when it returns, all of the result is there. */

typedef struct {
  const float *x;        /* [R, T, F] by its strides */
  const float *tail;     /* [R, C - 1, F] by its row stride: the inputs before them */
  const float *taps;     /* [C, F] */
  const float *bias;     /* [F] or null */
  const int64_t *counts; /* [R] */
  const int64_t *begins; /* [R], where x and y have no padding: see `token_at`; or null */
  float *y, *next;       /* [R, T, F] and the new tail, contiguous */
  int64_t rows, tokens, width, kernel, silu, threads;
  int64_t x_row, x_token, tail_row;
  const int64_t *marks; /* [R]: a row's tokens after which its tail is kept as well; 0: none; or null */
  float *marked;        /* as next */
} causal_conv_args;

typedef struct {
  const float *y;      /* [R, T, G * W], contiguous */
  const float *gate;   /* [R, T, G * W] by its strides, its last axis dense */
  const float *weight; /* [G * W], or [W] for every group alike; null: the gate alone */
  float *out;          /* as y, or y itself */
  const int64_t *counts; /* [R]: from there on tokens are padding and left alone; null: none is */
  int64_t rows, tokens, groups, width, weights, silu, gate_last, threads;
  int64_t gate_row, gate_token;
  double eps;
} gated_norm_args;

typedef struct {
  const float *q, *k;     /* [R, T, Hk, Dk] by their strides, their last axis dense as in all of these */
  const float *v;         /* [R, T, H, Dv] */
  const float *g;         /* [R, T, H] or [R, T, H, Dk], log decay */
  const float *beta;      /* [R, T, H], or null: nothing is corrected */
  const float *carry;     /* [R, H, Dk, Dv] by its row stride */
  const int64_t *counts;  /* [R] */
  const int64_t *begins;  /* as in causal_conv_args */
  float *y, *next;        /* [R, T, H, Dv], or null where the rule corrects itself, and the new carry, contiguous */
  int64_t rows, tokens, key_heads, heads, key_dim, value_dim, by_channel, normalize, threads;
  int64_t q_row, q_token, q_head, k_row, k_token, k_head, v_row, v_token, v_head;
  int64_t g_row, g_token, g_head, beta_row, beta_token, beta_head, carry_row;
  double scale;
  /* Or g and beta as projected, and what makes them from that: A softplus(g + bias), and beta_scale sigmoid(beta). */
  const float *A, *bias;  /* [H] and [H] or [H, Dk]; null: they are made already */
  double beta_scale;
  const gated_norm_args *norm; /* of each head's outputs, in place; or null */
  const int64_t *marks;   /* as in causal_conv_args, of the carry */
  float *marked;
  const causal_conv_args *conv; /* or null: q, k and v are nothing, and its features are those of q | k | v */
} gated_delta_rule_args;

typedef struct {
  const float *x;         /* [R, T, H, P] by its strides, its last axis dense as in all of these */
  const float *dt;        /* [R, T, H], before its bias, softplus and limits */
  const float *A;         /* [H] */
  const float *B, *C;     /* [R, T, G, N] */
  const float *D, *bias;  /* [H] or null */
  const float *carry;     /* [R, H, P, N] by its row stride */
  const int64_t *counts;  /* [R] */
  const int64_t *begins;  /* as in causal_conv_args */
  float *y, *next;        /* [R, T, H, P] and the new carry, contiguous */
  int64_t rows, tokens, heads, head_dim, groups, states, threads;
  int64_t x_row, x_token, x_head, dt_row, dt_token, dt_head, B_row, B_token, B_group, C_row, C_token, C_group;
  int64_t carry_row;
  double low, high; /* limits of dt */
  const int64_t *marks; /* as in causal_conv_args, of the carry */
  float *marked;
} ssd_args;

void conv_run(const causal_conv_args *a);
/* Its parts: features first..last of a token to y, and the tails behind all tokens. */
void conv_token(const causal_conv_args *a, int64_t row, int64_t t, int64_t first, int64_t last, float *y);
void conv_tails_run(const causal_conv_args *a);
/* y = c * conv(b * x) with b | c | x, `projected` [R, T, 3 F]; a->x is `taken`, contiguous, and b * x is put there. */
void gated_conv_run(const causal_conv_args *a, const float *projected, float *taken);
void gated_norm_run(const gated_norm_args *a);
/* Group g of token i, of all rows' tokens. */
void gated_norm_group(const gated_norm_args *a, int64_t i, int64_t g);
void delta_run(const gated_delta_rule_args *a, float *memory);
size_t delta_memory(const gated_delta_rule_args *a); /* floats for all threads */
void ssd_run(const ssd_args *a);

#endif
