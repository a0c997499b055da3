/* Keys and values in few bits: turning and storing new ones, and attention over what is stored, without a wide copy. */
#include "attention/attend_args.h"
#include "simd/simd.h"
#include "layout.h"

typedef struct {
  rope_args q, k;      /* where `rotates`; the others' sources then are what these write */
  const float *source[2]; /* k, v: [R, T, K, D] by their strides */
  int64_t source_row[2], source_token[2], source_head[2];
  int64_t rotates, store_threads;
  codes_args codes;
  attend_args attend; /* q: written to where there is a Hadamard transform, unless it is null: then nothing attends */
} attend_quantized_args;

void hadamard_head(float *x, int64_t n) {
  const int64_t size = n & -n;
  for (int64_t half = 1; half < size; half *= 2)
    for (int64_t i = 0; i < n; i += 2 * half)
      for (int64_t j = i; j < i + half; j++) {
        const float u = x[j], w = x[j + half];
        x[j] = u + w, x[j + half] = u - w;
      }
  const float scale = 1.0f / sqrtf((float)size);
  for (int64_t i = 0; i < n; i++) x[i] *= scale;
}

static void hadamard_heads(float *x, int64_t heads, int64_t dim, int64_t threads) {
#pragma omp parallel for schedule(static) num_threads((int)threads) if (threads > 1)
  for (int64_t i = 0; i < heads; i++) hadamard_head(x + i * dim, dim);
}

static void load_head(const void *x, float *y, int64_t n, int64_t kind) {
  for (int64_t i = 0; i < n; i++)
    y[i] = kind == F32 ? ((const float *)x)[i]
                       : kind == BF16 ? bf16_to_float(((const uint16_t *)x)[i])
                                      : f16_to_float_bits(((const uint16_t *)x)[i]);
}

/* The largest code, counted from the middle of all. */
INLINE float most_of(int64_t bits) { return bits == 8 ? 127.0f : (float)((1 << bits) - 1) * 0.5f; }

#define SPREAD 1.15f /* standard deviations that codes of 2 bits are apart: lmstate.ops.types.kv_format has the same */

/* The scale of n numbers as it is stored, and what to divide by: where it is 0 the codes do not matter. */
INLINE float step_of(float largest, float squares, int64_t n, int64_t bits, uint16_t *scale) {
  float step = largest / most_of(bits);
  if (bits == 2) step = fminf(step, SPREAD * sqrtf(squares / (float)n));
  *scale = float_to_f16_bits(fminf(65504.0f, step));
  step = f16_to_float_bits(*scale);
  return step == 0 ? 1 : step;
}

INLINE uint8_t code_of(float x, float step, float most) {
  return (uint8_t)fmaxf(0, fminf(2 * most, nearbyintf(x / step + most)));
}

/* Number d of n. */
INLINE void put_code(uint8_t *codes, int64_t n, int64_t d, int64_t bits, uint8_t code) {
  const int64_t bytes = n * (bits == 3 ? 2 : bits) / 8, field = d / bytes, byte = d % bytes;
  if (bits != 3) {
    codes[byte] |= (uint8_t)(code << field * bits);
    return;
  }
  codes[byte] |= (uint8_t)((code & 3) << field * 2);
  codes[bytes + byte / 2] |= (uint8_t)((code >> 2) << (byte % 2 * 4 + field));
}

static void encode_vector(const float *x, int64_t n, int64_t bits, uint8_t *codes, uint16_t *scale) {
  float largest = 0, squares = 0;
  for (int64_t d = 0; d < n; d++) largest = fmaxf(largest, fabsf(x[d])), squares += x[d] * x[d];
  const float most = most_of(bits), step = step_of(largest, squares, n, bits, scale);
  if (bits == 8) {
    for (int64_t d = 0; d < n; d++) codes[d] = (uint8_t)(int8_t)fmaxf(-most, fminf(most, nearbyintf(x[d] / step)));
    return;
  }
  memset(codes, 0, (size_t)(n * bits / 8));
  for (int64_t d = 0; d < n; d++) put_code(codes, n, d, bits, code_of(x[d], step, most));
}

/* Offset of one position of a head in the codes or in the scales; each position has `bytes` of them. */
static void *code_at(const attend_args *a, const void *base, char *const *table, const codes_args *c, int64_t r,
                           int64_t h, int64_t position, int64_t bytes) {
  const int64_t slots = table ? c->block : a->slots;
  return position_at(base, r * a->kv_heads * slots * bytes, table ? table + r * c->table_row : NULL, c->block, slots,
                  h * slots * bytes, bytes, position);
}

/* Offset of a key among the newest ones, which are floats. */
static char *tail_at(const attend_args *a, const codes_args *c, int64_t r, int64_t h, int64_t position) {
  const int64_t size = size_of((int)a->kind);
  return position_at(a->k, r * a->k_row * size, a->k_table ? a->k_table + r * a->table_row : NULL, a->block, c->tail,
                  h * a->k_head * size, a->k_slot * size, position);
}

/* The block of positions from `first` on, whole in the ring of floats, as codes: a channel is a vector of its
 * positions. */
