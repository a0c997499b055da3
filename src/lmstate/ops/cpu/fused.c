/* A run of layers of a decoder in one parallel region: what a step of few tokens costs beyond reading weights and keys is
 * calls and regions, and a block of separate operations has a dozen of them. A block has two halves, attention or a
 * recurrence and a feed-forward part or a mixture of them; a run is any number of halves, each of which reads the stream that the one before it
 * gives. */
#include "fused.h"

#include <stdlib.h>

static void feed_forward_products(const feed_forward_args *a, half_products *p) {
  p->into.weight = a->up, p->into.bias = a->up_bias, p->into.norm = a->norm, p->into.eps = a->eps;
  p->into.factors = a->factors, p->into.kind = a->up_kind, p->into.inputs = a->inputs, p->into.outputs = 2 * a->hidden;
  p->out.weight = a->down, p->out.bias = a->down_bias, p->out.after = a->after, p->out.after_eps = a->after_eps;
  p->out.kind = a->down_kind, p->out.inputs = a->hidden, p->out.outputs = a->outputs;
  p->out.scale = a->residual_scale, p->out.gate = a->gate, p->between = p->into.rows * p->into.outputs;
}

static int parallel(const half_args *half) {
  if (half->kind == FEED_FORWARD) return half->feed_forward.parallel != 0;
  return (half->kind == DELTA || half->kind == SSD || half->kind == CONV) && half->recurrent.parallel;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static half_products products_of(const run_args *run, const half_args *half) {
  const linear_args common = {.rows = run->rows * run->tokens, .threads = run->threads};
  half_products p = {.into = common, .beside = common, .out = common};
  if (half->kind == EXPERTS) {
    experts_products(run, &half->experts, &p);
    return p;
  }
  if (half->kind == ATTENTION) attention_products(&half->attention, &p);
  else if (half->kind == FEED_FORWARD) feed_forward_products(&half->feed_forward, &p);
  else recurrent_products(run, half, &p);
  const size_t first = linear_memory(&p.into) + (p.beside.weight ? linear_memory(&p.beside) : 0);
  p.products = larger(first, linear_memory(&p.out));
  return p;
}

/* One half, run by every thread. */
static void run_half(const run_args *run, const half_args *half, shared *common, const float *x, const float *residual,
                     float *y) {
  half_products p = products_of(run, half);
  p.into.x = p.beside.x = x, p.out.residual = residual, p.out.y = y;
  if (half->kind == ATTENTION) attention_half(run, &half->attention, &p, common);
  else if (half->kind == EXPERTS) experts_half(run, &half->experts, &p, common);
  else if (half->kind != FEED_FORWARD) recurrent_half(run, half, &p, common);
  else {
    p.into.y = common->between, p.out.x = common->between;
    linear_run(&p.into, common->products);
    linear_run(&p.out, common->products);
  }
}

/* 0, or the status of lmstate_attend of the half that failed, times the number of halves, plus the half's. */
int64_t lmstate_run(const run_args *run) {
  const int64_t n = run->rows * run->tokens;
  if (n == 0) return 0;
  size_t products = 0;
  int64_t between = 0, width = 0;
  for (int64_t i = 0; i < run->count; i++) {
    const half_products p = products_of(run, &run->halves[i]);
    products = larger(products, p.products);
    if (p.between > between) between = p.between;
    if (p.out.outputs > width) width = p.out.outputs;
  }
  products = (products + 15) / 16 * 16; /* what lies between may be more than floats */
  /* A half reads one stream or two, and writes a third. */
  char *memory = malloc(products + (size_t)(between + 3 * n * width) * sizeof(float));
  if (!memory) return -1;
  shared common = {.products = memory, .between = (float *)(memory + products)};
  float *streams = common.between + between;
  int64_t failed = 0;
#pragma omp parallel num_threads((int)run->threads) if (run->threads > 1)
  {
    const float *before = NULL, *x = run->x, *residual = run->residual;
    for (int64_t i = 0; i < run->count; i++) {
      const half_args *half = &run->halves[i];
      float *y = i + 1 < run->count ? streams + i % 3 * n * width : run->y;
      run_half(run, half, &common, parallel(half) ? before : x, residual, y);
      if (common.status) {
#pragma omp single nowait
        failed = i;
        break;
      }
      before = x, x = residual = y;
    }
  }
  free(memory);
  return common.status < 0 ? -1 : common.status ? common.status * run->count + failed : 0;
}
