/* A softmax in parts: scores of a tile to weights, and parts put together in the order of the chunks. */
#ifndef LMSTATE_ATTEND_SOFTMAX_H
#define LMSTATE_ATTEND_SOFTMAX_H

#include "attention/attend_tasks.h"

static partial_softmax part_at(const attend_args *a, float *parts, int64_t index) {
  float *p = parts + index * (a->dim_v + 2);
  partial_softmax r = {p, p + 1, p + 2, NULL, NULL};
  return r;
}

/* scores -> weights of the positions low..end, and what was summed before is scaled to the new largest score. `own`:
 * position of the query, counted from the first position of the tile; `slope`, `bias`: of its head, or 0. */
INLINE void softmax_update(const attend_args *a, float *scores, const partial_softmax *to, int64_t low, int64_t end,
                           float slope, const float *bias, int64_t own) {
  enum { VECTORS = SUB / VL };
  const vf scale = vf_set1((float)a->scale), cap = vf_set1((float)a->softcap);
  vf s[VECTORS], largest = vf_set1(-INFINITY), sum = vf_zero();
  UNROLL16 for (int i = 0; i < VECTORS; i++) {
    s[i] = vf_mul(vf_load(scores + i * VL), scale);
    if (a->softcap != 0) s[i] = vf_mul(cap, vf_tanh(vf_div(s[i], cap)));
  }
  if (a->slopes) {
    float less[SUB];
    for (int t = 0; t < SUB; t++) less[t] = slope * (float)(own - t);
    UNROLL16 for (int i = 0; i < VECTORS; i++) s[i] = vf_sub(s[i], vf_load(less + i * VL));
  }
  if (bias) {
    float more[SUB];
    for (int t = 0; t < SUB; t++) {
      const int64_t distance = own < t ? 0 : own - t; /* a key behind the query is not seen */
      more[t] = bias[distance < a->distances ? distance : a->distances - 1];
    }
    UNROLL16 for (int i = 0; i < VECTORS; i++) s[i] = vf_add(s[i], vf_load(more + i * VL));
  }
  if (low > 0 || end < SUB) {
    UNROLL16 for (int i = 0; i < VECTORS; i++) vf_store(scores + i * VL, s[i]);
    for (int64_t t = 0; t < low; t++) scores[t] = -INFINITY;
    for (int64_t t = end; t < SUB; t++) scores[t] = -INFINITY;
    UNROLL16 for (int i = 0; i < VECTORS; i++) s[i] = vf_load(scores + i * VL);
  }
  UNROLL16 for (int i = 0; i < VECTORS; i++) largest = vf_max(largest, s[i]);
  const float before = *to->largest, here = vf_largest(largest), now = here > before ? here : before;
  if (now == -INFINITY) {
    memset(scores, 0, SUB * sizeof(float));
    return;
  }
  UNROLL16 for (int i = 0; i < VECTORS; i++) {
    const vf w = vf_exp(vf_sub(s[i], vf_set1(now)));
    vf_store(scores + i * VL, w);
    sum = vf_add(sum, w);
  }
  if (now > before) {
    const float keep = expf(before - now);
    *to->sum *= keep;
    for (int64_t d = 0; d < a->dim_v; d++) to->values[d] *= keep;
    *to->largest = now;
  }
  *to->sum += vf_sum(sum);
}

/* The whole softmax of a query: largest score and sum of exponentials, and what is to be its output. */
typedef struct { float *largest, *sum, *values; } whole_softmax;

static whole_softmax whole_of(const attend_args *a, const attend_plan *all, int64_t r, int64_t token, int64_t head) {
  const int64_t query = query_number(a, all, r, token, head);
  float *total = all->totals + 2 * query;
  return (whole_softmax){total, total + 1, a->out + query * a->dim_v};
}

static void begin_whole(const attend_args *a, int64_t head, const whole_softmax *to) {
  *to->largest = a->sinks ? a->sinks[head] : -INFINITY, *to->sum = a->sinks ? 1 : 0;
  memset(to->values, 0, (size_t)a->dim_v * sizeof(float));
}

/* Parts come in the order of the chunks; one that saw nothing adds nothing. */
static void add_part_to_whole(const attend_args *a, const partial_softmax *p, const whole_softmax *to) {
  if (*p->largest == -INFINITY) return;
  const int grows = *p->largest > *to->largest;
  float less[VL];
  vf_store(less, vf_exp(vf_set1(grows ? *to->largest - *p->largest : *p->largest - *to->largest)));
  const float before = grows ? *less : 1, here = grows ? 1 : *less;
  if (grows) *to->largest = *p->largest;
  *to->sum = before * *to->sum + here * *p->sum;
  for (int64_t d = 0; d < a->dim_v; d++) to->values[d] = before * to->values[d] + here * p->values[d];
}

/* Whether all of it is finite. */
static int end_whole(const attend_args *a, const whole_softmax *to) {
  const vf sum = vf_set1(*to->sum);
  vf zeros = vf_zero();
  int64_t d = 0;
  for (; d + VL <= a->dim_v; d += VL) {
    const vf x = vf_div(vf_load(to->values + d), sum);
    vf_store(to->values + d, x);
    zeros = vf_fma(x, vf_zero(), zeros);
  }
  float rest = 0;
  for (; d < a->dim_v; d++) {
    to->values[d] /= *to->sum;
    rest += to->values[d] * 0;
  }
  return vf_sum(zeros) + rest == 0;
}

#endif
