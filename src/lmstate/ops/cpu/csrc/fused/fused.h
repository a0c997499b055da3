/* Sublayers of a decoder's blocks, and the workspace that fused ones share; see fused.c. */
#ifndef LMSTATE_FUSED_H
#define LMSTATE_FUSED_H
#include "attention/attend_args.h"
#include "dense/linear_args.h"
#include "recurrent/mixers.h"
#include "team.h"

typedef struct {
  /* The same in every step. */
  const float *norm;     /* [inputs], or null */
  const void *qkv;       /* [(H or, gated, 2H) * D + 2 * K * D, inputs]; without the last where it reads alone,
                          * and H more with a gate a head */
  const float *qkv_bias;
  const float *q_norm, *k_norm; /* of each head, or of all that a token has; or null */
  const float *v_norm;          /* of each head, or null */
  const float *sinks;
  const void *out; /* [outputs, H * D] */
  const float *out_bias, *after; /* the last as in linear_args */
  int64_t inputs, outputs, heads, kv_heads, dim, gated, q_norm_width, k_norm_width, qkv_kind, out_kind;
  int64_t reads;      /* what another layer stored, and stores nothing */
  int64_t gates;      /* the last rows of qkv: 0, or H, which gate a head each */
  double norm_eps, q_eps, k_eps, v_eps, scale, softcap, after_eps, residual_scale;
  const int64_t *starts; /* [R], where they are not the step's; or null */
  /* The rings. */
  void *k, *v;           /* as in attend_args */
  float *columns;        /* [R, K, planes, S], of this call alone, as in attend_args; or null */
  float *queries;        /* [R, T, H, D], filled with the queries as they attend; or null */
  char *const *k_table, *const *v_table; /* as in attend_args */
  int64_t slots, k_row, k_head, k_slot, v_row, v_head, v_slot, table_row, block, planes, kind, window, chunk;
  codes_args codes; /* bits: 0 where they are floats */
  /* The rotation. */
  const float *cos, *sin; /* [R, T, half]; or [positions, half], of the positions from 0 on */
  int64_t half, interleaved, positions; /* the last 0 where they are of the tokens */
} attention_args;

typedef struct {
  const float *norm; /* [inputs], or null */
  const void *up;    /* [2 * hidden, inputs], gate | up */
  const float *up_bias;
  const void *down; /* [outputs, hidden] */
  const float *down_bias, *after, *factors; /* the last two as in linear_args, factors of up */
  int64_t inputs, hidden, outputs, up_kind, down_kind, gate;
  int64_t parallel; /* reads what the sublayer before it read, and is added to what that gave */
  double eps, after_eps, residual_scale;
} mlp_args;

/* The mixer of a gated short convolution. */
typedef struct {
  const float *taps, *bias; /* [C, W], [W] or null */
  int64_t kernel;
} gated_conv_parts;

/* A recurrent layer: two products beside each other, a mixer, and the product back. */
typedef struct {
  const float *norm;   /* [inputs], or null */
  const void *project; /* [projected, inputs]: q, k, v | z of a delta rule; gate | x, B, C | dt of a state space;
                        * b | c | x of a gated convolution */
  const float *bias;
  const void *gates;   /* [.., inputs]: beta | decay of a delta rule; or null */
  const void *out;     /* [outputs, I] */
  const float *out_bias, *after, *factors; /* the last two as in linear_args, factors of project */
  int64_t inputs, projected, outputs, project_kind, gates_kind, out_kind;
  int64_t parallel; /* as in mlp_args */
  double norm_eps, after_eps, residual_scale;
  union {
    gated_delta_parts delta;
    mamba2_parts ssd;
    gated_conv_parts conv;
  };
  /* Different in each step: the carry, read and made, and the inputs of the scan. */
  const float *tail, *carry; /* a convolution alone has but a tail */
  float *next_tail, *next;
  float *kept; /* [N, F] of a delta rule, [N, projected] of a state space, b * x of a gated convolution */
  /* Inputs of the scan that come before those of this step and are not in the carry yet, without padding; or null. */
  const float *unscanned;                              /* [.., F] */
  const int64_t *unscanned_counts, *unscanned_begins; /* [R], [R + 1] */
  const int64_t *marks;                               /* as in scan_args, and so is what follows */
  float *marked_tail, *marked;
  int64_t unscanned_tokens;                            /* of the row that has most */
} recurrent_args;

