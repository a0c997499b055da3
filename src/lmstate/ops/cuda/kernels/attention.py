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
def _numbers(stored, CODES: tl.constexpr, ELEMENT: tl.constexpr):
    """Codes as the matrix unit multiplies them, each of them exactly; floats as they are."""
    if CODES:
        return stored.to(tl.float32).to(ELEMENT)
    else:
        return stored


@triton.jit
def _scales(table, row, entries, tile, offsets, heads, head, stored):
    """The scales [64] of a head's codes in a block [64, heads] of float16."""
    block = tl.multiple_of(tl.load(table + row * entries + tile), 16).to(tl.pointer_type(tl.float16))
    return tl.load(block + offsets * heads + head, mask=stored, other=0.0).to(tl.float32)


@triton.jit
def _part(
    q, q_rope, own, valid, begin, end, keys, values, rope_keys, key_scales, value_scales, entries, row, head,
    key_stride, value_stride, slope, scale, softcap, window, chunk,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, LATENT: tl.constexpr, CODES: tl.constexpr, ROWS: tl.constexpr,
    D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, DR: tl.constexpr, DRP: tl.constexpr,
    ELEMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Maximum [ROWS], sum [ROWS] and weighted values [ROWS, DVP] of the positions begin..end, in tiles of 64.

    LATENT: values are the keys, latents that all heads share, and rope keys of DR features add to the scores. CODES:
    keys and values are int8, and a scale float16 for each position and head multiplies scores and weights.
    """
    STORED: tl.constexpr = tl.int8 if CODES else ELEMENT
    heads = key_stride // D
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
        k_block = tl.multiple_of(k_address, 16).to(tl.pointer_type(STORED))
        stored = (position < end) & (k_address != 0)
        k = tl.load(
            k_block + offsets[:, None] * key_stride + head * D + d[None, :],
            mask=stored[:, None] & (d < D)[None, :], other=0,
        )  # fmt: skip
        k = _numbers(k, CODES, ELEMENT)
        scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if CODES:
            scores = scores * _scales(key_scales, row, entries, tile, offsets, heads, head, stored)[None, :]
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
            v_block = tl.multiple_of(v_address, 16).to(tl.pointer_type(STORED))
            v = tl.load(
                v_block + offsets[:, None] * value_stride + head * DV + dv[None, :],
                mask=stored[:, None] & (dv < DV)[None, :], other=0,
            )  # fmt: skip
            v = _numbers(v, CODES, ELEMENT)
        scores = scores * scale
        if HAS_SOFTCAP:
            scaled = scores / softcap
            fallen = tl.exp2(tl.abs(scaled) * (-2.0 * LOG2E))
            tanh = (1.0 - fallen) / (1.0 + fallen)
            scores = softcap * tl.where(scaled < 0, -tanh, tanh)
        if HAS_SLOPES:
            scores -= slope[:, None] * (own[:, None] - position[None, :]).to(tl.float32)
        visible = stored[None, :] & (position[None, :] <= own[:, None]) & valid[:, None]
        visible = visible & (position[None, :] > own[:, None] - window)
        visible = visible & (position[None, :] // chunk == own[:, None] // chunk)
        scores = tl.where(visible, scores * LOG2E, float("-inf"))
        new = tl.maximum(top, tl.max(scores, 1))
        finite = tl.where(new == float("-inf"), 0.0, new)
        raised = tl.exp2(scores - finite[:, None])
        weights = raised.to(ELEMENT)
        kept = tl.exp2(top - finite)
        # The matrix unit sums in one order whatever the tile of queries; every column is the same sum.
        summed = tl.max(tl.dot(weights, ones, input_precision=PRECISION), 1)
        if CODES:
            spread = _scales(value_scales, row, entries, tile, offsets, heads, head, stored)
            weights = (raised * spread[None, :]).to(ELEMENT)
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
    q, q_rope, keys, values, rope_keys, key_scales, value_scales, out, part_top, part_total, part_acc, starts, counts,
    sinks, slopes, entries, width, parts, scale, softcap, window, chunk,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, LATENT: tl.constexpr,
    CODES: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, DR: tl.constexpr,
    DRP: tl.constexpr, ELEMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one row and kv head. Grid: (rows * kv heads, tiles of queries, parts or 1).

    q: float32 [R, T, H, D]. keys, values: int64 [R, entries], addresses of blocks [64, K, D], 0 where none is held.
    LATENT: keys are latents, values too, and q_rope: float32 [R, T, H, DR] meets rope_keys. CODES: blocks are int8, and
    key_scales and value_scales are addresses of blocks [64, K] of float16.
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
                keys, values, rope_keys, key_scales, value_scales, entries, row, head, KV_HEADS * D, KV_HEADS * DV,
                slope, scale, softcap, window, chunk, HAS_SOFTCAP, HAS_SLOPES, LATENT, CODES, ROWS, D, DP, DV, DVP, DR,
                DRP, ELEMENT, PRECISION,
            )  # fmt: skip
            top, total, acc = _merged(top, total, acc, more_top, more_total, more_acc)
        y = _finished(top, total, acc, sinks, query_head, HAS_SINKS)
        out_at = out + ((row * width + token[:, None]) * HEADS + query_head[:, None]) * DV + dv[None, :]
        tl.store(out_at, y, mask=valid[:, None] & (dv < DV)[None, :])
    else:
        part = tl.program_id(2)
        top, total, acc = _part(
            queries, turned, own, valid, tl.maximum(part * SPLIT, low), tl.minimum((part + 1) * SPLIT, end),
            keys, values, rope_keys, key_scales, value_scales, entries, row, head, KV_HEADS * D, KV_HEADS * DV, slope,
            scale, softcap, window, chunk, HAS_SOFTCAP, HAS_SLOPES, LATENT, CODES, ROWS, D, DP, DV, DVP, DR, DRP,
            ELEMENT, PRECISION,
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


@triton.jit
def _butterfly(x, LINES: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr):
    """Sums and differences of the numbers of x [LINES, D] that lie HALF apart."""
    pairs = tl.permute(tl.reshape(x, [LINES, D // (2 * HALF), 2, HALF]), (0, 1, 3, 2))
    first, second = tl.split(pairs)
    return tl.reshape(tl.permute(tl.join(first + second, first - second), (0, 1, 3, 2)), [LINES, D])


@triton.jit
def _hadamard(x, LINES: tl.constexpr, D: tl.constexpr, LOG_D: tl.constexpr):
    """x [LINES, D] times the Hadamard matrix of D, a power of two: sums of pairs, in one order."""
    for i in tl.static_range(0, LOG_D):
        x = _butterfly(x, LINES, D, 1 << i)
    root = tl.sqrt(tl.full([1, 1], D, tl.float32))
    return x / root


@triton.jit
def hadamard(x, out, lines, LINES: tl.constexpr, D: tl.constexpr, LOG_D: tl.constexpr):
    """Vectors times a Hadamard matrix, its own inverse. Grid: (tiles of lines,). x, out: float32 [lines, D]."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    at = line[:, None] * D + tl.arange(0, D)[None, :]
    inside = (line < lines)[:, None]
    tl.store(out + at, _hadamard(tl.load(x + at, mask=inside, other=0.0), LINES, D, LOG_D), mask=inside)


@triton.jit
def append_codes(
    new, codes, scales, starts, counts, entries, width,
    K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, LOG_D: tl.constexpr,
):  # fmt: skip
    """Store a new token of a row as int8 codes of its Hadamard transform, and their scales. Grid: (rows, T).

    new: float32 [R, T, K, D]; codes, scales: addresses int64 [R, entries] of blocks [64, K, D] of int8 and [64, K] of
    float16.
    """
    row = tl.program_id(0)
    token = tl.program_id(1)
    if token < tl.load(counts + row):
        position = tl.load(starts + row) + token
        entry = row * entries + position // TILE
        head = tl.arange(0, KP)
        d = tl.arange(0, D)
        inside = (head < K)[:, None]
        x = tl.load(new + ((row * width + token) * K + head[:, None]) * D + d[None, :], mask=inside, other=0.0)
        x = _hadamard(x, KP, D, LOG_D)
        scale = tl.minimum(tl.max(tl.abs(x), 1) / 127.0, 65504.0).to(tl.float16)
        divisor = tl.where(scale == 0, 1.0, scale.to(tl.float32))
        # A number of this size has no bits behind the point: to add it rounds to the nearest even integer.
        rounded = (x / divisor[:, None] + 12582912.0) - 12582912.0
        rounded = tl.minimum(tl.maximum(rounded, -127.0), 127.0)
        block = tl.multiple_of(tl.load(codes + entry), 16).to(tl.pointer_type(tl.int8))
        at = ((position % TILE) * K + head[:, None]) * D + d[None, :]
        tl.store(block + at, rounded.to(tl.int8), mask=inside)
        scale_block = tl.multiple_of(tl.load(scales + entry), 16).to(tl.pointer_type(tl.float16))
        tl.store(scale_block + (position % TILE) * K + head, scale, mask=head < K)