static void encode_block(const attend_args *a, const codes_args *c, int64_t r, int64_t h, int64_t first) {
  const int64_t dim = a->dim, bytes = CODE_BLOCK * c->bits / 8;
  uint8_t *codes = code_at(a, c->k, c->k_table, c, r, h, first, dim * c->bits / 8);
  uint16_t *scale = code_at(a, c->k_scale, c->k_scale_table, c, r, h, first, 2 * block_scales(dim));
  uint16_t *middle = scale + dim;
  float x[CODE_BLOCK][MAX_DIM], channel[CODE_BLOCK];
  for (int64_t t = 0; t < CODE_BLOCK; t++) load_head(tail_at(a, c, r, h, first + t), x[t], dim, a->kind);
  for (int64_t d = 0; d < dim; d++) {
    float low = x[0][d], high = x[0][d];
    for (int64_t t = 1; t < CODE_BLOCK; t++) low = fminf(low, x[t][d]), high = fmaxf(high, x[t][d]);
    middle[d] = float_to_f16_bits(fmaxf(-65504.0f, fminf(65504.0f, (low + high) * 0.5f)));
    for (int64_t t = 0; t < CODE_BLOCK; t++) channel[t] = x[t][d] - f16_to_float_bits(middle[d]);
    encode_vector(channel, CODE_BLOCK, c->bits, codes + d * bytes, &scale[d]);
  }
}

void store_codes(const attend_args *a, const codes_args *c, int64_t r, int64_t h, int64_t t, float *k, float *v) {
  const int64_t position = a->starts[r] + t, bits = c->bits;
  hadamard_head(v, a->dim_v);
  encode_vector(v, a->dim_v, bits, code_at(a, c->v, c->v_table, c, r, h, position, a->dim_v * bits / 8),
                code_at(a, c->v_scale, c->v_scale_table, c, r, h, position, 2));
  hadamard_head(k, a->dim);
  if (c->tail) {
    store_head(k, tail_at(a, c, r, h, position), a->dim, a->kind);
    return;
  }
  encode_vector(k, a->dim, bits, code_at(a, c->k, c->k_table, c, r, h, position, a->dim * bits / 8),
                code_at(a, c->k_scale, c->k_scale_table, c, r, h, position, 2));
}

void close_blocks(const attend_args *a, const codes_args *c, int64_t r, int64_t h) {
  const int64_t end = a->starts[r] + a->counts[r];
  for (int64_t first = a->starts[r] / CODE_BLOCK * CODE_BLOCK; first + CODE_BLOCK <= end; first += CODE_BLOCK)
    encode_block(a, c, r, h, first);
}

/* The new tokens of one kv head. */
static void store(const attend_quantized_args *c, int64_t r, int64_t h) {
  const attend_args *a = &c->attend;
  const float *from[2] = {c->source[0] + r * c->source_row[0] + h * c->source_head[0],
                          c->source[1] + r * c->source_row[1] + h * c->source_head[1]};
  for (int64_t t = 0; t < a->counts[r]; t++) {
    float k[MAX_DIM], v[MAX_DIM];
    memcpy(k, from[0] + t * c->source_token[0], (size_t)a->dim * 4);
    memcpy(v, from[1] + t * c->source_token[1], (size_t)a->dim_v * 4);
    store_codes(a, &c->codes, r, h, t, k, v);
  }
  if (c->codes.tail) close_blocks(a, &c->codes, r, h);
}

/* Rotate, store, attend, as far as is asked; the codes of a call are in every later one. What attend_begin returns. */
int64_t lmstate_attend_quantized(const attend_quantized_args *c) {
  const attend_args *a = &c->attend;
  for (int64_t r = 0; r < a->rows; r++)
    if (a->starts[r] < 0 || a->counts[r] < 0 || a->counts[r] > a->tokens ||
        (c->codes.k_table && a->counts[r] && a->starts[r] + a->counts[r] > a->slots))
      return 1 + r;
  if (c->rotates) {
    lmstate_rope(&c->q);
    lmstate_rope(&c->k);
  }
  if (c->source[0]) {
#pragma omp parallel for schedule(static) num_threads((int)c->store_threads) if (c->store_threads > 1)
    for (int64_t i = 0; i < a->rows * a->kv_heads; i++) store(c, i / a->kv_heads, i % a->kv_heads);
  }
  if (!a->q || a->rows == 0 || a->tokens == 0) return 0;
  hadamard_heads((float *)a->q, a->rows * a->tokens * a->heads, a->dim, c->store_threads);
  attend_plan plan;
  const int64_t status = attend_begin(a, &c->codes, NULL, &plan);
  if (status) return status;
#pragma omp parallel num_threads((int)a->threads) if (a->threads > 1)
  attend_run(a, &plan);
  attend_end(&plan);
  hadamard_heads(a->out, a->rows * a->tokens * a->heads, a->dim_v, c->store_threads);
  return 0;
}

EXPORT_SIZE(codes_args);
EXPORT_SIZE(attend_quantized_args);
