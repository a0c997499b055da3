"""Attention over blocks of 64 positions, found by their addresses.

Keys are read in tiles of 64 at absolute positions. The softmax is summed over parts of `SPLIT` absolute positions that
are merged in order. A tile or a part that a query does not see changes no bit, and the rows of a tile of queries do not
meet. So the result for a query does not depend on its tile, on the number of new tokens, or on how many programs share
a row.
"""

from __future__ import annotations

import triton
import triton.language as tl

TILE = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rotated(x, x_other, cos, sin, first):
    """The rotation of a feature and its partner: first says whether the feature is the first of its pair."""
    return tl.where(first, x * cos - x_other * sin, x * cos + x_other * sin)


@triton.jit
def _part(
    q, q_rope, own, valid, begin, end, keys, values, rope_keys, entries, row, head, key_stride, value_stride,
    slope, scale, softcap, window, chunk,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, LATENT: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr,
    DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, DR: tl.constexpr, DRP: tl.constexpr, ELEMENT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Maximum [ROWS], sum [ROWS] and weighted values [ROWS, DVP] of the positions begin..end, in tiles of 64.

    LATENT: values are the keys, latents that all heads share, and rope keys of DR features add to the scores.
    """
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DVP], tl.float32)
    offsets = tl.arange(0, TILE)
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    ones = tl.full([TILE, 16], 1.0, tl.float32).to(ELEMENT)
    for tile in range(begin // TILE, (end + TILE - 1) // TILE):
        position = tile * TILE + offsets
        k_address = tl.load(keys + row * entries + tile)
        k_block = tl.multiple_of(k_address, 16).to(tl.pointer_type(ELEMENT))
        stored = (position < end) & (k_address != 0)
        k = tl.load(
            k_block + offsets[:, None] * key_stride + head * D + d[None, :],
            mask=stored[:, None] & (d < D)[None, :], other=0.0,
        )  # fmt: skip
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if LATENT:
            v = k
            r = tl.arange(0, DRP)
            r_address = tl.load(rope_keys + row * entries + tile)
            r_block = tl.multiple_of(r_address, 16).to(tl.pointer_type(ELEMENT))
            rope_key = tl.load(
                r_block + offsets[:, None] * DR + r[None, :], mask=stored[:, None] & (r < DR)[None, :], other=0.0
            )
            scores = tl.dot(q_rope, tl.trans(rope_key), scores, input_precision=PRECISION)
        else:
            v_address = tl.load(values + row * entries + tile)
            v_block = tl.multiple_of(v_address, 16).to(tl.pointer_type(ELEMENT))
            v = tl.load(
                v_block + offsets[:, None] * value_stride + head * DV + dv[None, :],
                mask=stored[:, None] & (dv < DV)[None, :], other=0.0,
            )  # fmt: skip
        scores = scores * scale
        if HAS_SOFTCAP:
            scaled = scores / softcap
            raised = tl.exp2(tl.abs(scaled) * (-2.0 * LOG2E))
            tanh = (1.0 - raised) / (1.0 + raised)
            scores = softcap * tl.where(scaled < 0, -tanh, tanh)
        if HAS_SLOPES:
            scores -= slope[:, None] * (own[:, None] - position[None, :]).to(tl.float32)
        visible = stored[None, :] & (position[None, :] <= own[:, None]) & valid[:, None]
        visible = visible & (position[None, :] > own[:, None] - window)
        visible = visible & (position[None, :] // chunk == own[:, None] // chunk)
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)
        weights = tl.exp2(scores - finite[:, None]).to(ELEMENT)
        kept = tl.exp2(top - finite)
        # The matrix unit sums in one order whatever the tile of queries; every column is the same sum.
        summed = tl.max(tl.dot(weights, ones, input_precision=PRECISION), 1)
        total = total * kept + summed
        acc = acc * kept[:, None] + tl.dot(weights, v, input_precision=PRECISION)
        top = new
    return top, total, acc


@triton.jit
def _merged(top, total, acc, more_top, more_total, more_acc):
    """Two parts of a softmax as one: the later part is added to the earlier one."""
    new = tl.maximum(top, more_top)
    finite = tl.where(new == float("-inf"), 0.0, new)
    kept = tl.exp2(top - finite)
    added = tl.exp2(more_top - finite)
    return new, total * kept + more_total * added, acc * kept[:, None] + more_acc * added[:, None]


@triton.jit
def _finished(top, total, acc, sinks, heads, HAS_SINKS: tl.constexpr):
    """Weighted values over the sum, a sink's share included."""
    if HAS_SINKS:
        sink = tl.load(sinks + heads) * LOG2E
        new = tl.maximum(top, sink)
        total = total * tl.exp2(top - new) + tl.exp2(sink - new)
        acc = acc * tl.exp2(top - new)[:, None]
    return acc / tl.where(total == 0.0, 1.0, total)[:, None]


@triton.jit
def attend(
    q, q_rope, keys, values, rope_keys, out, part_top, part_total, part_acc, starts, counts, sinks, slopes,
    entries, width, parts, scale, softcap, window, chunk,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, LATENT: tl.constexpr,
    SPLIT: tl.constexpr, WHOLE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, DR: tl.constexpr, DRP: tl.constexpr,
    ELEMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one row and kv head. Grid: (rows * kv heads, tiles of queries, parts or 1).

    q: float32 [R, T, H, D]. keys, values: int64 [R, entries], addresses of blocks [64, K, D], 0 where none is held.
    LATENT: keys are latents, values too, and q_rope: float32 [R, T, H, DR] meets rope_keys.
    out: float32 [R, T, H, DV]. WHOLE: all parts are merged here; else a program computes one part into part_top and
    part_total [R, K, tiles, parts, ROWS] and part_acc [R, K, tiles, parts, ROWS, DV], which `merge` reads.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    row = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    index = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = index // GROUP
    query_head = head * GROUP + index % GROUP
    start = tl.load(starts + row)
    count = tl.load(counts + row)
    valid = token < count
    own = start + token
    first = start + tl.program_id(1) * ROWS // GROUP  # the first and the last position of the tile's queries
    last = start + tl.minimum((tl.program_id(1) * ROWS + ROWS - 1) // GROUP, count - 1)
    end = tl.minimum(start + count, last + 1)
    low = tl.maximum(tl.maximum(0, first - window + 1), first // chunk * chunk)
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    q_at = q + ((row * width + token[:, None]) * HEADS + query_head[:, None]) * D + d[None, :]
    queries = tl.load(q_at, mask=valid[:, None] & (d < D)[None, :], other=0.0).to(ELEMENT)
    slope = tl.zeros([ROWS], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + query_head)
    turned = queries
    if LATENT:
        r = tl.arange(0, DRP)
        r_at = q_rope + ((row * width + token[:, None]) * HEADS + query_head[:, None]) * DR + r[None, :]
        turned = tl.load(r_at, mask=valid[:, None] & (r < DR)[None, :], other=0.0).to(ELEMENT)
    if WHOLE:
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc = tl.zeros([ROWS, DVP], tl.float32)
        for part in range(low // SPLIT, (end + SPLIT - 1) // SPLIT):
            more_top, more_total, more_acc = _part(
                queries, turned, own, valid, tl.maximum(part * SPLIT, low), tl.minimum((part + 1) * SPLIT, end),
                keys, values, rope_keys, entries, row, head, KV_HEADS * D, KV_HEADS * DV, slope, scale, softcap, window,
                chunk, HAS_SOFTCAP, HAS_SLOPES, LATENT, ROWS, D, DP, DV, DVP, DR, DRP, ELEMENT, PRECISION,
            )  # fmt: skip
            top, total, acc = _merged(top, total, acc, more_top, more_total, more_acc)
        y = _finished(top, total, acc, sinks, query_head, HAS_SINKS)
        out_at = out + ((row * width + token[:, None]) * HEADS + query_head[:, None]) * DV + dv[None, :]
        tl.store(out_at, y, mask=valid[:, None] & (dv < DV)[None, :])
    else:
        part = tl.program_id(2)
        top, total, acc = _part(
            queries, turned, own, valid, tl.maximum(part * SPLIT, low), tl.minimum((part + 1) * SPLIT, end),
            keys, values, rope_keys, entries, row, head, KV_HEADS * D, KV_HEADS * DV, slope, scale, softcap, window,
            chunk, HAS_SOFTCAP, HAS_SLOPES, LATENT, ROWS, D, DP, DV, DVP, DR, DRP, ELEMENT, PRECISION,
        )  # fmt: skip
        place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * parts + part
        line = tl.arange(0, ROWS)
        tl.store(part_top + place * ROWS + line, top)
        tl.store(part_total + place * ROWS + line, total)
        tl.store(part_acc + (place * ROWS + line[:, None]) * DV + dv[None, :], acc, mask=(dv < DV)[None, :])


@triton.jit
def merge(
    out, part_top, part_total, part_acc, starts, counts, sinks, width, parts,
    HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Parts that `attend` computed, in their order. Grid: (rows * kv heads, tiles of queries)."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    row = tl.program_id(0) // KV_HEADS
    head = tl.program_id(0) % KV_HEADS
    line = tl.arange(0, ROWS)
    index = tl.program_id(1) * ROWS + line
    token = index // GROUP
    query_head = head * GROUP + index % GROUP
    count = tl.load(counts + row)
    valid = token < count
    held = (tl.load(starts + row) + count + SPLIT - 1) // SPLIT
    dv = tl.arange(0, DVP)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DVP], tl.float32)
    place = (tl.program_id(0) * tl.num_programs(1) + tl.program_id(1)) * parts
    for part in range(0, held):
        at = (place + part) * ROWS + line
        more_top = tl.load(part_top + at)
        more_total = tl.load(part_total + at)
        more_acc = tl.load(part_acc + at[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        top, total, acc = _merged(top, total, acc, more_top, more_total, more_acc)
    y = _finished(top, total, acc, sinks, query_head, HAS_SINKS)
    out_at = out + ((row * width + token[:, None]) * HEADS + query_head[:, None]) * DV + dv[None, :]
    tl.store(out_at, y, mask=valid[:, None] & (dv < DV)[None, :])


@triton.jit
def append(new, table, starts, counts, entries, width, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
           ELEMENT: tl.constexpr):  # fmt: skip
    """Store a new token of a row, rounded, in its block [64, K, D]. Grid: (rows, T). new: float32 [R, T, K, D]."""
    row = tl.program_id(0)
    token = tl.program_id(1)
    if token < tl.load(counts + row):
        position = tl.load(starts + row) + token
        address = tl.load(table + row * entries + position // TILE)
        block = tl.multiple_of(address, 16).to(tl.pointer_type(ELEMENT))
        d = tl.arange(0, DP)
        inside = d < K * D
        values = tl.load(new + (row * width + token) * K * D + d, mask=inside)
        tl.store(block + (position % TILE) * K * D + d, values.to(ELEMENT), mask=inside)


@triton.jit
def rope(x, cos, sin, out, heads, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate one head of one token. Grid: (tokens, heads). x: float32 [N, H, D]; cos, sin: float32 [N, HALF]."""
    token = tl.program_id(0)
    at = x + (token * heads + tl.program_id(1)) * D
    d = tl.arange(0, DP)
    turned = d < 2 * HALF
    first = d % 2 == 0 if INTERLEAVED else d < HALF
    pair = d // 2 if INTERLEAVED else d % HALF
    other = d ^ 1 if INTERLEAVED else tl.where(d < HALF, d + HALF, d - HALF)
    own = tl.load(at + d, mask=d < D)
    partner = tl.load(at + other, mask=turned, other=0.0)
    c = tl.load(cos + token * HALF + pair, mask=turned, other=1.0)
    s = tl.load(sin + token * HALF + pair, mask=turned, other=0.0)
    y = tl.where(turned, _rotated(own, partner, c, s, first), own)
    tl.store(out + (token * heads + tl.program_id(1)) * D + d, y, mask=d < D)
