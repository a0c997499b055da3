/* The arguments of a product with a weight. */
#ifndef LMSTATE_LINEAR_ARGS_H
#define LMSTATE_LINEAR_ARGS_H
#include <stddef.h>
#include <stdint.h>

/* Floats that a thread has for itself in a product, or in several beside each other, at most: for each input, and
 * beside these. */
enum { LINEAR_SCRATCH = 32, LINEAR_ROOM = 24 * 1024 };

/* Beside the kinds of floats. The last two are stored as those before, and multiply activations of one byte instead of
 * two. */
enum { INT8 = 3, INT4 = 4, BFLOAT12 = 5, INT8_BY_BYTES = 6, INT4_BY_BYTES = 7 };
static inline int is_grouped(int64_t kind) { return kind == INT8 || kind == INT4 || kind >= INT8_BY_BYTES; }
static inline int weight_bits(int64_t kind) { return kind == INT4 || kind == INT4_BY_BYTES ? 4 : 8; }
static inline int activation_bytes(int64_t kind) { return kind >= INT8_BY_BYTES ? 1 : 2; }
/* Of a group of 16 outputs: their integers and scales, and of INT4 their minimums. */
enum { BYTES4 = 320, BYTES8 = 544 };

typedef struct {
  const float *x; /* [rows, inputs], or [rows, 2 inputs] before a gate */
  const void *weight;
  const float *bias, *norm;     /* or null; a norm or a gate, not both */
  const float *residual, *after; /* or null: what y is added to, [rows, outputs], and the norm of y before, [outputs] */
  float *y;                            /* [rows, outputs] */
  int64_t rows, outputs, inputs;
  int64_t kind, gate, threads;
  double eps, after_eps, scale;  /* scale: of what is added to the residual; 0 where there is none */
  const float *factors; /* [outputs], of what the product and its bias give; or null */
  int64_t begin, end;   /* outputs that are wanted, others beside them may be made too; end: 0 where all are */
  int64_t glu;          /* where linear_gates: the gate of y = act(first half of the outputs) * the other, or 0 */
  int64_t y_row;        /* from a row of y to the next one; 0: outputs */
  float *rest;          /* or null: where the outputs from `rest_begin` on go instead, by `rest_row` */
  int64_t rest_begin, rest_row;
} linear_args;

/* Run by every thread of a parallel region that is open, of at most `threads`, with memory of `linear_memory` bytes
 * that they share. When it returns, y is whole. */
void linear_run(const linear_args *a, void *memory);
/* Several products beside each other, none of which reads what another gives; the memory is that of all. */
void linear_run_all(const linear_args *each, int64_t count, void *memory);
size_t linear_memory(const linear_args *a);
/* Whether it can multiply the halves of its outputs with each other before it writes them, [rows, outputs / 2]. */
int linear_gates(const linear_args *a);
int64_t lmstate_linear(const linear_args *a);

#endif
