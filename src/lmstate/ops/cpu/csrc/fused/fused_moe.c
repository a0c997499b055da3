/* A mixture of experts as a sublayer: each token's choice, the products of its experts, and their sum. The experts
 * that a step visits are multiplied beside each other, so that the threads wait for one another as rarely as in a plain
 * feed-forward part. */
#include <math.h>
#include <string.h>

#include "fused/fused.h"
#include "dense/prologue.h"
#include "layout.h"

enum { FEATURES = 256 }; /* of a token that a thread adds up at a time */

/* Between the products. A visit is a token at one of its experts; V = N * top_k of them are in the order of
 * the experts, so that those of one expert follow each other. */
typedef struct {
  linear_args *ups, *downs; /* of the experts visited, then of the shared one */
  int64_t *experts, *count; /* how many these are, and how many visits */
  float *x;                 /* [N, inputs], after the norm */
  float *scores, *choice;   /* [N, count], [N, 2 * count] */
  float *weights;           /* [N, top_k] */
  float *visitors;          /* [V, inputs] */
  float *hidden, *done;     /* [V, 2 * hidden], [V, outputs] */
  float *sums;              /* [N, outputs] */
  float *shared_hidden, *shared, *shared_gate; /* [N, 2 * the shared one's hidden], [N, outputs], [N] */
  int32_t *chosen;          /* [N, top_k]: experts */
  int32_t *visits, *placed; /* [V]: token * top_k + i of each visit; [N, top_k]: places of a token's visits, in order */
} moe_workspace;

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static int64_t most_visited(const moe_args *a, int64_t visits) { return visits < a->count ? visits : a->count; }

/* Lay out the workspace from `base` on; returns its bytes. */
static int64_t lay_out(const moe_args *a, int64_t n, char *base, moe_workspace *w) {
  const int64_t visits = n * a->top_k, most = most_visited(a, visits) + 1, shared = a->shared ? n : 0;
  const int64_t one = sizeof(float), index = sizeof(int32_t), product = sizeof(linear_args);
  const int64_t shared_width = a->shared ? 2 * a->experts[a->count].hidden : 0;
  int64_t at = 0;
  const struct {
    void **field;
    int64_t bytes;
  } parts[] = {
      {(void **)&w->ups, most * product},
      {(void **)&w->downs, most * product},
      {(void **)&w->experts, sizeof(int64_t)},
      {(void **)&w->count, sizeof(int64_t)},
      {(void **)&w->x, n * a->inputs * one},
      {(void **)&w->scores, n * a->count * one},
      {(void **)&w->choice, 2 * n * a->count * one},
      {(void **)&w->weights, visits * one},
      {(void **)&w->visitors, visits * a->inputs * one},
      {(void **)&w->hidden, visits * 2 * a->experts->hidden * one},
      {(void **)&w->done, visits * a->outputs * one},
      {(void **)&w->sums, n * a->outputs * one},
      {(void **)&w->shared_hidden, shared * shared_width * one},
      {(void **)&w->shared, shared * a->outputs * one},
      {(void **)&w->shared_gate, shared * one},
      {(void **)&w->chosen, visits * index},
      {(void **)&w->visits, visits * index},
      {(void **)&w->placed, visits * index},
  };
  for (size_t i = 0; i < sizeof(parts) / sizeof(*parts); i++) {
    if (base) *parts[i].field = base + at;
    at += (parts[i].bytes + 15) / 16 * 16;
  }
  return at;
}

void moe_products(const fused_args *run, const moe_args *a, sublayer_products *p) {
  const int64_t n = p->into.rows, visits = n * a->top_k;
  moe_workspace nowhere;
  p->into.inputs = a->inputs, p->out.outputs = a->outputs, p->out.scale = a->residual_scale;
  p->between = lay_out(a, n, NULL, &nowhere) / (int64_t)sizeof(float);
  /* Floats are the longest that a row is made into, but for 17 rows of bytes where tiles take 16; see linear_memory. */
  const int64_t widest = larger(larger(a->inputs, a->experts->hidden), a->shared ? a->experts[a->count].hidden : 0);
  const int64_t threads = larger(run->threads, 1), products = most_visited(a, visits) + 2;
  p->products = (size_t)((visits + 2 * n) * 5 / 4 * widest + threads * (2 * LINEAR_SCRATCH * widest + LINEAR_ROOM) +
                         32 * products) * sizeof(float);
}

/* ---- the choice */

/* The first of the best; a NaN is better than a number. */
static int64_t best_of(const float *x, int64_t count) {
  int64_t best = 0;
  for (int64_t i = 1; i < count; i++)
    if (!(x[i] <= x[best])) best = i;
  return best;
}

