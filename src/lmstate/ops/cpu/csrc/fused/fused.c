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
  p->out.scale = a->residual_scale;
  if (linear_gates(&p->into)) p->into.glu = a->gate;
  else p->out.gate = a->gate;
  p->between = p->into.rows * (p->into.glu ? a->hidden : 2 * a->hidden);
}

static int parallel(const sublayer_args *sublayer) {
  if (sublayer->kind == MLP) return sublayer->mlp.parallel != 0;
  const int64_t kind = sublayer->kind;
  return (kind == GATED_DELTA || kind == MAMBA2 || kind == SHORT_CONV) && sublayer->recurrent.parallel;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

static sublayer_products products_of(const fused_args *run, const sublayer_args *sublayer, const workspace *common) {
  const linear_args each = {.rows = common->packed.begins[run->rows], .threads = run->threads};
  sublayer_products p = {.into = each, .beside = each, .out = each};
  if (sublayer->kind == MOE) {
    moe_products(run, &sublayer->experts, &p);
    return p;
  }
  if (sublayer->kind == ATTENTION) attention_products(&sublayer->attention, &p);
  else if (sublayer->kind == MLP) mlp_products(&sublayer->mlp, &p);
  else recurrent_products(run, sublayer, &p, common);
  const size_t first = linear_memory(&p.into) + (p.beside.weight ? linear_memory(&p.beside) : 0);
  p.products = larger(first, linear_memory(&p.out));
  return p;
}

/* One sublayer, run by every thread; the status of its attention, the same for all of them. */
static int64_t run_sublayer(const fused_args *run, const sublayer_args *sublayer, workspace *common, const float *x,
                            const float *residual, float *y, int stored) {
  sublayer_products p = products_of(run, sublayer, common);
  p.into.x = p.beside.x = x, p.out.residual = residual, p.out.y = y;
  if (sublayer->kind == ATTENTION) return attention_sublayer(run, &sublayer->attention, &p, common, stored);
  if (sublayer->kind == MOE) moe_sublayer(&sublayer->experts, &p, common);
  else if (sublayer->kind != MLP) recurrent_sublayer(run, sublayer, &p, common);
  else {
    p.into.y = common->between, p.out.x = common->between;
    linear_run(&p.into, common->products);
    linear_run(&p.out, common->products);
  }
  return 0;
}

/* Keys and values alone of an attention, run by every thread; its status. */
static int64_t store_attention(const fused_args *run, const sublayer_args *sublayer, workspace *common,
                               const float *x) {
  sublayer_products p = products_of(run, sublayer, common);
  p.into.x = x;
  return attention_store(run, &sublayer->attention, &p, common);
}

/* Number the tokens that are no padding. Whether there was memory. */
static int number_tokens(const fused_args *run, packed_tokens *packed) {
  const size_t begins = (size_t)(run->rows + 1) * sizeof *packed->begins;
  char *memory = malloc(begins + (size_t)(run->rows * run->tokens) * sizeof *packed->rows);
  if (!memory) return 0;
  packed->begins = (int64_t *)memory, packed->rows = (int32_t *)(memory + begins);
  int64_t n = 0;
  for (int64_t r = 0; r < run->rows; r++) {
    packed->begins[r] = n;
    const int64_t count = run->counts ? run->counts[r] : run->tokens; /* attention refuses those that make no sense */
    for (int64_t t = 0; t < count && t < run->tokens; t++) packed->rows[n++] = (int32_t)r;
  }
  packed->begins[run->rows] = n;
  return 1;
}

/* [R, T, width] without its padding. */
static const float *gathered(const fused_args *run, const packed_tokens *packed, const float *from, int64_t width,
                             float *to) {
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < packed->begins[run->rows]; i++) {
    const int64_t r = packed->rows[i], place = r * run->tokens + i - packed->begins[r];
    memcpy(to + i * width, from + place * width, (size_t)width * sizeof(float));
  }
  team_barrier();
  return to;
}

/* [N, width] without the tokens of `run` that the step `kept`, of its last ones, has not. */
static const float *narrowed(const fused_args *kept, const packed_tokens *all, const packed_tokens *packed,
                             const float *from, int64_t width, float *to) {
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < packed->begins[kept->rows]; i++) {
    const int64_t r = packed->rows[i], place = all->begins[r + 1] - packed->begins[r + 1] + i;
    memcpy(to + i * width, from + place * width, (size_t)width * sizeof(float));
  }
  team_barrier();
  return to;
}

/* The inverse of `gathered`: y has zeros at padding. */
static void scatter(const fused_args *run, const packed_tokens *packed, const float *from, int64_t width) {
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < run->rows * run->tokens; i++) {
    const int64_t token = packed->begins[i / run->tokens] + i % run->tokens;
    if (token < packed->begins[i / run->tokens + 1])
      memcpy(run->y + i * width, from + token * width, (size_t)width * sizeof(float));
    else memset(run->y + i * width, 0, (size_t)width * sizeof(float));
  }
  team_barrier();
}

/* The first sublayer that only the tokens which are kept go through: what follows the last mixer, or that itself where
 * keys and values of all may come first. Their count where a stream beside the first one would have to follow. */
static int64_t first_of_kept(const fused_args *run) {
  const sublayer_args *each = run->sublayers;
  int64_t i = run->count;
  while (i && (each[i - 1].kind == MLP || each[i - 1].kind == MOE)) i--;
  if (i && each[i - 1].kind == ATTENTION && attention_stores_first(&each[i - 1].attention)) i--;
  else if (i < run->count && parallel(each + i)) return run->count;
  return i || run->residual == run->x ? i : run->count;
}

