/* Choosing positions (DeepSeek Sparse Attention, 2512.02556): small keys score what is stored, a query attends to the
 * positions of the largest scores. Or choosing blocks of them (MiniMax-M3), where each head chooses for itself by the
 * best key of a block. And putting what it attends to side by side. */
#include <stdlib.h>
#include <string.h>

#include "attention/attend_args.h"
#include "attention/tile.h"
#include "layout.h"

typedef struct {
  const float *q, *weights;       /* [R, T, H, D] and [R, T, H] by their strides, their last axes dense; blocks need no
                                   * weights */
  const void *keys;               /* [R, S, D] by its strides, of `kind`; nothing where there is a table */
  const int64_t *starts, *counts; /* [R] */
  char *const *table;             /* [R, table_row]: see attend_args */
  float *scores;                  /* [R, T, S]; of blocks [R, T, H, S] */
  int64_t *chosen;                /* [R, T, budget]: positions in order, then -1; of blocks [R, T, H, budget] */
  int64_t rows, tokens, heads, dim, slots, budget;
  int64_t q_row, q_token, q_head, w_row, w_token, key_row, key_slot, table_row, block, kind, threads;
  int64_t rate; /* tokens that a key represents: it is seen when all of them are */
  int64_t size, local; /* positions of a block, or 0; blocks up to the query's own that are chosen in any case */
} choose_args;

enum { RUN = 64, STRIP = 4 * VL }; /* positions that are stored together, and that registers hold the scores of */

/* Offset of position p of a row. */
INLINE const char *key_at(const choose_args *a, int64_t r, int64_t p) {
  const int64_t size = size_of((int)a->kind);
  return position_at(a->keys, r * a->key_row * size, a->table ? a->table + r * a->table_row : NULL, a->block, a->slots,
                     0, a->key_slot * size, p);
}

/* VL keys, of which `count` are there, each feature's side by side; zeros in the place of the others. What lies `ahead`
 * bytes from here is asked for. `kind` and `whole` (no key or feature is missing) are constants where this is called. */
INLINE void transpose_tile(const char *const *keys, int64_t count, int64_t d, int n, int64_t ahead, int whole, int kind,
                           float *turned) {
  vf part[VL];
  UNROLL16 for (int m = 0; m < VL; m++) {
    if (!whole && m >= count) {
      part[m] = vf_zero();
      continue;
    }
    if (d * size_of(kind) % 64 == 0) prefetch_ahead(kind, keys[m], d, ahead);
    part[m] = whole || n == VL ? load(kind, keys[m], d) : load_part(kind, keys[m], d, n);
  }
  vf_transpose(part);
  if (whole) UNROLL16 for (int m = 0; m < VL; m++) vf_store(turned + m * RUN, part[m]);
  else for (int m = 0; m < n; m++) vf_store(turned + m * RUN, part[m]);
}

INLINE void transpose_kind(const char *const *keys, int64_t count, int64_t dim, int64_t ahead, int kind, float *turned) {
  for (int64_t i = 0; i < RUN; i += VL)
    for (int64_t d = 0; d < dim; d += VL) {
      float *to = turned + d * RUN + i;
      const int n = dim - d < VL ? (int)(dim - d) : VL;
      if (i + VL <= count && n == VL) transpose_tile(keys + i, VL, d, n, ahead, 1, kind, to);
      else transpose_tile(keys + i, count - i, d, n, ahead, 0, kind, to);
    }
}

/* Keys first..first + RUN of a row. */
static void transpose(const choose_args *a, int64_t r, int64_t first, int64_t ahead, float *turned) {
  const int64_t count = a->slots - first < RUN ? a->slots - first : RUN;
  const char *keys[RUN];
  for (int64_t i = 0; i < count; i++) keys[i] = key_at(a, r, first + i);
  switch (a->kind) {
    case F32: transpose_kind(keys, count, a->dim, ahead, F32, turned); break;
    case BF16: transpose_kind(keys, count, a->dim, ahead, BF16, turned); break;
    default: transpose_kind(keys, count, a->dim, ahead, F16, turned);
  }
}

/* What heads h.. give the scores of a strip. A score is summed feature by feature and then head by head, whatever is
 * beside it. */