typedef struct {
  const void *up, *down; /* [2 * hidden, inputs], gate | up; [outputs, hidden] */
  const float *up_bias, *down_bias; /* or null */
  int64_t hidden, up_kind, down_kind;
} expert;

/* A mixture of experts: see lmstate.models.layers.moe. */
typedef struct {
  const float *norm;    /* [inputs], or null */
  const void *router;   /* [count, inputs] */
  const float *bias, *correction; /* [count], on the logits and on the choice; or null */
  const expert *experts; /* [count], and the shared one behind them where there is one */
  const void *shared_gate; /* [1, inputs], or null */
  const float *after; /* as in linear_args */
  int64_t inputs, outputs, router_kind, shared_gate_kind, count, top_k, shared, gate;
  int64_t sigmoid, normalize, groups, topk_groups, top2, scale_input;
  double norm_eps, after_eps, residual_scale, scale, floor;
} moe_args;

enum { ATTENTION, MLP, GATED_DELTA, MAMBA2, MOE, SHORT_CONV }; /* lmstate.ops.cpu has the same numbers */
typedef struct {
  int64_t kind;
  union {
    attention_args attention;
    mlp_args mlp;
    recurrent_args recurrent; /* GATED_DELTA, MAMBA2 and SHORT_CONV */
    moe_args experts;
  };
} sublayer_args;

typedef struct {
  const float *x;        /* [R, T, inputs of the first sublayer] */
  const float *residual; /* what the first sublayer is added to, or null; the others are added to what they read */
  float *y;              /* [R, T, outputs of the last sublayer], zeros at padding */
  const int64_t *starts, *counts; /* [R]; counts: or null, all are real */
  const int64_t *keep; /* [R], or null: y has the last keep[r] tokens of each row, [R, kept, ..] */
  int64_t rows, tokens, count, threads, kept;
  sublayer_args sublayers[];
} fused_args;

/* Shared by fused sublayers: which N tokens are no padding, memory for the products, activations between them, and
 * the plan of an attention. */
typedef struct {
  packed_tokens packed;
  char *products;
  float *between;
  attend_plan plan;
  int64_t status; /* of the first attend_begin that failed */
} workspace;

/* The products of a sublayer, but for x, y and residual, the bytes that they need, and how many floats are between
 * them. */
typedef struct {
  linear_args into, beside, out; /* beside: of the same x as `into`, where its weight is not null */
  size_t products;
  int64_t between;
} sublayer_products;

/* Each `_sublayer` is for every thread of an open parallel region: y = residual + scale * after(out(...(into(norm
 * x)))), all of them [N, ..]. */
void attention_products(const attention_args *a, sublayer_products *p);
int64_t attention_sublayer(const fused_args *run, const attention_args *a, sublayer_products *p, workspace *common,
                           int stored);
/* The keys and values of a step alone, where another step, of some of its last tokens, is to attend to them: that one
 * finds them `stored`. Whether attention can be done so. */
int64_t attention_store(const fused_args *run, const attention_args *a, sublayer_products *p, workspace *common);
int attention_stores_first(const attention_args *a);
void recurrent_products(const fused_args *run, const sublayer_args *sublayer, sublayer_products *p,
                        const workspace *common);
void recurrent_sublayer(const fused_args *run, const sublayer_args *sublayer, sublayer_products *p, workspace *common);
void moe_products(const fused_args *run, const moe_args *a, sublayer_products *p);
void moe_sublayer(const moe_args *a, sublayer_products *p, workspace *common);

#endif
