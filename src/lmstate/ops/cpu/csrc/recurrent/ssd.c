/* The state space of Mamba-2: S [P, N] a head, S_t = decay_t S_{t-1} + w_t x_t B_t^T, y_t = S_t C_t + D x_t.
 *
 * A tile of the state stays in registers while the tokens of a run pass it. */
#include "recurrent/recurrent.h"
#include "layout.h"

enum { TALL = 4, WIDE = VL == 16 ? 4 : 2, AHEAD = 4 };

/* The tile of features p.. and states n.. of a head over `count` tokens from `first` on. y has the other tiles' part.
 * `whole`, a constant where this is called: no feature or state of the tile is missing. `past` the caches:
 * `bypasses`. */
INLINE void tile(const ssd_args *a, int64_t r, int64_t h, int64_t first, int64_t count, int64_t p, int64_t n,
                 const float *weight, const float *decay, const float *from, float *to, int whole, int past) {
  const int64_t group = h / (a->heads / a->groups), tall = a->head_dim - p, wide = a->states - n;
  const float *x = a->x + token_at(a->begins, r, first, a->x_row, a->x_token) + h * a->x_head + p;
  const float *B = a->B + token_at(a->begins, r, first, a->B_row, a->B_token) + group * a->B_group + n;
  const float *C = a->C + token_at(a->begins, r, first, a->C_row, a->C_token) + group * a->C_group + n;
  float *y = a->y + (token_at(a->begins, r, first, a->tokens, 1) * a->heads + h) * a->head_dim + p;
  const int64_t at = p * a->states + n;
  vf S[TALL][WIDE];
  UNROLL for (int i = 0; i < TALL; i++)
    UNROLL for (int j = 0; j < WIDE; j++)
      S[i][j] = whole ? vf_load(from + at + i * a->states + j * VL)
                      : load_some(from + at + i * a->states + j * VL, i < tall ? wide - j * VL : 0);
  for (int64_t t = 0; t < count; t++) {
    const vf keep = vf_set1(decay[t]);
    vf value[TALL], sum[TALL];
    float sums[TALL];
    UNROLL for (int i = 0; i < TALL; i++)
      value[i] = vf_set1(whole || i < tall ? weight[t] * x[i] : 0.0f), sum[i] = vf_zero();
    UNROLL for (int j = 0; j < WIDE; j++) {
      const vf b = whole ? vf_load(B + j * VL) : load_some(B + j * VL, wide - j * VL);
      const vf c = whole ? vf_load(C + j * VL) : load_some(C + j * VL, wide - j * VL);
      UNROLL for (int i = 0; i < TALL; i++) {
        S[i][j] = vf_fma(value[i], b, vf_mul(keep, S[i][j]));
        sum[i] = vf_fma(S[i][j], c, sum[i]);
      }
    }
    vf_sum4(sum[0], sum[1], sum[2], sum[3], sums);
    UNROLL for (int i = 0; i < TALL; i++)
      if (whole || i < tall) y[i] += sums[i];
    x += a->x_token, B += a->B_token, C += a->C_token, y += a->heads * a->head_dim;
  }
  UNROLL for (int i = 0; i < TALL; i++)
    UNROLL for (int j = 0; j < WIDE; j++) {
      if (past) vf_stream(to + at + i * a->states + j * VL, S[i][j]);
      else if (whole) vf_store(to + at + i * a->states + j * VL, S[i][j]);
      else store_some(to + at + i * a->states + j * VL, S[i][j], i < tall ? wide - j * VL : 0);
    }
}

typedef void tile_of(const ssd_args *a, int64_t r, int64_t h, int64_t first, int64_t count, int64_t p, int64_t n,
                     const float *weight, const float *decay, const float *from, float *to);
#define TILE(name, whole, past)                                                                                     \
  static void name(const ssd_args *a, int64_t r, int64_t h, int64_t first, int64_t count, int64_t p, int64_t n,       \
                   const float *weight, const float *decay, const float *from, float *to) {                           \
    tile(a, r, h, first, count, p, n, weight, decay, from, to, whole, past);                                          \
  }
TILE(whole_tile, 1, 0)
TILE(past_tile, 1, 1)
TILE(part_tile, 0, 0)

static void run_head(const ssd_args *a, int64_t r, int64_t h) {
  const int64_t real = real_tokens(a->counts, r, a->tokens), size = a->head_dim * a->states;
  const float *from = a->carry + r * a->carry_row + h * size;
  float *to = a->next + (r * a->heads + h) * size;
  float *y = a->y + (token_at(a->begins, r, 0, a->tokens, 1) * a->heads + h) * a->head_dim;
  const int64_t mark = a->marks ? a->marks[r] : 0;
  const int past = real <= RUN && !mark && bypasses(to, a->states, a->heads * size);
  for (int64_t first = 0, count; first < real; first += count, from = to) {
    count = at_most(RUN, (first < mark ? mark : real) - first);
    float weight[RUN], decay[RUN];
    for (int64_t t = 0; t < count; t++) {
      const float raw = a->dt[token_at(a->begins, r, first + t, a->dt_row, a->dt_token) + h * a->dt_head];
      const float dt = softplus(a->bias ? raw + a->bias[h] : raw);
      weight[t] = dt < (float)a->low ? (float)a->low : dt > (float)a->high ? (float)a->high : dt;
      decay[t] = expf(weight[t] * a->A[h]);
      const float *x = a->x + token_at(a->begins, r, first + t, a->x_row, a->x_token) + h * a->x_head;
      float *out = y + (first + t) * a->heads * a->head_dim;
      for (int64_t p = 0; p < a->head_dim; p++) out[p] = a->D ? a->D[h] * x[p] : 0.0f;
    }
    for (int64_t p = 0; p < a->head_dim; p += TALL) {
      ahead(from + (p + AHEAD * TALL) * a->states, past ? 0 : to + (p + AHEAD * TALL) * a->states, TALL * a->states);
      for (int64_t n = 0; n < a->states; n += WIDE * VL) {
        const int whole = p + TALL <= a->head_dim && n + WIDE * VL <= a->states;
        tile_of *const run = !whole ? part_tile : past ? past_tile : whole_tile;
        run(a, r, h, first, count, p, n, weight, decay, from, to);
      }
    }
    if (first + count == mark) memcpy(a->marked + (r * a->heads + h) * size, to, (size_t)size * sizeof(float));
  }
  if (!real && to != from) memcpy(to, from, (size_t)size * sizeof(float));
  for (int64_t t = real; t < placed_tokens(a->begins, real, a->tokens); t++)
    memset(y + t * a->heads * a->head_dim, 0, (size_t)a->head_dim * sizeof(float));
}

void ssd_run(const ssd_args *a) {
#pragma omp for schedule(static) nowait
  for (int64_t i = 0; i < a->rows * a->heads; i++) run_head(a, i / a->heads, i % a->heads);
  team_barrier();
}

void lmstate_ssd(const ssd_args *a) {
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  ssd_run(a);
}

EXPORT_SIZE(ssd_args);
