/* Stored weights as rows of floats. */
#ifndef LMSTATE_DEQUANTIZE_H
#define LMSTATE_DEQUANTIZE_H
#include <stdint.h>

enum { BLOCK = 16 }; /* outputs of a quantized weight that are stored together */

/* `count` outputs from `first` on of a weight that is stored as `stored`, as floats of `kind`, F32 or BF16. */
void dequantize(const void *weight, int stored, int64_t outputs, int64_t inputs, int64_t first, int64_t count, int kind,
            void *out);

#endif
