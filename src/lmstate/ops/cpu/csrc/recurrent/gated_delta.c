/* The gated delta rule and its plain kin: a matrix S [Dk, Dv] a head that decays, takes k_t u_t^T and answers q_t.
 *
 *     D_t = decay_t S_{t-1}      u_t = beta_t (v_t - k_t^T D_t), or v_t alone      S_t = D_t + k_t u_t^T
 *     o_t = q_t^T S_t = q_t^T D_t + (q_t^T k_t) u_t
 *
 * A block of columns needs nothing of the others. It is copied beside the carry, and one sweep over it writes token t
 * and reads for token t + 1; so a single token reads the old carry once and writes the new one once. */
#include "recurrent/recurrent.h"
#include "layout.h"

enum { VECTORS = VL == 16 ? 2 : 4, COLUMNS = VECTORS * VL };

/* One thread's memory: of RUN tokens k, q (scaled), decays, k^T q and beta, and v where it is convolved; and a block of
 * columns. */
typedef struct {
  float *k, *q, *decay, *hits, *beta, *block, *v;
} scratch;

static size_t scratch_size(const gated_delta_rule_args *a) { /* in floats */
  return (size_t)((3 * RUN + COLUMNS) * a->key_dim + 2 * RUN + RUN * a->value_dim);
}

static scratch scratch_of(const gated_delta_rule_args *a, float *p) {
  const int64_t d = a->key_dim;
  scratch s = {.k = p, .q = p + RUN * d, .decay = p + 2 * RUN * d, .hits = p + 3 * RUN * d};
  s.beta = s.hits + RUN, s.block = s.beta + RUN, s.v = s.block + COLUMNS * d;
  return s;
}

/* to = x * factor, or x / sqrt(|x|^2 + 1e-6) * factor */
static void scaled(const float *x, float *to, int64_t n, float factor, int64_t normalize) {
  if (normalize) factor /= sqrtf(dot(x, x, n) + 1e-6f);
  for (int64_t i = 0; i < n; i += VL) store_some(to + i, vf_mul(load_some(x + i, n - i), vf_set1(factor)), n - i);
}

static void prepare(const gated_delta_rule_args *a, const scratch *s, int64_t r, int64_t h, int64_t first, int64_t n) {
  const int64_t dim = a->key_dim, key_head = h / (a->heads / a->key_heads);
  for (int64_t i = 0; i < n; i++) {
    const int64_t t = first + i;
    float *k = s->k + i * dim, *q = s->q + i * dim;
    const float *from_k = k, *from_q = q;
    if (a->conv) {
      const int64_t keys = a->key_heads * dim, values = 2 * keys + h * a->value_dim;
      conv_token(a->conv, r, t, key_head * dim, (key_head + 1) * dim, q);
      conv_token(a->conv, r, t, keys + key_head * dim, keys + (key_head + 1) * dim, k);
      conv_token(a->conv, r, t, values, values + a->value_dim, s->v + i * a->value_dim);
    } else {
      from_k = a->k + token_at(a->begins, r, t, a->k_row, a->k_token) + key_head * a->k_head;
      from_q = a->q + token_at(a->begins, r, t, a->q_row, a->q_token) + key_head * a->q_head;
    }
    scaled(from_k, k, dim, 1.0f, a->normalize);
    scaled(from_q, q, dim, (float)a->scale, a->normalize);
    s->hits[i] = dot(q, k, dim);
    s->beta[i] = 1.0f;
    if (a->beta) s->beta[i] = a->beta[token_at(a->begins, r, t, a->beta_row, a->beta_token) + h * a->beta_head];
    if (a->A) s->beta[i] = (float)a->beta_scale / (1.0f + expf(-s->beta[i]));
    const float *g = a->g + token_at(a->begins, r, t, a->g_row, a->g_token) + h * a->g_head;
    if (!a->by_channel) s->decay[i * dim] = expf(a->A ? a->A[h] * softplus(g[0] + a->bias[h]) : g[0]);
    else
      for (int64_t d = 0; d < dim; d += VL) {
        vf x = load_some(g + d, dim - d);
        if (a->A) x = vf_mul(vf_set1(a->A[h]), vf_softplus(vf_add(x, load_some(a->bias + h * dim + d, dim - d))));
        store_some(s->decay + i * dim + d, vf_exp(x), dim - d);
      }
  }
}