/* As lmstate_fused, with the tokens numbered, and those of the step `kept` of the tokens that are kept; else null. */
static int64_t run_sublayers(const fused_args *run, workspace *all, const fused_args *kept, workspace *few) {
  const packed_tokens *packed = &all->packed;
  const int64_t n = packed->begins[run->rows], last = run->count - 1, cut = kept ? first_of_kept(run) : run->count + 1;
  const int64_t n_kept = kept ? few->packed.begins[run->rows] : 0;
  const sublayer_products first = products_of(run, run->sublayers, all);
  const int ragged = n < run->rows * run->tokens, added = ragged && run->residual && run->residual != run->x;
  const int padded = kept ? cut > last || n_kept < run->rows * run->kept : ragged;
  size_t products = 0;
  int64_t between = 0, outputs = 0, width = kept ? first.into.inputs : 0;
  for (int64_t i = 0; i <= last; i++) {
    const sublayer_products p = products_of(run, &run->sublayers[i], all);
    products = larger(products, p.products);
    if (p.between > between) between = p.between;
    outputs = p.out.outputs;
    if (outputs > width) width = outputs;
    if (i < cut || !kept) continue;
    const sublayer_products fewer = products_of(kept, &run->sublayers[i], few); /* may go another way, and need more */
    products = larger(products, fewer.products);
    if (fewer.between > between) between = fewer.between;
  }
  products = (products + 63) / 64 * 64; /* what is between may need more than floats */
  /* A sublayer reads one stream or two, and writes a third; beside them is what was gathered. */
  const int64_t inputs = ragged ? n * first.into.inputs : 0, residuals = added ? n * first.out.outputs : 0;
  const int64_t floats = between + (3 * n + n_kept) * width + inputs + residuals;
  char *memory = aligned_alloc(64, (products + (size_t)floats * sizeof(float) + 63) / 64 * 64);
  if (!memory) return -1;
  all->products = few->products = memory, all->between = few->between = (float *)(memory + products);
  float *streams = all->between + between, *narrow = streams + 3 * n * width, *gather = narrow + n_kept * width;
  int64_t failed = 0;
  team together = {0};
#pragma omp parallel num_threads((int)run->threads) if (run->threads > 1)
  {
    team_begin(&together);
    const fused_args *step = run;
    workspace *common = all;
    const float *before = NULL, *x = run->x, *residual = run->residual;
    if (ragged) x = gathered(run, packed, run->x, first.into.inputs, gather);
    if (added) residual = gathered(run, packed, run->residual, first.out.outputs, gather + inputs);
    else if (ragged && residual) residual = x;
    int64_t status = 0, wide = first.into.inputs;
    for (int64_t i = 0; i <= last; i++) {
      const sublayer_args *sublayer = &run->sublayers[i];
      const int stored = i == cut && sublayer->kind == ATTENTION;
      if (stored && !sublayer->attention.reads) status = store_attention(run, sublayer, all, x);
      if (i == cut && !status) {
        x = residual = narrowed(kept, packed, &few->packed, x, wide, narrow);
        step = kept, common = few;
        if (!n_kept) break;
      }
      float *y = i == last && !padded ? run->y : streams + i % 3 * n * width;
      if (!status) status = run_sublayer(step, sublayer, common, parallel(sublayer) ? before : x, residual, y, stored);
      if (status) {
#pragma omp single nowait
        failed = i;
        break;
      }
      if (i + 1 == cut) wide = products_of(run, sublayer, all).out.outputs;
      before = x, x = residual = y;
    }
    if (cut == run->count && !status) {
      x = narrowed(kept, packed, &few->packed, x, wide, narrow);
      step = kept, common = few;
    }
    if (padded && !status) scatter(step, &common->packed, x, outputs);
    team_end();
  }
  free(memory);
  const int64_t status = all->status ? all->status : few->status;
  return status < 0 ? -1 : status ? status * run->count + failed : 0;
}

/* 0, or the status of lmstate_attend of the sublayer that failed, times the count of sublayers, plus its index. */
int64_t lmstate_fused(const fused_args *run) {
  if (run->rows * run->tokens == 0) return 0;
  workspace all = {.status = 0}, few = {.status = 0};
  int64_t *starts = NULL, status = -1;
  if (!run->keep) {
    if (number_tokens(run, &all.packed)) status = run_sublayers(run, &all, NULL, &few);
  } else if ((starts = malloc((size_t)run->rows * sizeof *starts)) && number_tokens(run, &all.packed)) {
    fused_args kept = *run;
    kept.starts = starts, kept.counts = run->keep, kept.tokens = run->kept;
    for (int64_t r = 0; r < run->rows; r++) starts[r] = run->starts[r] + run->counts[r] - run->keep[r];
    if (number_tokens(&kept, &few.packed)) status = run_sublayers(run, &all, &kept, &few);
  }
  free(few.packed.begins);
  free(all.packed.begins);
  free(starts);
  return status;
}

EXPORT_SIZE(fused_args);
EXPORT_SIZE(attention_args);
EXPORT_SIZE(mlp_args);
EXPORT_SIZE(gated_conv_parts);
EXPORT_SIZE(recurrent_args);
EXPORT_SIZE(sublayer_args);
