/* What a library says of its argument structures: `lmstate.ops.cpu.abi` packs them, and compares when it opens one. */
#ifndef LMSTATE_LAYOUT_H
#define LMSTATE_LAYOUT_H
#include <stdint.h>

#define EXPORT_SIZE(structure) const int64_t lmstate_sizeof_##structure = (int64_t)sizeof(structure)

#endif