/* The values of token `first + i`, of which the scratch has those from `first` on. */
INLINE const float *values_of(const gated_delta_rule_args *a, const scratch *s, int64_t r, int64_t h, int64_t first,
                              int64_t i) {
  if (a->conv) return s->v + i * a->value_dim;
  return a->v + token_at(a->begins, r, first + i, a->v_row, a->v_token) + h * a->v_head;
}

/* The flags of a sweep are constants where it is called. */
enum { LOAD = 1, WRITE = 2, READ = 4, SAVE = 8, CHANNELS = 16, CORRECT = 32, WHOLE = 64, ANSWER = 128 };

/* A number of a token for all columns: loaded once where registers suffice, for loads would take longer than the
 * arithmetic. */
INLINE vf for_columns(float x) { return VL == 16 ? vf_in_register(vf_set1(x)) : vf_set1(x); }

/* Over the block's rows d: take the state from `outer` (LOAD), add k u (WRITE), decay it and read it with the next k
 * and q (READ; q where there is to be an ANSWER), or bring it to `outer` (SAVE). */
INLINE void sweep(float *block, const float *from, float *to, int64_t stride, int64_t columns, int64_t dim,
                  const float *k, const vf *u, const float *decay, const float *next_k, const float *next_q,
                  vf *answer, vf *out, int flags) {
  vf by_k[VECTORS], by_q[VECTORS];
  UNROLL for (int j = 0; j < VECTORS; j++) by_k[j] = by_q[j] = vf_zero();
  vf a = vf_set1(flags & READ ? decay[0] : 0.0f);
  for (int64_t d = 0; d < dim; d++) {
    const vf own_k = for_columns(flags & WRITE ? k[d] : 0.0f);
    const vf reads_k = for_columns(flags & READ && flags & CORRECT ? next_k[d] : 0.0f);
    const vf reads_q = for_columns(flags & READ && flags & ANSWER ? next_q[d] : 0.0f);
    if (flags & READ && flags & CHANNELS) a = vf_set1(decay[d]);
    if (flags & LOAD && flags & WHOLE) ahead(from + (d + 32) * stride, to + (d + 32) * stride, COLUMNS);
    UNROLL for (int j = 0; j < VECTORS; j++) {
      vf x;
      if (!(flags & LOAD)) x = vf_load(block + d * COLUMNS + j * VL);
      else if (flags & WHOLE) x = vf_load(from + d * stride + j * VL);
      else x = load_some(from + d * stride + j * VL, columns - j * VL);
      if (flags & WRITE) x = vf_fma(own_k, u[j], x);
      if (flags & READ) {
        x = vf_mul(a, x);
        if (flags & CORRECT) by_k[j] = vf_fma(reads_k, x, by_k[j]);
        if (flags & ANSWER) by_q[j] = vf_fma(reads_q, x, by_q[j]);
      }
      if (!(flags & SAVE)) vf_store(block + d * COLUMNS + j * VL, x);
      else if (flags & WHOLE) vf_store(to + d * stride + j * VL, x);
      else store_some(to + d * stride + j * VL, x, columns - j * VL);
    }
  }
  UNROLL for (int j = 0; j < VECTORS; j++) answer[j] = by_k[j], out[j] = by_q[j];
}

