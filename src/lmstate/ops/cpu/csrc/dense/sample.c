/* One draw from each row's softmax, after top-k, top-p and min-p. */
#include <float.h>
#include <stdlib.h>

#include "dense/prologue.h"
#include "layout.h"

typedef struct {
  const float *x;        /* [rows, width] */
  const double *uniform; /* [rows]: where in 0..1 of the cumulative distribution */
  int64_t *picked;       /* [rows]; -1 where the largest of a row is no finite number */
  int64_t rows, width, top_k, threads;
  double temperature, top_p, min_p;
} sample_args;

enum { PIECE = 512, BLOCK = 64, DIGIT = 11 }; /* numbers, numbers, bits */

typedef struct {
  double *sums;   /* of pieces */
  uint64_t *keys; /* [width] */
  float *most;    /* of blocks */
} scratch;

static double sum_of(const float *e, int64_t n) {
  double sums[8] = {0};
  int64_t i = 0;
  for (; i + 8 <= n; i += 8)
    for (int j = 0; j < 8; j++) sums[j] += e[i + j];
  for (; i < n; i++) sums[0] += e[i];
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* exp((x - largest) / temperature), 0..1; 0 if the largest of them is no finite number. */
static int exponentials(const float *x, int64_t width, double temperature, float *e) {
  vf most = vf_set1(-INFINITY);
  int64_t i = 0;
  int strange = 0;
  for (; i + VL <= width; i += VL) most = vf_max(most, vf_load(x + i));
  float largest = vf_largest(most);
  for (; i < width; i++) largest = x[i] > largest ? x[i] : largest;
  for (i = 0; i < width; i++) strange |= x[i] != x[i];
  if (strange || !(largest >= -FLT_MAX && largest <= FLT_MAX)) return 0;
  const vf by = vf_set1((float)fmin(1 / temperature, FLT_MAX)), from = vf_set1(largest);
  for (i = 0; i + VL <= width; i += VL) vf_store(e + i, vf_exp(vf_mul(vf_sub(vf_load(x + i), from), by)));
  if (i < width) {
    const int n = (int)(width - i);
    store_part(e + i, vf_exp(vf_mul(vf_sub(load_part(F32, x, i, n), from), by)), n);
  }
  return 1;
}

static int64_t draw(const float *e, int64_t width, double uniform, double *sums) {
  double total = 0, below = 0;
  const int64_t pieces = (width + PIECE - 1) / PIECE;
  for (int64_t p = 0; p < pieces; p++) {
    const int64_t rest = width - p * PIECE;
    total += sums[p] = sum_of(e + p * PIECE, rest < PIECE ? rest : PIECE);
  }
  /* Never the total itself, and the last that has anything where rounding leaves none. */
  const double point = fmin(uniform * total, nextafter(total, 0));
  int64_t piece = 0, last = 0;
  for (int64_t p = 0; p < pieces; p++) {
    if (sums[p] > 0) piece = p;
    if (below + sums[p] > point) break;
    below += sums[p];
  }
  for (int64_t i = piece * PIECE; i < width && i < (piece + 1) * PIECE; i++) {
    if (e[i] > 0) last = i;
    if ((below += e[i]) > point) break;
  }
  return last;
}

/* A number 0.. and its place as one integer, which orders them: larger numbers first, then smaller places. */
INLINE uint64_t key_of(float e, int64_t i) { return (uint64_t)to_bits(e) << 32 | (uint32_t)~(uint32_t)i; }
INLINE float number_of(uint64_t key) { return from_bits((uint32_t)(key >> 32)); }

/* The last of the largest keys, in order, whose weights (their numbers, or 1 each) sum up to `target`; 0 if all do not.
 * By their digits from the highest on: of each digit, only keys that share the last one's are looked at again. */
static uint64_t last_within(uint64_t *keys, int64_t n, int counting, double target) {
  for (int shift = 64 - DIGIT;; shift = shift > DIGIT ? shift - DIGIT : 0) {
    double weights[1 << DIGIT] = {0};
    for (int64_t i = 0; i < n; i++)
      weights[keys[i] >> shift & ((1 << DIGIT) - 1)] += counting ? 1.0 : (double)number_of(keys[i]);
    int64_t digit = (1 << DIGIT) - 1;
    for (; digit >= 0 && weights[digit] < target; digit--) target -= weights[digit];
    if (digit < 0) return 0;
    int64_t alike = 0;
    for (int64_t i = 0; i < n; i++) {
      const uint64_t key = keys[i];
      keys[alike] = key;
      alike += (key >> shift & ((1 << DIGIT) - 1)) == (uint64_t)digit;
    }
    n = alike;
    if (n == 1 || shift == 0) return keys[0];
  }
}

static void largest_of_blocks(const float *e, int64_t width, float *most) {
  for (int64_t first = 0; first < width; first += BLOCK) {
    const int64_t end = first + BLOCK < width ? first + BLOCK : width;
    vf largest = vf_zero();
    int64_t i = first;
    for (; i + VL <= end; i += VL) largest = vf_max(largest, vf_load(e + i));
    float here = vf_largest(largest);
    for (; i < end; i++) here = e[i] > here ? e[i] : here;
    most[first / BLOCK] = here;
  }
}

/* Zeros in place of all but the largest numbers, as many as `count` or, where that is 0, as hold `mass` together. None
 * below `least` is among them. */
static void keep_largest(float *e, int64_t width, int64_t count, double mass, float least, const scratch *use) {
  const int64_t blocks = (width + BLOCK - 1) / BLOCK;
  const double target = count ? (double)count : mass;
  largest_of_blocks(e, width, use->most);
  if (count) { /* as many blocks have one that is no smaller than this */
    for (int64_t b = 0; b < blocks; b++) use->keys[b] = key_of(use->most[b], b);
    least = number_of(last_within(use->keys, blocks, 1, target));
  }
  int64_t n = 0;
  for (int64_t b = 0; b < blocks; b++) {
    if (use->most[b] < least) continue;
    const int64_t end = (b + 1) * BLOCK < width ? (b + 1) * BLOCK : width;
    for (int64_t i = b * BLOCK; i < end; i++) {
      use->keys[n] = key_of(e[i], i);
      n += e[i] >= least && e[i] > 0;
    }
  }
  const uint64_t last = last_within(use->keys, n, count != 0, target);
  const float number = number_of(last);
  const int64_t place = (int64_t)(uint32_t)~(uint32_t)last;
  for (int64_t i = 0; i < width && i <= place; i++) e[i] = e[i] < number ? 0 : e[i];
  for (int64_t i = place + 1; i < width; i++) e[i] = e[i] <= number ? 0 : e[i];
}

static void filter(const sample_args *a, float *e, const scratch *use) {
  if (a->top_k) keep_largest(e, a->width, a->top_k, 0, 0, use);
  if (a->top_p < 1) { /* all that are below the least together have no more than what may be left out */
    const double total = sum_of(e, a->width);
    const float least = (float)((1 - a->top_p) * total / (double)a->width);
    keep_largest(e, a->width, 0, a->top_p * total, least, use);
  }
  if (a->min_p > 0)
    for (int64_t i = 0; i < a->width; i++) e[i] = e[i] < a->min_p ? 0 : e[i];
}

/* 1 where there is no memory for it. */
int64_t lmstate_sample(const sample_args *a) {
  const size_t width = (size_t)a->width, pieces = width / PIECE + 1, blocks = width / BLOCK + 1;
  int64_t failed = 0;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  {
    char *memory = malloc(pieces * sizeof(double) + width * sizeof(uint64_t) + (blocks + width) * sizeof(float));
    scratch use = {.sums = (double *)memory};
    use.keys = (uint64_t *)(use.sums + pieces);
    use.most = (float *)(use.keys + width);
    float *e = use.most + blocks;
#pragma omp for schedule(static)
    for (int64_t m = 0; m < a->rows; m++) {
      if (!memory) {
#pragma omp atomic write
        failed = 1;
      } else if (!exponentials(a->x + m * a->width, a->width, a->temperature, e)) {
        a->picked[m] = -1;
      } else {
        filter(a, e, &use);
        a->picked[m] = draw(e, a->width, a->uniform[m], use.sums);
      }
    }
    free(memory);
  }
  return failed;
}

EXPORT_SIZE(sample_args);