INLINE void heads_of_strip(const choose_args *a, const float *q, const float *weights, const float *keys, int64_t h,
                           int heads, vf *total) {
  vf acc[2][4];
  UNROLL for (int m = 0; m < heads; m++)
    UNROLL for (int j = 0; j < 4; j++) acc[m][j] = vf_zero();
  for (int64_t d = 0; d < a->dim; d++) {
    vf k[4];
    UNROLL for (int j = 0; j < 4; j++) k[j] = vf_load(keys + d * RUN + j * VL);
    UNROLL for (int m = 0; m < heads; m++) {
      const vf x = vf_set1(q[(h + m) * a->q_head + d]);
      UNROLL for (int j = 0; j < 4; j++) acc[m][j] = vf_fma(x, k[j], acc[m][j]);
    }
  }
  UNROLL for (int m = 0; m < heads; m++) {
    const vf w = vf_set1(weights[h + m]);
    UNROLL for (int j = 0; j < 4; j++) total[j] = vf_fma(w, vf_max(acc[m][j], vf_zero()), total[j]);
  }
}

static void score_run(const choose_args *a, const float *q, const float *weights, const float *keys, float *scores) {
  for (int64_t at = 0; at < RUN; at += STRIP) {
    vf total[4];
    UNROLL for (int j = 0; j < 4; j++) total[j] = vf_zero();
    int64_t h = 0;
    for (; h + 2 <= a->heads; h += 2) heads_of_strip(a, q, weights, keys + at, h, 2, total);
    if (h < a->heads) heads_of_strip(a, q, weights, keys + at, h, 1, total);
    UNROLL for (int j = 0; j < 4; j++) vf_store(scores + at + j * VL, total[j]);
  }
}

/* The scores of `count` keys by each head, S apart: single products, which are the same however many there are. The
 * keys that come next are `ahead` bytes from here. */
static void score_heads(const choose_args *a, const float *q, const char *keys, int64_t ahead, int64_t count,
                        float *scores, int64_t width) {
  float tile[TILE][SUB];
  for (int64_t h = 0; h < a->heads; h += TILE) {
    const int queries = (int)(a->heads - h < TILE ? a->heads - h : TILE);
    const float *each[TILE];
    for (int j = 0; j < queries; j++) each[j] = q + (h + j) * a->q_head;
    switch (a->kind) {
      case F32: FOR_QUERIES(score(each, N, keys, a->key_slot, a->dim, count, ahead, tile, 0, F32)) break;
      case BF16: FOR_QUERIES(score(each, N, keys, a->key_slot, a->dim, count, ahead, tile, 0, BF16)) break;
      default: FOR_QUERIES(score(each, N, keys, a->key_slot, a->dim, count, ahead, tile, 0, F16)) break;
    }
    for (int j = 0; j < queries; j++) memcpy(scores + (h + j) * width, tile[j], (size_t)count * sizeof(float));
  }
}

/* The best of n scores of each block, in place; that of the own block and of those near it is infinite. */
static void best_of_blocks(float *scores, int64_t n, int64_t size, int64_t local) {
  const int64_t blocks = (n + size - 1) / size;
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t end = (b + 1) * size < n ? (b + 1) * size : n;
    int64_t i = b * size;
    vf most = vf_set1(scores[i]);
    for (; i + VL <= end; i += VL) most = vf_max(most, vf_load(scores + i));
    float best = vf_largest(most);
    for (; i < end; i++) best = scores[i] > best ? scores[i] : best;
    scores[b] = b >= blocks - local ? INFINITY : best;
  }
}