/* n tokens from `first` on, for columns c .. c + columns of a head; `from` and `to` are that head's state. */
INLINE void run_block(const gated_delta_rule_args *a, const scratch *s, int64_t r, int64_t h, int64_t first, int64_t n,
                      int64_t c, int64_t columns, const float *from, float *to, int flags) {
  const int64_t dim = a->key_dim, stride = a->value_dim;
  vf answer[VECTORS], out[VECTORS], u[VECTORS];
  sweep(s->block, from + c, to + c, stride, columns, dim, 0, 0, s->decay, s->k, s->q, answer, out, flags | LOAD | READ);
  for (int64_t i = 0; i < n; i++) {
    const float *v = values_of(a, s, r, h, first, i) + c;
    float *y = 0;
    if (flags & ANSWER) y = a->y + (token_at(a->begins, r, first + i, a->tokens, 1) * a->heads + h) * stride + c;
    UNROLL for (int j = 0; j < VECTORS; j++) {
      const int64_t left = flags & WHOLE ? VL : columns - j * VL;
      u[j] = load_some(v + j * VL, left);
      if (flags & CORRECT) u[j] = vf_mul(vf_set1(s->beta[i]), vf_sub(u[j], answer[j]));
      if (flags & ANSWER) store_some(y + j * VL, vf_fma(vf_set1(s->hits[i]), u[j], out[j]), left);
    }
    const float *k = s->k + i * dim, *q = s->q + i * dim, *decay = s->decay + i * dim;
    if (i + 1 < n)
      sweep(s->block, 0, 0, 0, 0, dim, k, u, decay + dim, k + dim, q + dim, answer, out, flags | WRITE | READ);
    else
      sweep(s->block, 0, to + c, stride, columns, dim, k, u, 0, 0, 0, answer, out, flags | WRITE | SAVE);
  }
}

INLINE void run_columns(const gated_delta_rule_args *a, const scratch *s, int64_t r, int64_t h, int64_t first,
                        int64_t n, const float *from, float *to, int flags) {
  int64_t c = 0;
  for (; c + COLUMNS <= a->value_dim; c += COLUMNS)
    run_block(a, s, r, h, first, n, c, COLUMNS, from, to, flags | WHOLE);
  if (c < a->value_dim) run_block(a, s, r, h, first, n, c, a->value_dim - c, from, to, flags);
}

#define RUN_KIND(name, flags) \
  static void run_##name(const gated_delta_rule_args *a, const scratch *s, int64_t r, int64_t h, int64_t first, \
                         int64_t n, const float *from, float *to) { \
    run_columns(a, s, r, h, first, n, from, to, flags); \
  }
RUN_KIND(plain, ANSWER)
RUN_KIND(scalar, CORRECT | ANSWER)
RUN_KIND(channels, CORRECT | CHANNELS | ANSWER)
RUN_KIND(scalar_again, CORRECT)
RUN_KIND(channels_again, CORRECT | CHANNELS)

/* A single token of `wide` whole vectors of columns at a time: two passes over the carry, the second from the cache,
 * and no block between them. The arithmetic is that of the sweeps. */
INLINE void one_token(const gated_delta_rule_args *a, const scratch *s, int64_t r, int64_t h, int64_t wide,
                      const float *from, float *to, int flags) {
  const int64_t dim = a->key_dim, stride = a->value_dim;
  const int past = bypasses(to, stride, a->heads * dim * stride);
  const float *v = values_of(a, s, r, h, 0, 0);
  float *y = a->y + (token_at(a->begins, r, 0, a->tokens, 1) * a->heads + h) * a->value_dim;
  for (int64_t c = 0; c < stride; c += wide * VL) {
    vf by_k[8], by_q[8], u[8];
    UNROLL for (int j = 0; j < wide; j++) by_k[j] = by_q[j] = vf_zero();
    for (int64_t d = 0; d < dim; d++) {
      const vf keep = vf_set1(s->decay[flags & CHANNELS ? d : 0]), k = vf_set1(s->k[d]), q = vf_set1(s->q[d]);
      UNROLL for (int j = 0; j < wide; j++) {
        __builtin_prefetch(from + (d + 12) * stride + c + j * VL, 0, 2);
        const vf x = vf_mul(keep, vf_load(from + d * stride + c + j * VL));
        if (flags & CORRECT) by_k[j] = vf_fma(k, x, by_k[j]);
        by_q[j] = vf_fma(q, x, by_q[j]);
      }
    }
    UNROLL for (int j = 0; j < wide; j++) {
      u[j] = vf_load(v + c + j * VL);
      if (flags & CORRECT) u[j] = vf_mul(vf_set1(s->beta[0]), vf_sub(u[j], by_k[j]));
      vf_store(y + c + j * VL, vf_fma(vf_set1(s->hits[0]), u[j], by_q[j]));
    }
    for (int64_t d = 0; d < dim; d++) {
      const vf keep = vf_set1(s->decay[flags & CHANNELS ? d : 0]), k = vf_set1(s->k[d]);
      UNROLL for (int j = 0; j < wide; j++) {
        const int64_t at = d * stride + c + j * VL;
        const vf x = vf_fma(k, u[j], vf_mul(keep, vf_load(from + at)));
        if (past) vf_stream(to + at, x);
        else vf_store(to + at, x);
      }
    }
  }
}

