/* A recurrent layer as a sublayer: its projections, what its mixer makes of them, the projection back. */
#include "fused/fused.h"

/* The scan of a step's inputs, in the new carry where others were scanned into that before. */
static scan_args scan_of(const fused_args *run, const recurrent_args *a, const workspace *common) {
  const scan_args scan = {.tail = a->unscanned ? a->next_tail : a->tail, .carry = a->unscanned ? a->next : a->carry,
                          .counts = run->counts, .begins = common->packed.begins, .next_tail = a->next_tail,
                          .next = a->next, .rows = run->rows, .tokens = run->tokens, .threads = run->threads,
                          .marks = a->marks, .marked_tail = a->marked_tail, .marked = a->marked};
  return scan;
}

/* That of the inputs before them, [.., width], whose outputs nobody wants: `y` is memory for them, or null. */
static scan_args unscanned_scan(const fused_args *run, const recurrent_args *a, int64_t width, float *y) {
  const scan_args scan = {.x = a->unscanned, .tail = a->tail, .carry = a->carry, .counts = a->unscanned_counts,
                          .begins = a->unscanned_begins, .y = y, .next_tail = a->next_tail, .next = a->next,
                          .rows = run->rows, .tokens = a->unscanned_tokens, .threads = run->threads, .x_token = width};
  return scan;
}

static int64_t larger_of(int64_t a, int64_t b) { return a > b ? a : b; }

void recurrent_products(const fused_args *run, const sublayer_args *sublayer, sublayer_products *p,
                        const workspace *common) {
  const recurrent_args *a = &sublayer->recurrent;
  const scan_args scan = scan_of(run, a, common), before = unscanned_scan(run, a, 0, 0);
  const int64_t unscanned = a->unscanned ? a->unscanned_begins[run->rows] : 0;
  p->into.norm = a->norm, p->into.eps = a->norm_eps, p->into.inputs = a->inputs, p->beside = p->into;
  p->into.weight = a->project, p->into.bias = a->bias, p->into.factors = a->factors, p->into.kind = a->project_kind,
      p->into.outputs = a->projected;
  p->out.weight = a->out, p->out.bias = a->out_bias, p->out.after = a->after, p->out.after_eps = a->after_eps;
  p->out.kind = a->out_kind, p->out.outputs = a->outputs, p->out.scale = a->residual_scale;
  if (sublayer->kind == SHORT_CONV) {
    p->out.inputs = a->projected / 3;
    p->between = p->out.rows * (p->into.outputs + p->out.inputs) + unscanned * p->out.inputs;
    return;
  }
  if (sublayer->kind == MAMBA2) {
    p->out.inputs = a->ssd.heads * a->ssd.head_dim;
    p->between = p->out.rows * p->out.inputs + (int64_t)mamba2_mixer_memory(&a->ssd, &scan);
    if (unscanned)
      p->between = larger_of(p->between, unscanned * p->out.inputs + (int64_t)mamba2_mixer_memory(&a->ssd, &before));
    return;
  }
  p->beside.weight = a->gates, p->beside.kind = a->gates_kind;
  p->beside.outputs = a->delta.heads * (a->delta.by_channel ? 1 + a->delta.key_dim : 2);
  p->out.inputs = a->delta.heads * a->delta.value_dim;
  p->between = 2 * p->out.rows * p->out.inputs;
  p->between += (int64_t)gated_delta_mixer_memory(&a->delta, &scan);
  if (unscanned) p->between = larger_of(p->between, (int64_t)gated_delta_mixer_memory(&a->delta, &before));
}

/* `project` gives gate | x, B, C | dt, and the scan reads all but the gate. */
static void mamba2_sublayer(const fused_args *run, const recurrent_args *a, sublayer_products *p, workspace *common) {
  const int64_t inner = p->out.inputs;
  float *seen = common->between;
  scan_args scan = scan_of(run, a, common);
  scan.z = a->kept, scan.x = a->kept + inner, scan.y = seen;
  scan.x_token = scan.z_token = a->projected;
  p->into.y = a->kept, p->out.x = seen;
  if (a->unscanned) {
    const scan_args before = unscanned_scan(run, a, a->projected - inner, seen);
    mamba2_mixer_run(&a->ssd, &before, seen + a->unscanned_begins[run->rows] * inner);
  }
  linear_run(&p->into, common->products);
  mamba2_mixer_run(&a->ssd, &scan, seen + p->out.rows * inner);
  linear_run(&p->out, common->products);
}

/* `project` gives q, k, v | z, `gates` gives beta | decay, and the scan reads q, k, v | beta | decay. */
static void gated_delta_sublayer(const fused_args *run, const recurrent_args *a, sublayer_products *p,
    workspace *common) {
  const int64_t n = p->out.rows, values = p->out.inputs, gates = p->beside.outputs;
  const int64_t width = a->projected - values, taken = width + gates;
  float *z = common->between, *seen = z + n * values;
  scan_args scan = scan_of(run, a, common);
  scan.x = a->kept, scan.z = z, scan.y = seen;
  scan.x_token = taken, scan.z_token = values;
  p->into.y = a->kept, p->into.rest = z, p->into.rest_begin = width, p->into.rest_row = values;
  p->beside.y = a->kept + width, p->out.x = seen;
  p->into.y_row = p->beside.y_row = taken;
  if (a->unscanned) {
    const scan_args before = unscanned_scan(run, a, taken, 0);
    gated_delta_mixer_run(&a->delta, &before, common->between);
  }
  const linear_args projections[] = {p->beside, p->into};
  linear_run_all(projections, 2, common->products);
  gated_delta_mixer_run(&a->delta, &scan, seen + n * values);
  linear_run(&p->out, common->products);
}

/* `project` gives b | c | x, and the scan reads b * x. */
static void short_conv_sublayer(const fused_args *run, const recurrent_args *a, sublayer_products *p,
    workspace *common) {
  const int64_t width = p->out.inputs;
  float *projected = common->between, *seen = projected + p->out.rows * a->projected;
  causal_conv_args conv = {
      .x = a->unscanned, .tail = a->tail, .taps = a->conv.taps, .bias = a->conv.bias,
      .counts = a->unscanned_counts, .begins = a->unscanned_begins, .y = seen + p->out.rows * width,
      .next = a->next_tail, .rows = run->rows, .tokens = a->unscanned_tokens,
      .width = width, .kernel = a->conv.kernel, .threads = run->threads, .x_token = width,
      .tail_row = (a->conv.kernel - 1) * width};
  if (a->unscanned) {
    conv_run(&conv);
    conv.tail = a->next_tail;
  }
  conv.x = a->kept, conv.counts = run->counts, conv.begins = common->packed.begins, conv.y = seen;
  conv.tokens = run->tokens, conv.marks = a->marks, conv.marked = a->marked_tail;
  p->into.y = projected, p->out.x = seen;
  linear_run(&p->into, common->products);
  gated_conv_run(&conv, projected, a->kept);
  linear_run(&p->out, common->products);
}

void recurrent_sublayer(const fused_args *run, const sublayer_args *sublayer, sublayer_products *p, workspace *common) {
  if (sublayer->kind == MAMBA2) mamba2_sublayer(run, &sublayer->recurrent, p, common);
  else if (sublayer->kind == SHORT_CONV) short_conv_sublayer(run, &sublayer->recurrent, p, common);
  else gated_delta_sublayer(run, &sublayer->recurrent, p, common);
}
