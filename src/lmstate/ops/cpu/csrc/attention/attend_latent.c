/* Attention over compressed latents: every query head reads the same latents, as keys and as values, and the same rope
 * key beside them. And what folds queries into latents and latents into outputs: a small matrix for each head. */
#include <stdlib.h>

#include "attention/attend_args.h"
#include "simd/simd.h"
#include "layout.h"

typedef struct {
  const float *q, *q_rope;        /* [R, T, H, L] and [R, T, H, P] by their strides, their last axes dense */
  const void *latent, *rope;      /* [R, S, L] and [R, S, P] by their strides, of `kind` */
  const int64_t *starts, *counts; /* [R] */
  float *out;                     /* [R, T, H, L], contiguous */
  char *const *latent_table, *const *rope_table; /* [R, table_row]: see attend_args */
  float *columns;                 /* [R, 1, planes, S] with `ends`, as in attend_args, or null */
  const int64_t *ends;
  const float *sinks;             /* [H], or null: see attend_args */
  int64_t rows, tokens, heads, slots, dim, rope_dim, planes;
  int64_t q_row, q_token, q_head, qr_row, qr_token, qr_head;
  int64_t latent_row, latent_slot, rope_row, rope_slot;
  int64_t table_row, block;
  int64_t kind, window, threads; /* window: 0 where there is none */
  double scale;
} attend_latent_args;

/* Heads that a task reads latents for: enough that reading them costs little, few enough that short rows are split
 * too. */
static int64_t heads_together(int64_t heads) {
  int64_t together = 8;
  while (heads % together) together /= 2;
  return together;
}

/* Status as of lmstate_attend. */
int64_t lmstate_attend_latent(const attend_latent_args *a) {
  if (a->rows == 0 || a->tokens == 0) return 0;
  const int64_t width = a->dim + a->rope_dim, n = a->rows * a->tokens * a->heads;
  /* A group of heads is a kv head whose latents are where those of the others do; columns are averaged over a group. */
  const int64_t together = a->columns ? a->heads : heads_together(a->heads);
  attend_args attend = {.k = a->latent, .v = a->latent, .k_table = a->latent_table, .v_table = a->latent_table,
                        .table_row = a->table_row, .block = a->block, .starts = a->starts, .counts = a->counts,
                        .out = a->out, .columns = a->columns, .ends = a->ends, .sinks = a->sinks, .planes = a->planes,
                        .rows = a->rows, .tokens = a->tokens, .heads = a->heads,
                        .kv_heads = a->heads / together, .slots = a->slots, .dim = a->dim,
                        .dim_v = a->dim, .q_row = a->tokens * a->heads * width, .q_token = a->heads * width,
                        .q_head = width, .k_row = a->latent_row, .k_slot = a->latent_slot, .v_row = a->latent_row,
                        .v_slot = a->latent_slot, .kind = a->kind, .window = a->window, .scale = a->scale};
  const extra_key_args extra_key = {a->rope, a->rope_table, a->rope_dim, a->rope_row, a->rope_slot};
  attend_plan plan;
  const int64_t status = attend_begin(&attend, NULL, NULL, &plan);
  if (status) return status;
  plan.extra_key = &extra_key;
  float *q = malloc((size_t)(n * width) * sizeof(float));
  if (!q) {
    attend_end(&plan);
    return -1;
  }
  attend.q = q;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      const int64_t r = i / (a->tokens * a->heads), t = i / a->heads % a->tokens, h = i % a->heads;
      memcpy(q + i * width, a->q + r * a->q_row + t * a->q_token + h * a->q_head, (size_t)a->dim * sizeof(float));
      if (a->rope_dim)
        memcpy(q + i * width + a->dim, a->q_rope + r * a->qr_row + t * a->qr_token + h * a->qr_head,
               (size_t)a->rope_dim * sizeof(float));
    }
    attend_run(&attend, &plan);
  }
  free(q);
  attend_end(&plan);
  return 0;
}

typedef struct {
  const float *x;   /* [N, H, A] by its strides, its last axis dense */
  const void *w;    /* [H, A, B], contiguous, of `kind` */
  float *y;         /* [N, H, B], contiguous */
  int64_t rows, heads, inputs, outputs, kind, threads;
  int64_t x_row, x_head;
} per_head_matmul_args;

enum { WIDE = 4, TALL = 4, STRIP = WIDE * VL };

/* Outputs b.. of a head for `tall` rows from `row` on. A row is summed along the inputs in one order, whatever is
 * beside it. `tall`, `whole` (no output of the strip is missing) and `kind` are constants where this is called. */
INLINE void strip(const per_head_matmul_args *a, int64_t h, int64_t b, int64_t row, int tall, int whole, int kind) {
  const int64_t at = h * a->inputs * a->outputs + b, left = a->outputs - b;
  const float *x = a->x + row * a->x_row + h * a->x_head;
  vf acc[TALL][WIDE];
  UNROLL for (int m = 0; m < tall; m++)
    UNROLL for (int j = 0; j < WIDE; j++) acc[m][j] = vf_zero();
  for (int64_t i = 0; i < a->inputs; i++) {
    vf w[WIDE];
    UNROLL for (int j = 0; j < WIDE; j++) {
      const int64_t rest = left - j * VL;
      if (whole || rest >= VL) w[j] = load(kind, a->w, at + i * a->outputs + j * VL);
      else w[j] = rest > 0 ? load_part(kind, a->w, at + i * a->outputs + j * VL, (int)rest) : vf_zero();
    }
    UNROLL for (int m = 0; m < tall; m++) {
      const vf v = vf_set1(x[m * a->x_row + i]);
      UNROLL for (int j = 0; j < WIDE; j++) acc[m][j] = vf_fma(v, w[j], acc[m][j]);
    }
  }
  UNROLL for (int m = 0; m < tall; m++) {
    float *y = a->y + ((row + m) * a->heads + h) * a->outputs + b;
    UNROLL for (int j = 0; j < WIDE; j++) {
      const int64_t rest = left - j * VL;
      if (whole || rest >= VL) vf_store(y + j * VL, acc[m][j]);
      else if (rest > 0) store_part(y + j * VL, acc[m][j], (int)rest);
    }
  }
}

INLINE void strips(const per_head_matmul_args *a, int64_t h, int64_t b, int whole, int kind) {
  int64_t row = 0;
  for (; row + TALL <= a->rows; row += TALL) strip(a, h, b, row, TALL, whole, kind);
  for (; row < a->rows; row++) strip(a, h, b, row, 1, whole, kind);
}

#define STRIPS_OF(name, kind) \
  static void name(const per_head_matmul_args *a, int64_t h, int64_t b) { \
    if (b + STRIP <= a->outputs) strips(a, h, b, 1, kind); \
    else strips(a, h, b, 0, kind); \
  }
STRIPS_OF(strips_f32, F32)
STRIPS_OF(strips_bf16, BF16)
STRIPS_OF(strips_f16, F16)

/* y[n, h] = x[n, h] w[h] */
void lmstate_per_head_matmul(const per_head_matmul_args *a) {
  const int64_t each = (a->outputs + STRIP - 1) / STRIP;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t i = 0; i < a->heads * each; i++) {
    const int64_t h = i / each, b = i % each * STRIP;
    if (a->kind == F32) strips_f32(a, h, b);
    else if (a->kind == BF16) strips_bf16(a, h, b);
    else strips_f16(a, h, b);
  }
}

EXPORT_SIZE(attend_latent_args);
EXPORT_SIZE(per_head_matmul_args);
