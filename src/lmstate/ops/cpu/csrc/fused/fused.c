/* Fused sublayers of a decoder in one parallel region: what a step of few tokens costs beyond reading weights and keys
 * is calls and regions, and a block of separate operations has a dozen of them. A block has two sublayers, attention or
 * a recurrence, and an MLP or a mixture of experts; any number of them is fused, each of which reads the stream that
 * the one before it gives. */
#include "fused/fused.h"
#include "layout.h"

#include <stdlib.h>

static void mlp_products(const mlp_args *a, sublayer_products *p) {
  p->into.weight = a->up, p->into.bias = a->up_bias, p->into.norm = a->norm, p->into.eps = a->eps;
  p->into.factors = a->factors, p->into.kind = a->up_kind, p->into.inputs = a->inputs, p->into.outputs = 2 * a->hidden;
  p->out.weight = a->down, p->out.bias = a->down_bias, p->out.after = a->after, p->out.after_eps = a->after_eps;
  p->out.kind = a->down_kind, p->out.inputs = a->hidden, p->out.outputs = a->outputs;
  p->out.scale = a->residual_scale, p->out.gate = a->gate, p->between = p->into.rows * p->into.outputs;
}

static int parallel(const sublayer_args *sublayer) {
  if (sublayer->kind == MLP) return sublayer->mlp.parallel != 0;
  const int64_t kind = sublayer->kind;
  return (kind == GATED_DELTA || kind == MAMBA2 || kind == SHORT_CONV) && sublayer->recurrent.parallel;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static sublayer_products products_of(const fused_args *run, const sublayer_args *sublayer) {
  const linear_args common = {.rows = run->rows * run->tokens, .threads = run->threads};
  sublayer_products p = {.into = common, .beside = common, .out = common};
  if (sublayer->kind == MOE) {
    moe_products(run, &sublayer->experts, &p);
    return p;
  }
  if (sublayer->kind == ATTENTION) attention_products(&sublayer->attention, &p);
  else if (sublayer->kind == MLP) mlp_products(&sublayer->mlp, &p);
  else recurrent_products(run, sublayer, &p);
  const size_t first = linear_memory(&p.into) + (p.beside.weight ? linear_memory(&p.beside) : 0);
  p.products = larger(first, linear_memory(&p.out));
  return p;
}

/* One sublayer, run by every thread; the status of its attention, the same for all of them. */
static int64_t run_sublayer(const fused_args *run, const sublayer_args *sublayer, workspace *common, const float *x,
                            const float *residual, float *y) {
  sublayer_products p = products_of(run, sublayer);
  p.into.x = p.beside.x = x, p.out.residual = residual, p.out.y = y;
  if (sublayer->kind == ATTENTION) return attention_sublayer(run, &sublayer->attention, &p, common);
  if (sublayer->kind == MOE) moe_sublayer(run, &sublayer->experts, &p, common);
  else if (sublayer->kind != MLP) recurrent_sublayer(run, sublayer, &p, common);
  else {
    p.into.y = common->between, p.out.x = common->between;
    linear_run(&p.into, common->products);
    linear_run(&p.out, common->products);
  }
  return 0;
}

/* 0, or the status of lmstate_attend of the sublayer that failed, times the count of sublayers, plus its index. */
int64_t lmstate_fused(const fused_args *run) {
  const int64_t n = run->rows * run->tokens;
  if (n == 0) return 0;
  size_t products = 0;
  int64_t between = 0, width = 0;
  for (int64_t i = 0; i < run->count; i++) {
    const sublayer_products p = products_of(run, &run->sublayers[i]);
    products = larger(products, p.products);
    if (p.between > between) between = p.between;
    if (p.out.outputs > width) width = p.out.outputs;
  }
  products = (products + 63) / 64 * 64; /* what lies between may be more than floats */
  /* A sublayer reads one stream or two, and writes a third. */
  const size_t bytes = products + (size_t)(between + 3 * n * width) * sizeof(float);
  char *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
  if (!memory) return -1;
  workspace common = {.products = memory, .between = (float *)(memory + products)};
  float *streams = common.between + between;
  int64_t failed = 0;
#pragma omp parallel num_threads((int)run->threads) if (run->threads > 1)
  {
    const float *before = NULL, *x = run->x, *residual = run->residual;
    for (int64_t i = 0; i < run->count; i++) {
      const sublayer_args *sublayer = &run->sublayers[i];
      float *y = i + 1 < run->count ? streams + i % 3 * n * width : run->y;
      if (run_sublayer(run, sublayer, &common, parallel(sublayer) ? before : x, residual, y)) {
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

EXPORT_SIZE(fused_args);
EXPORT_SIZE(attention_args);
EXPORT_SIZE(mlp_args);
EXPORT_SIZE(gated_conv_parts);
EXPORT_SIZE(recurrent_args);
EXPORT_SIZE(sublayer_args);
