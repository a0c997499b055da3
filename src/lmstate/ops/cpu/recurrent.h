/* What the recurrences share. They take the tokens of a row in runs of RUN, so that what a run reads stays in the first
 * cache; between runs the state lies in the new carry. A token's arithmetic is the same wherever a run begins and ends.
 * The old carry is never written, and tokens from a row's count on are never read. */
#ifndef LMSTATE_RECURRENT_H
#define LMSTATE_RECURRENT_H

#include <omp.h>
#include <stdlib.h>

#include "prologue.h"

enum { RUN = 32 };

/* The first n of VL numbers, and zeros; n may be 0 or less, or more than VL. */
INLINE vf load_some(const float *p, int64_t n) {
  return n >= VL ? vf_load(p) : n > 0 ? load_part(F32, p, 0, (int)n) : vf_zero();
}

INLINE void store_some(float *p, vf x, int64_t n) {
  if (n >= VL) vf_store(p, x);
  else if (n > 0) store_part(p, x, (int)n);
}

/* Fetch n numbers that will be read, and n that will be written, into the second cache: single tokens are bound by
 * memory, and their carries lie in short runs. */
INLINE void ahead(const float *from, float *to, int64_t n) {
  for (int64_t i = 0; i < n; i += 16) {
    __builtin_prefetch(from + i, 0, 1);
    __builtin_prefetch(to + i, 1, 1);
  }
}

INLINE int64_t at_most(int64_t a, int64_t b) { return a < b ? a : b; }

/* Real tokens of a row. */
INLINE int64_t real_tokens(const int64_t *counts, int64_t row, int64_t tokens) {
  const int64_t n = counts[row];
  return n < 0 ? 0 : at_most(n, tokens);
}

INLINE float softplus(float x) { return x > 20.0f ? x : log1pf(expf(x)); }

INLINE float dot(const float *x, const float *y, int64_t n) {
  vf sum = vf_zero();
  for (int64_t i = 0; i < n; i += VL) sum = vf_fma(load_some(x + i, n - i), load_some(y + i, n - i), sum);
  return vf_sum(sum);
}

#endif
