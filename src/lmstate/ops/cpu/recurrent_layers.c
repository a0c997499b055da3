/* A layer of a recurrent mixer in one parallel region, from the stream and back to it: norm, projections, what lies between
 * them, the projection back. */
#include "linear.h"
#include "recurrent_mixers.h"

/* What a layer has beside its mixer: products as in linear_args. */
typedef struct {
  const float *x, *norm; /* [N, E], N = rows * tokens; [E] or null */
  const void *project;   /* [P, E], what the mixer takes */
  const float *bias;
  const void *gates; /* [G, E] beside it, or null */
  const void *out;   /* [outputs, I] */
  const float *out_bias, *residual, *after;
  float *inputs; /* of the fold: [N, F], or where there are no gates all that was projected, [N, P] */
  float *y;      /* [N, outputs] */
  int64_t width, outputs, projected, project_kind, gates_kind, out_kind, threads;
  double eps, after_eps, scale;
} layer_args;

typedef struct {
  layer_args layer;
  delta_mixer_args mixer; /* x, z and y are made here */
} delta_layer_args;

typedef struct {
  layer_args layer;
  ssd_mixer_args mixer; /* x, z and y are made here */
} ssd_layer_args;

static linear_args into(const layer_args *a, int64_t rows, float *y) {
  const linear_args p = {.x = a->x, .weight = a->project, .bias = a->bias, .norm = a->norm, .y = y, .rows = rows,
                         .outputs = a->projected, .inputs = a->width, .kind = a->project_kind, .threads = a->threads,
                         .eps = a->eps};
  return p;
}

static linear_args out_of(const layer_args *a, int64_t rows, const float *x, int64_t inputs) {
  const linear_args p = {.x = x, .weight = a->out, .bias = a->out_bias, .residual = a->residual, .after = a->after,
                         .y = a->y, .rows = rows, .outputs = a->outputs, .inputs = inputs, .kind = a->out_kind,
                         .threads = a->threads, .after_eps = a->after_eps, .scale = a->scale};
  return p;
}

static size_t larger(size_t a, size_t b) { return a > b ? a : b; }

/* `project` gives q, k, v | z, `gates` gives beta | decay, and the fold's inputs are q, k, v | beta | decay. 0, or -1 where
 * there was no memory. */
int64_t lmstate_delta_layer(const delta_layer_args *given) {
  const layer_args *a = &given->layer;
  delta_mixer_args mixer = given->mixer;
  const int64_t n = mixer.rows * mixer.tokens, values = mixer.heads * mixer.value_dim;
  const int64_t conv = 2 * mixer.key_heads * mixer.key_dim + values;
  const int64_t gates = mixer.heads * (mixer.by_channel ? 1 + mixer.key_dim : 2), fold = conv + gates;
  if (n == 0) return 0;
  mixer.x = a->inputs, mixer.x_row = mixer.tokens * fold, mixer.x_token = fold;
  mixer.z_row = mixer.tokens * a->projected, mixer.z_token = a->projected, mixer.threads = a->threads;
  linear_args project = into(a, n, 0), gate = project, out = out_of(a, n, 0, values);
  gate.weight = a->gates, gate.bias = 0, gate.kind = a->gates_kind, gate.outputs = gates;
  const size_t most = larger(linear_memory(&project), larger(linear_memory(&gate), linear_memory(&out)));
  char *memory = malloc(most + (delta_mixer_memory(&mixer) + (size_t)(n * (a->projected + gates + values))) * sizeof(float));
  if (!memory) return -1;
  float *projected = (float *)(memory + most), *gated = projected + n * a->projected, *seen = gated + n * gates;
  project.y = projected, gate.y = gated, out.x = mixer.y = seen, mixer.z = projected + conv;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    linear_run(&gate, memory);
    linear_run(&project, memory);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < n; i++) {
      memcpy(a->inputs + i * fold, projected + i * a->projected, (size_t)conv * sizeof(float));
      memcpy(a->inputs + i * fold + conv, gated + i * gates, (size_t)gates * sizeof(float));
    }
    delta_mixer_run(&mixer, seen + n * values);
    linear_run(&out, memory);
  }
  free(memory);
  return 0;
}

/* `project` gives z | x, B, C | dt, and the fold's inputs are all but z. 0, or -1 where there was no memory. */
int64_t lmstate_ssd_layer(const ssd_layer_args *given) {
  const layer_args *a = &given->layer;
  ssd_mixer_args mixer = given->mixer;
  const int64_t n = mixer.rows * mixer.tokens, inner = mixer.heads * mixer.head_dim;
  if (n == 0) return 0;
  mixer.x = a->inputs + inner, mixer.z = a->inputs, mixer.threads = a->threads;
  mixer.x_row = mixer.z_row = mixer.tokens * a->projected, mixer.x_token = mixer.z_token = a->projected;
  linear_args project = into(a, n, a->inputs), out = out_of(a, n, 0, inner);
  const size_t most = larger(linear_memory(&project), linear_memory(&out));
  char *memory = malloc(most + (ssd_mixer_memory(&mixer) + (size_t)(n * inner)) * sizeof(float));
  if (!memory) return -1;
  float *seen = (float *)(memory + most);
  out.x = mixer.y = seen;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    linear_run(&project, memory);
    ssd_mixer_run(&mixer, seen + n * inner);
    linear_run(&out, memory);
  }
  free(memory);
  return 0;
}
