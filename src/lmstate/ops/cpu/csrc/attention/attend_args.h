/* The arguments of what happens between a layer's projections and its output: rotation, storing, attention. */
#ifndef LMSTATE_ATTEND_ARGS_H
#define LMSTATE_ATTEND_ARGS_H
#include <stdint.h>

enum { MAX_DIM = 512 }; /* of a head; lmstate.ops.cpu has the same number */

typedef struct {
  const float *x, *cos, *sin; /* [R, T, H, D] by its strides; [R, T, half], contiguous */
  float *y;                   /* [R, T, H, D], contiguous */
  int64_t rows, tokens, heads, dim, half, interleaved;
  int64_t x_row, x_token, x_head, threads;
} rope_args;

typedef struct {
  const float *source[2];         /* k, v: [R, T, K, D] by their strides */
  void *to[2];                    /* [R, K, S, D] by their strides; nothing where there are tables */
  const int64_t *starts, *counts; /* [R] */
  char *const *tables[2];         /* [R, table_row]: see attend_args */
  int64_t rows, tokens, kv_heads, slots, kind, threads;
  int64_t table_row, block, dim[2];
  int64_t source_row[2], source_token[2], source_head[2];
  int64_t to_row[2], to_head[2], to_slot[2];
} append_args;

typedef struct {
  const float *q;               /* [R, T, H, D] by its strides */
  const void *k, *v; /* [R, K, S, D] and [R, K, S, DV] by their strides, of `kind`: position p in slot p % S */
  const int64_t *starts, *counts; /* [R] */
  const float *sinks;           /* [H], or null */
  const float *slopes;          /* [H], or null: what each position between a key and its query takes from their score */
  const float *biases;          /* [H, distances], of each token or of all, or null: what is added to the score of a key
                                 * at this distance before its query; one that is farther has the last */
  float *out;                   /* [R, T, H, DV], contiguous */
  float *columns;               /* [R, K, planes, S], where the attention that slots receive is added; or null */
  const int64_t *ends;          /* [R]: the last plane is of the token before ends[r]; null: of the last of the call,
                                 * and the columns are of this call alone: need not be zeros before */
  /* [R, table_row], or null: where the blocks of `block` positions are, in their order; k and v are nothing then, the
   * strides are those of a block, and S = table_row * block positions have a place in the table. */
  char *const *k_table, *const *v_table;
  int64_t rows, tokens, heads, kv_heads, slots, dim, dim_v;
  int64_t q_row, q_token, q_head;
  int64_t k_row, k_head, k_slot;
  int64_t v_row, v_head, v_slot;
  int64_t table_row, block;
  int64_t planes;               /* of the last tokens, one each; what comes before goes into the first */
  int64_t kind, window, chunk, threads; /* window, chunk: 0 where there is none */
  int64_t distances, bias_token; /* bias_token: from the biases of a token to those of the next; 0: all have the same */
  double scale, softcap;        /* softcap: 0 where there is none */
} attend_args;

/* Keys and values in few bits, beside the attend_args of their layer, whose slots are those of the codes.
 *
 * Vectors go through a Hadamard transform and have a scale each: codes -127..127 of 8 bits, or of fewer bits 0..2n that
 * mean -n..n; element i of a vector of D is the field i / (D * bits / 8) of byte i % (D * bits / 8). Of 3 bits the
 * lower two are stored as those of 2 bits; after these, the third of field f of byte b is bit b % 2 * 4 + f of byte
 * b / 2. With a tail keys are in blocks of CODE_BLOCK positions: a channel is a vector, with scale and middle, and the
 * vectors of a block follow each other across its slots. The newest keys are also floats, transformed, in the ring of
 * `tail` slots that attend_args names: a query sees floats of its own block of positions, codes of those before it. */
typedef struct {
  uint8_t *k, *v;              /* [R, K, S, D * bits / 8], contiguous */
  uint16_t *k_scale, *v_scale; /* float16 [R, K, S, n]; a block of keys has all scales, then all middles */
  /* [R, table_row] each, or null: as in attend_args, whose own tables are those of the tail. */
  char *const *k_table, *const *v_table, *const *k_scale_table, *const *v_scale_table;
  int64_t bits, tail;          /* tail: 0 where every key is codes of its own */
  int64_t table_row, block;
} codes_args;