/* In the order of floats; of both zeros the same. */
INLINE uint32_t ordered(float x) {
  const uint32_t bits = to_bits(x + 0.0f);
  return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

/* The positions of the `budget` largest of n scores, the later one of two that are the same. */
static void largest(const float *scores, int64_t n, int64_t budget, int64_t *chosen) {
  int64_t found = 0;
  if (n <= budget) {
    for (; found < n; found++) chosen[found] = found;
  } else {
    static const int bits[] = {11, 11, 10};
    uint32_t limit = 0, known = 0;
    int64_t left = budget, equal = 0; /* of what begins as the limit does: how many are wanted, and there are */
    for (int pass = 0, below = 32; pass < 3; pass++) {
      int64_t counts[2048] = {0};
      below -= bits[pass];
      const uint32_t mask = (1u << bits[pass]) - 1;
      for (int64_t i = 0; i < n; i++) {
        const uint32_t x = ordered(scores[i]);
        counts[x >> below & mask] += (x & known) == limit;
      }
      uint32_t bucket = mask;
      for (; counts[bucket] < left; bucket--) left -= counts[bucket];
      equal = counts[bucket], limit |= bucket << below, known |= mask << below;
    }
    for (int64_t i = 0, skip = equal - left; i < n; i++) {
      const uint32_t x = ordered(scores[i]);
      if (x > limit || (x == limit && skip-- <= 0)) chosen[found++] = i;
    }
  }
  for (; found < budget; found++) chosen[found] = -1;
}

/* How many keys token t of a row sees, and of how many it chooses. */
INLINE int64_t seen(const choose_args *a, int64_t r, int64_t t) { return (a->starts[r] + t + 1) / a->rate; }
INLINE int64_t candidates(const choose_args *a, int64_t r, int64_t t) {
  return a->size ? (seen(a, r, t) + a->size - 1) / a->size : seen(a, r, t);
}

/* The scores of the keys first..first + RUN of a row by every token that sees them, and has a choice. */
static void score_tokens(const choose_args *a, int64_t r, int64_t first, int64_t width, float *turned) {
  const int64_t each = a->size ? a->heads : 1, left = a->slots - first, count = left < RUN ? left : RUN;
  const char *keys = key_at(a, r, first);
  const int64_t ahead = first + RUN < seen(a, r, a->counts[r] - 1) ? key_at(a, r, first + RUN) - keys : 0;
  if (!a->size) transpose(a, r, first, ahead, turned);
  for (int64_t t = 0; t < a->counts[r]; t++) {
    if (seen(a, r, t) <= first || candidates(a, r, t) <= a->budget) continue;
    const float *q = a->q + r * a->q_row + t * a->q_token;
    float *scores = a->scores + (r * a->tokens + t) * each * width + first;
    if (a->size) score_heads(a, q, keys, ahead, count, scores, width);
    else score_run(a, q, a->weights + r * a->w_row + t * a->w_token, turned, scores);
  }
}

/* 0; -1 where there was no memory, or 1 + the row whose start or count does not fit. */
int64_t lmstate_choose(const choose_args *a) {
  int64_t longest = 0;
  for (int64_t r = 0; r < a->rows; r++) {
    if (a->starts[r] < 0 || a->counts[r] < 0 || a->counts[r] > a->tokens ||
        (a->counts[r] && seen(a, r, a->counts[r] - 1) > a->slots))
      return 1 + r;
    if (a->counts[r] && seen(a, r, a->counts[r] - 1) > longest) longest = seen(a, r, a->counts[r] - 1);
  }
  const int64_t runs = (longest + RUN - 1) / RUN, width = (a->slots + RUN - 1) / RUN * RUN;
  const int64_t each = a->size ? a->heads : 1; /* choices of a token */
  int failed = 0;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    float *turned = malloc((size_t)(a->dim * RUN) * sizeof(float));
    if (!turned) {
#pragma omp atomic write
      failed = 1;
    }
#pragma omp for schedule(dynamic)
    for (int64_t i = 0; i < a->rows * runs; i++) {
      const int64_t r = i / runs, first = i % runs * RUN;
      if (turned && a->counts[r] && first < seen(a, r, a->counts[r] - 1)) score_tokens(a, r, first, width, turned);
    }
    free(turned);
#pragma omp for schedule(static)
    for (int64_t i = 0; i < a->rows * a->tokens * each; i++) {
      const int64_t r = i / each / a->tokens, t = i / each % a->tokens;
      const int64_t n = t < a->counts[r] ? candidates(a, r, t) : 0;
      float *scores = a->scores + i * width;
      if (a->size && n > a->budget) best_of_blocks(scores, seen(a, r, t), a->size, a->local);
      largest(scores, n, a->budget, a->chosen + i * a->budget);
    }
  }
  return failed ? -1 : 0;
}

typedef struct {
  const void *source;    /* [R, S, D] by its strides; nothing where there is a table */
  char *const *table;    /* [R, table_row]: see attend_args */
  const int64_t *chosen; /* [R, N]: positions, or -1 */
  void *to;              /* [R, N, D], contiguous: zeros where there is none */
  int64_t rows, count, bytes, slots, row, slot, table_row, block, threads; /* bytes of a vector, and strides in bytes */
  int64_t head; /* bytes in front of the head whose vectors are wanted */
} gather_args;

/* 0, or 1 + the row of which a position is not stored. */
int64_t lmstate_gather(const gather_args *a) {
  for (int64_t i = 0; i < a->rows * a->count; i++)
    if (a->chosen[i] < -1 || a->chosen[i] >= a->slots) return 1 + i / a->count;
#pragma omp parallel for schedule(static) num_threads((int)a->threads) if (a->threads > 1)
  for (int64_t i = 0; i < a->rows * a->count; i++) {
    const int64_t r = i / a->count;
    char *to = (char *)a->to + i * a->bytes;
    if (a->chosen[i] < 0) memset(to, 0, (size_t)a->bytes);
    else
      memcpy(to, position_at(a->source, r * a->row, a->table ? a->table + r * a->table_row : NULL, a->block, a->slots,
                             a->head, a->slot, a->chosen[i]), (size_t)a->bytes);
  }
  return 0;
}

EXPORT_SIZE(choose_args);
EXPORT_SIZE(gather_args);