enum { WIDEST = VL == 16 ? 8 : 4 }; /* vectors of columns whose sums fit the registers */

/* Whether it did it. */
static int run_one(const gated_delta_rule_args *a, const scratch *s, int64_t r, int64_t h, const float *from,
    float *to) {
  const int by_channel = a->by_channel != 0, correct = a->beta != 0;
  if (a->value_dim % (WIDEST * VL) == 0) {
    if (!correct) one_token(a, s, r, h, WIDEST, from, to, 0);
    else if (by_channel) one_token(a, s, r, h, WIDEST, from, to, CORRECT | CHANNELS);
    else one_token(a, s, r, h, WIDEST, from, to, CORRECT);
  } else if (a->value_dim % (4 * VL) == 0) {
    if (!correct) one_token(a, s, r, h, 4, from, to, 0);
    else if (by_channel) one_token(a, s, r, h, 4, from, to, CORRECT | CHANNELS);
    else one_token(a, s, r, h, 4, from, to, CORRECT);
  } else return 0;
  return 1;
}

static void run_head(const gated_delta_rule_args *a, const scratch *s, int64_t r, int64_t h) {
  const int64_t count = real_tokens(a->counts, r, a->tokens), size = a->key_dim * a->value_dim;
  const float *from = a->carry + r * a->carry_row + h * size;
  float *to = a->next + (r * a->heads + h) * size;
  const int64_t mark = a->marks ? a->marks[r] : 0;
  for (int64_t first = 0, n; first < count; first += n, from = to) {
    n = at_most(RUN, (first < mark ? mark : count) - first);
    prepare(a, s, r, h, first, n);
    if (count == 1 && a->y && run_one(a, s, r, h, from, to)) n = 1;
    else if (!a->beta) run_plain(a, s, r, h, first, n, from, to);
    else if (a->by_channel) (a->y ? run_channels : run_channels_again)(a, s, r, h, first, n, from, to);
    else (a->y ? run_scalar : run_scalar_again)(a, s, r, h, first, n, from, to);
    if (first + n == mark) memcpy(a->marked + (r * a->heads + h) * size, to, (size_t)size * sizeof(float));
  }
  if (!count && to != from) memcpy(to, from, (size_t)size * sizeof(float));
  const int64_t begin = token_at(a->begins, r, 0, a->tokens, 1), placed = placed_tokens(a->begins, count, a->tokens);
  for (int64_t t = count; a->y && t < placed; t++)
    memset(a->y + ((begin + t) * a->heads + h) * a->value_dim, 0, (size_t)a->value_dim * sizeof(float));
  if (a->norm)
    for (int64_t t = 0; t < count; t++) gated_norm_group(a->norm, begin + t, h);
}

size_t delta_memory(const gated_delta_rule_args *a) { return (size_t)a->threads * scratch_size(a); }

void delta_run(const gated_delta_rule_args *a, float *memory) {
  const scratch s = scratch_of(a, memory + (size_t)omp_get_thread_num() * scratch_size(a));
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < a->rows * a->heads; i++) run_head(a, &s, i / a->heads, i % a->heads);
  team_barrier();
}

/* 0, or -1 where there was no memory. */
int64_t lmstate_gated_delta_rule(const gated_delta_rule_args *a) {
  float *memory = malloc(delta_memory(a) * sizeof(float));
  if (!memory) return -1;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  delta_run(a, memory);
  free(memory);
  return 0;
}

EXPORT_SIZE(gated_delta_rule_args);
