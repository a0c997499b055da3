"""Scores of stored positions by an index, as ranks that are all different."""

from __future__ import annotations

import triton
import triton.language as tl

from lmstate.ops.cuda.kernels.functions import pointer

TILE = tl.constexpr(64)


@triton.jit(do_not_specialize=["width", "rate"])
def ranks(
    q, weights, keys, out, starts, counts, width, rate,
    HEADS: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, ELEMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Ranks of the positions of a block for a tile of queries. Grid: (rows, tiles of queries, blocks).

    q: float32 [R, T, HEADS, D]; weights: float32 [R, T, HEADS]; keys: int64 [R, blocks], addresses of blocks [64, D]
    of ELEMENT; out: int64 [R, T, blocks * 64]. A score is the sum over heads, in order, of weight * relu(q . key), or
    minus infinity where a query does not see the position. The upper half of a rank has the bits of the score, in the
    order of numbers; the lower half has the position.
    """
    row = tl.program_id(0).to(tl.int64)
    token = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    position = tl.program_id(2) * TILE + tl.arange(0, TILE)
    valid = token < tl.load(counts + row)
    own = tl.load(starts + row) + token
    d = tl.arange(0, DP)
    address = tl.load(keys + row * tl.num_programs(2) + tl.program_id(2))
    block = pointer(address, ELEMENT)
    held = (address != 0) & (position < (tl.load(starts + row) + tl.load(counts + row)) // rate)
    k = tl.load(block + tl.arange(0, TILE)[:, None] * D + d[None, :], mask=held[:, None] & (d < D)[None, :], other=0.0)
    k = tl.trans(k)
    total = tl.zeros([ROWS, TILE], tl.float32)
    line = row * width + token
    for head in range(0, HEADS):
        at = q + (line[:, None] * HEADS + head) * D + d[None, :]
        query = tl.load(at, mask=valid[:, None] & (d < D)[None, :], other=0.0).to(ELEMENT)
        weight = tl.load(weights + line * HEADS + head, mask=valid, other=0.0)
        total += weight[:, None] * tl.maximum(tl.dot(query, k, input_precision=PRECISION), 0.0)
    seen = valid[:, None] & held[None, :] & (position[None, :] < (own[:, None] + 1) // rate)
    bits = tl.where(seen, total, float("-inf")).to(tl.int32, bitcast=True)
    upper = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    to = out + line[:, None] * (tl.num_programs(2) * TILE) + position[None, :]
    tl.store(to, upper * 4294967296 + position[None, :], mask=(token < width)[:, None])