/* In float64, as in the router in torch. */
static void score(const moe_args *a, float *x) {
  double largest = x[0], sum = 0;
  if (a->sigmoid) {
    for (int64_t i = 0; i < a->count; i++) x[i] = (float)(1 / (1 + exp(-(double)x[i])));
    return;
  }
  for (int64_t i = 1; i < a->count; i++) largest = fmax(largest, x[i]);
  for (int64_t i = 0; i < a->count; i++) sum += exp(x[i] - largest);
  for (int64_t i = 0; i < a->count; i++) x[i] = (float)(exp(x[i] - largest) / sum);
}

/* Leave all but the experts of the best groups out of the choice; `best`: [groups]. */
static void leave_out_groups(const moe_args *a, float *choice, float *best) {
  const int64_t size = a->count / a->groups;
  for (int64_t g = 0; g < a->groups; g++) {
    float *own = choice + g * size;
    const int64_t at = best_of(own, size);
    const float first = own[at];
    best[g] = first;
    if (!a->top2) continue;
    own[at] = -INFINITY;
    best[g] += own[best_of(own, size)];
    own[at] = first;
  }
  for (int64_t out = a->groups - a->topk_groups; out > 0; out--) {
    int64_t worst = 0; /* the last of equals, as the first of equals is chosen */
    for (int64_t g = 1; g < a->groups; g++)
      if (!(best[g] > best[worst])) worst = g;
    best[worst] = INFINITY;
    for (int64_t i = 0; i < size; i++) choice[worst * size + i] = -INFINITY;
  }
}

/* A token's experts and their weights, from its logits. */
static void choose(const moe_args *a, float *scores, float *choice, int32_t *chosen, float *weights) {
  score(a, scores);
  for (int64_t i = 0; i < a->count; i++) choice[i] = a->correction ? scores[i] + a->correction[i] : scores[i];
  if (a->groups > 1) leave_out_groups(a, choice, choice + a->count);
  float sum = 0;
  for (int64_t i = 0; i < a->top_k; i++) {
    const int64_t best = best_of(choice, a->count);
    choice[best] = -INFINITY;
    chosen[i] = (int32_t)best, weights[i] = scores[best], sum += weights[i];
  }
  for (int64_t i = 0; i < a->top_k; i++) {
    if (a->normalize) weights[i] /= sum + (float)a->floor;
    if (a->scale != 1) weights[i] *= (float)a->scale;
  }
}

typedef struct {
  const moe_args *of;
  float *scores;   /* [N, count]: logits, which become scores */
  float *weights;  /* [N, top_k] */
  int32_t *chosen; /* [N, top_k] */
  float *room;     /* [2 * count] */
  int64_t tokens;
} choose_experts_args;

/* The choice alone. */
int64_t lmstate_choose_experts(const choose_experts_args *c) {
  const moe_args *a = c->of;
  for (int64_t i = 0; i < c->tokens; i++)
    choose(a, c->scores + i * a->count, c->room, c->chosen + i * a->top_k, c->weights + i * a->top_k);
  return 0;
}

/* ---- the products */

static linear_args product(const sublayer_products *p, const void *weight, const float *bias, int64_t kind,
                           int64_t rows, int64_t inputs, int64_t outputs) {
  const linear_args l = {.weight = weight, .bias = bias, .kind = kind, .rows = rows, .inputs = inputs,
                         .outputs = outputs, .threads = p->into.threads};
  return l;
}

static void pair_up(const moe_args *a, const sublayer_products *p, const expert *e, int64_t rows, const float *x,
                    float *hidden, float *y, linear_args *up, linear_args *down) {
  *up = product(p, e->up, e->up_bias, e->up_kind, rows, a->inputs, 2 * e->hidden);
  *down = product(p, e->down, e->down_bias, e->down_kind, rows, e->hidden, a->outputs);
  up->x = x, up->y = hidden, down->x = hidden, down->y = y;
  if (linear_gates(up)) up->glu = a->gate;
  else down->gate = a->gate;
}

