/* What the products of all kinds of weights share: where the sums of some outputs of a row go. */
#ifndef LMSTATE_LINEAR_TILE_H
#define LMSTATE_LINEAR_TILE_H
#include "dense/bfloat12.h"
#include "dense/linear_args.h"
#include "simd/simd.h"

/* Rows and outputs of a tile of sums: as many as there are registers for. Outputs that share the rows of a tile while
 * these are in the first cache, at most. */
enum { HIGH = VL == 16 ? 6 : 3, OUTPUTS = 4, PANEL = 16 * OUTPUTS };

/* What a tile has summed before it goes on along the inputs. */
typedef vf open_sums[HIGH][OUTPUTS];

/* y[row.., first..] = residual + scale * factors * (tile + bias), for `rows` rows, of which `tile` has `width` sums
 * each; a norm of whole rows leaves residual and scale for later. A function: a copy in every tile takes long to
 * compile. */
void linear_finish(const linear_args *a, const float *tile, int64_t width, int64_t row, int64_t rows, int64_t first,
                   int64_t count);

/* Rows first..last of a product, which a thread multiplies with four outputs before it goes on to others. */
typedef struct {
  int64_t first, last;
} span_of_rows;

/* Products by panels of outputs, of weights of floats: see linear_panel.c. More rows than `few_rows` share packed
 * weights. */
int64_t few_rows(const linear_args *a);
/* How many rows of pairs are stored together, 32 inputs of each beside each other, as a tile of packed weights reads
 * them; and of such rows from `row` on, how far it is to the next inputs of a row. */
int64_t rows_interleaved(const linear_args *a);
int64_t step_of(const linear_args *a, int64_t row, int64_t beside);
/* Outputs that share the rows of a tile: as many as the second cache holds packed weights of, beside the rows. */
int64_t panel_of(const linear_args *a);
/* Up to that many outputs from `first` on, of weights as they are stored. */
void stored_panel(const linear_args *a, const bfloat12 *w, const void *x, int64_t first, int64_t count,
                  span_of_rows of);
/* The same for many rows, packed into `scratch` first; of halves that are multiplied with each other, up to half as
 * many outputs of each. */
void packed_panel(const linear_args *a, const bfloat12 *w, const void *x, int64_t first, int64_t count,
                  span_of_rows of, float *scratch);
INLINE int64_t padded_inputs(int64_t k) { return (k + 15) / 16 * 16; }

/* Products of pairs of bfloat16, of bfloat16 weights on processors that have them: see linear_bf16.c. */
int bf16_applies(const linear_args *a);
/* A row of floats, rounded as those products take it: [inputs] bfloat16, from 32 of them to the next ones `step`. */
void bf16_round(const linear_args *a, const float *x, uint16_t *to, int64_t step);
/* The sums of some of `count` outputs from `first` on for up to HIGH rows, without the rare numbers of a 12-bit weight;
 * returns of how many outputs. */
int64_t bf16_tile(const linear_args *a, const bfloat12 *w, const uint16_t *x, int64_t first, int64_t count,
                  int64_t rows, float (*sums)[PANEL]);
/* The same of weights that bf16_pack has put to OUTPUTS outputs beside each other by 32 inputs, and of rows that are so
 * too: the inputs begin..end of k, all counted in pairs, where `before` has the sums of those before them. */
void bf16_pack(const linear_args *a, const bfloat12 *w, int64_t first, int64_t count, uint16_t *to);
void bf16_packed_tile(const float *x, const float *w, int64_t k, int64_t begin, int64_t end, int64_t rows,
                      open_sums before, float (*sums)[PANEL]);

/* The same in tiles, on processors that have them: see linear_bf16_amx.c. */
int bf16_in_tiles(const linear_args *a);
/* Rows row..row + count, of at most 16 from a multiple of 16 on, as bf16_round makes them, into those of the
 * product. */
void bf16_lay_rows(const linear_args *a, const uint16_t *from, int64_t row, int64_t count, uint16_t *rows);
/* Tiles of rows whose sums a thread may keep for later; bytes behind the rows that are read too. */
enum { BF16_TILES = 24, BF16_BEHIND = 64 };
/* Blocks of 16 outputs; `scratch`: LINEAR_SCRATCH floats for each input and LINEAR_ROOM more. */
void bf16_blocks(const linear_args *a, const uint16_t *rows, int64_t begin, int64_t end, span_of_rows of,
                 float *scratch);
/* Four outputs of a 12-bit weight that are stored together from p on, k inputs of each: from an output to the next
 * one `row` numbers, from 32 inputs to the next `step`. Asks for memory from `ahead` on, BF16_PREFETCHED bytes for
 * each SPAN of inputs: less than it reads, since the products that follow ask too. */
enum { BF16_PREFETCHED = 256 };
void bf16_unpack(const uint8_t *p, const uint8_t *ahead, const uint8_t *table, int64_t k, uint16_t *to, int64_t row,
                 int64_t step);
/* Where an input is in a row where weights are of 12 bits: they are unpacked to vectors in which input i of 32 is
 * beside input i + 16. */
INLINE int64_t bf16_place_in_row(int64_t i) { return (i & -32) + (i & 15) * 2 + (i >> 4 & 1); }

/* Products of quantized weights in tiles, of enough rows on processors that have them: see linear_amx.c. */
int amx_applies(const linear_args *a);
/* The rows as those products take them: bytes of all, and how one is put there. */
size_t amx_rows_bytes(const linear_args *a);
void amx_lay_row(const linear_args *a, const rounded *x, int64_t row, void *rows);
/* Blocks of outputs; `scratch`: AMX_SCRATCH floats for each input, of the thread, whose tiles are configured. */
enum { AMX_SCRATCH = 20 };
void amx_blocks(const linear_args *a, const void *rows, int64_t begin, int64_t end, span_of_rows of, void *scratch);

#endif