/* A second part of every key, in slots of its own, that all kv heads share: queries are [dim | dim of this]. */
typedef struct {
  const void *k;           /* [R, S, dim] by its strides, of the keys' kind */
  char *const *table;      /* [R, table_row] as of the keys, or null */
  int64_t dim, row, slot;
} extra_key_args;

/* Address of a position of one row and head: `head` bytes into a block of the row, or into its ring of `slots`, which
 * begins `row` bytes behind `base`. */
static inline char *position_at(const void *base, int64_t row, char *const *table, int64_t block, int64_t slots,
                             int64_t head, int64_t slot, int64_t position) {
  if (table) return table[position / block] + head + position % block * slot;
  return (char *)base + row + head + position % slots * slot;
}

enum { CODE_BLOCK = 64 };
/* n of keys in blocks */
static inline int64_t block_scales(int64_t dim) { return (2 * dim + CODE_BLOCK - 1) / CODE_BLOCK; }

typedef struct {
  rope_args q, k;
  append_args store; /* of k as rotated */
  attend_args attend; /* of q as rotated */
} rotate_attend_args;

/* Tokens of all rows that follow each other without padding: those of row r are begins[r]..begins[r + 1]. */
typedef struct {
  int64_t *begins; /* [R + 1] */
  int32_t *rows;   /* of each token */
} packed_tokens;

typedef struct {
  int64_t first_task, first_part; /* of a row; parts are [kv head][chunk][token, head of the group] */
  int64_t first_token, q;         /* its number among the tokens of all rows; where its queries begin */
  int64_t chunk, chunks;          /* the first chunk that a query of the row sees, and how many */
  int64_t runs;                   /* of new tokens */
  int64_t work;                   /* of the tasks of one kv head, see `work_of` */
} row_plan;

typedef struct {
  row_plan *rows; /* [R] */
  float *parts;
  float *totals;          /* [N, H, 2]: largest score and sum of exponentials; N as of the queries */
  float *weights, *peaks; /* [N, H, padded] (see `part`), [N, H, padded / SUB], for columns */
  int64_t run;            /* new tokens of a task */
  int64_t tasks, padded;
  int64_t whole;          /* whether a task has all chunks, and a row's parts are [kv head][token, head of the group] */
  const packed_tokens *packed; /* or null: there is padding, and N = R * T */
  const codes_args *codes;   /* or null */
  const extra_key_args *extra_key; /* or null */
} attend_plan;

/* 0, or 1 + r where row r's starts or counts make no sense. */
int64_t attend_check(const attend_args *a, const codes_args *codes);
/* `codes`: or null. `packed`: or null; else q is [N, H, D] by the strides of tokens and heads, and `out` [N, H, DV]. 0;
 * -1 where there was no memory, or what `attend_check` gives: nothing is to be ended then. */
int64_t attend_begin(const attend_args *a, const codes_args *codes, const packed_tokens *packed, attend_plan *plan);
void attend_end(attend_plan *plan);
/* Run by every thread of a parallel region that is open. When it returns, `out` is whole. */
void attend_run(const attend_args *a, const attend_plan *plan);

/* One head: `half` pairs of x are rotated into y, the rest is copied; x is written as `kind`. */
void rotate_head(const float *x, const float *cos, const float *sin, float *y, int64_t dim, int64_t half,
                 int64_t interleaved);
void store_head(const float *x, void *y, int64_t n, int64_t kind);

/* Codes. x times a Hadamard matrix of the largest power of two that divides n, in blocks; its own inverse. */
void hadamard_head(float *x, int64_t n);
/* New token t of a kv head; k and v are changed. Then, where there is a tail, the blocks of keys that are whole now. */
void store_codes(const attend_args *a, const codes_args *c, int64_t r, int64_t h, int64_t t, float *k, float *v);
void close_blocks(const attend_args *a, const codes_args *c, int64_t r, int64_t h);

void lmstate_rope(const rope_args *a);
int64_t lmstate_append(const append_args *a);
int64_t lmstate_attend(const attend_args *a);

#endif