/* Put the visits in order, and make the products of those that are visited. */
static void plan(const moe_args *a, const sublayer_products *p, const moe_workspace *w) {
  const int64_t n = p->into.rows, visits = n * a->top_k, width = 2 * a->experts->hidden;
  int64_t at = 0, found = 0;
  int32_t met[n + 1];
  memset(met, 0, sizeof(met));
  for (int64_t e = 0; e < a->count; e++) {
    const int64_t first = at;
    for (int64_t v = 0; v < visits; v++) {
      if (w->chosen[v] != e) continue;
      const int64_t token = v / a->top_k;
      w->placed[token * a->top_k + met[token]++] = (int32_t)at;
      w->visits[at++] = (int32_t)v;
    }
    if (at == first) continue;
    pair_up(a, p, a->experts + e, at - first, w->visitors + first * a->inputs, w->hidden + first * width,
            w->done + first * a->outputs, w->ups + found, w->downs + found);
    found++;
  }
  if (a->shared) {
    pair_up(a, p, a->experts + a->count, n, w->x, w->shared_hidden, w->shared, w->ups + found, w->downs + found);
    found++;
  }
  *w->experts = found, *w->count = at;
}

/* ---- the sum */

/* Features first..last of what a token's experts give, added up in the order of the experts. */
static void add_up(const moe_args *a, const moe_workspace *w, int64_t token, int64_t first, int64_t last) {
  const int32_t *placed = w->placed + token * a->top_k;
  float *y = w->sums + token * a->outputs;
  memset(y + first, 0, (size_t)(last - first) * sizeof(float));
  for (int64_t i = 0; i < a->top_k; i++) {
    const float weight = a->scale_input ? 1 : w->weights[w->visits[placed[i]]];
    const float *done = w->done + placed[i] * a->outputs;
    for (int64_t f = first; f < last; f++) y[f] += done[f] * weight;
  }
  if (!a->shared) return;
  float weight = 1, opened[VL];
  if (a->shared_gate) {
    vf_store(opened, vf_sigmoid(vf_set1(w->shared_gate[token])));
    weight = opened[0];
  }
  const float *shared = w->shared + token * a->outputs;
  for (int64_t f = first; f < last; f++) y[f] += shared[f] * weight;
}

static void join(const sublayer_products *p, const moe_workspace *w, int64_t token, int64_t first, int64_t last) {
  const int64_t row = token * p->out.outputs;
  const float scale = p->out.scale != 0 ? (float)p->out.scale : 1;
  for (int64_t f = first; f < last; f++) {
    const float y = w->sums[row + f] * scale;
    p->out.y[row + f] = p->out.residual ? p->out.residual[row + f] + y : y;
  }
}

void moe_sublayer(const moe_args *a, sublayer_products *p, workspace *common) {
  const int64_t n = p->into.rows, width = a->inputs, blocks = (a->outputs + FEATURES - 1) / FEATURES;
  moe_workspace w;
  lay_out(a, n, (char *)common->between, &w);
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < n; i++) {
    const float *x = p->into.x + i * width;
    if (a->norm) rms_norm_row(x, a->norm, w.x + i * width, width, a->norm_eps);
    else memcpy(w.x + i * width, x, (size_t)width * sizeof(float));
  }
  team_barrier();
  linear_args first[] = {product(p, a->router, a->bias, a->router_kind, n, width, a->count),
                         product(p, a->shared_gate, NULL, a->shared_gate_kind, n, width, 1)};
  first[0].x = first[1].x = w.x, first[0].y = w.scores, first[1].y = w.shared_gate;
  linear_run_all(first, a->shared_gate ? 2 : 1, common->products);
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < n; i++)
    choose(a, w.scores + i * a->count, w.choice + 2 * i * a->count, w.chosen + i * a->top_k, w.weights + i * a->top_k);
  team_barrier();
#pragma omp single nowait
  plan(a, p, &w);
  team_barrier();
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < *w.count; i++) {
    const float *x = w.x + w.visits[i] / a->top_k * width, weight = a->scale_input ? w.weights[w.visits[i]] : 1;
    for (int64_t f = 0; f < width; f++) w.visitors[i * width + f] = x[f] * weight;
  }
  team_barrier();
  linear_run_all(w.ups, *w.experts, common->products);
  linear_run_all(w.downs, *w.experts, common->products);
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < n * blocks; i++) {
    const int64_t token = i / blocks, from = i % blocks * FEATURES, end = from + FEATURES;
    const int64_t to = end < a->outputs ? end : a->outputs;
    add_up(a, &w, token, from, to);
    if (!a->after) join(p, &w, token, from, to);
  }
  team_barrier();
  if (!a->after) return;
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < n; i++) {
    rms_norm_row(w.sums + i * a->outputs, a->after, w.sums + i * a->outputs, a->outputs, a->after_eps);
    join(p, &w, i, 0, a->outputs);
  }
  team_barrier();
}

EXPORT_SIZE(expert);
EXPORT_SIZE(moe_args);
EXPORT_SIZE(choose_experts_args);
