"""Attention over blocks of 64 positions, found by their addresses.

Keys are read in tiles of 64 at absolute positions. The softmax is summed over parts of `SPLIT` absolute positions that
are merged in order. A tile or a part that a query does not see changes no bit, and the rows of a tile of queries do not
meet. So the result for a query does not depend on its tile, on the number of new tokens, or on how many programs share
a row. Of a list of vectors the places in the list are positions.
"""

from __future__ import annotations

import triton
import triton.language as tl

from lmstate.ops.cuda.kernels.functions import pointer

TILE = tl.constexpr(64)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rotated(x, x_other, cos, sin, first):
    """The rotation of a feature and its partner: first says whether the feature is the first of its pair."""
    return tl.where(first, x * cos - x_other * sin, x * cos + x_other * sin)


@triton.jit
def _fields(packed, thirds, LINES: tl.constexpr, BYTES: tl.constexpr, BITS: tl.constexpr):
    """The numbers of the format (`kv_format`) in lines of bytes [LINES, BYTES], float32 [LINES, BYTES * FIELDS].

    thirds: of 3 bits, for each of these bytes the one that has the third bits of its fields; else nothing.
    """
    LOWER: tl.constexpr = 2 if BITS == 3 else BITS
    FIELDS: tl.constexpr = 8 // LOWER
    MOST: tl.constexpr = ((1 << BITS) - 1) / 2
    field = tl.arange(0, FIELDS)
    shift = (field * LOWER).to(tl.uint8)
    number = (packed[:, None, :] >> shift[None, :, None]) & ((1 << LOWER) - 1)
    if BITS == 3:
        place = (tl.arange(0, BYTES)[None, :] % 2 * 4 + field[:, None]).to(tl.uint8)
        number = number | ((thirds[:, None, :] >> place[None, :, :]) & 1) << 2
    return tl.reshape(number.to(tl.float32) - MOST, [LINES, FIELDS * BYTES])


@triton.jit
def _of_block(at, head, heads, LINE: tl.constexpr):
    """The places in a block [64, heads, LINE] of bytes of a head, which follow each other across its slots."""
    return at // LINE * (heads * LINE) + head * LINE + at % LINE


@triton.jit
def _block_keys(codes, scales, head, heads, held, BITS: tl.constexpr, D: tl.constexpr, ELEMENT: tl.constexpr):
    """Keys of a whole block as ELEMENT [D, 64], whose channels have a scale and a middle each."""
    CHANNEL: tl.constexpr = TILE * BITS // 8  # bytes
    BYTES: tl.constexpr = TILE // 4 if BITS == 3 else CHANNEL
    LINE: tl.constexpr = D * BITS // 8  # bytes of a slot
    NUMBERS: tl.constexpr = (2 * D + TILE - 1) // TILE  # of float16 in a slot
    d = tl.arange(0, D)
    at = d[:, None] * CHANNEL + tl.arange(0, BYTES)[None, :]
    packed = tl.load(codes + _of_block(at, head, heads, LINE), mask=held, other=0)
    thirds = packed
    if BITS == 3:
        at = d[:, None] * CHANNEL + BYTES + tl.arange(0, BYTES)[None, :] // 2
        thirds = tl.load(codes + _of_block(at, head, heads, LINE), mask=held, other=0)
    numbers = _fields(packed, thirds, D, BYTES, BITS)
    block = scales + head * NUMBERS
    scale = tl.load(block + d // NUMBERS * (heads * NUMBERS) + d % NUMBERS, mask=held, other=0.0)
    e = d + D
    middle = tl.load(block + e // NUMBERS * (heads * NUMBERS) + e % NUMBERS, mask=held, other=0.0)
    return (numbers * scale.to(tl.float32)[:, None] + middle.to(tl.float32)[:, None]).to(ELEMENT)


@triton.jit
def _scales(table, row, entries, tile, offsets, heads, head, stored):
    """The scales [64] of a head's codes in a block [64, heads] of float16."""
    block = pointer(tl.load(table + row * entries + tile), tl.float16)
    return tl.load(block + offsets * heads + head, mask=stored, other=0.0).to(tl.float32)


@triton.jit
def _listed(table, row, entries, position, end, WIDTH: tl.constexpr, ELEMENT: tl.constexpr):
    """Places of a list that have a vector of WIDTH numbers, bool [64], and pointers to the vectors [64, 1]."""
    address = tl.load(table + row * entries + position, mask=position < end, other=0)
    if WIDTH * ELEMENT.primitive_bitwidth % 128 == 0:
        vector = pointer(address, ELEMENT)
    else:
        vector = address.to(tl.pointer_type(ELEMENT))
    return address != 0, vector[:, None]


@triton.jit
def _part(
    q, q_rope, own, valid, begin, end, keys, values, beside, key_scales, value_scales, entries, row, head, heads, first,
    slope, scale, softcap, window, chunk,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, LATENT: tl.constexpr, LISTED: tl.constexpr, BITS: tl.constexpr,
    ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr, DR: tl.constexpr,
    DRP: tl.constexpr, ELEMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Maximum [ROWS], sum [ROWS] and weighted values [ROWS, DVP] of the positions begin..end, in tiles of 64.

    The other arguments are those of `attend`; first: the position of the first query.
    """
    STORED: tl.constexpr = ELEMENT if BITS == 0 else (tl.int8 if BITS == 8 else tl.uint8)
    CODED: tl.constexpr = (BITS > 0) and (BITS < 8)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DVP], tl.float32)
    offsets = tl.arange(0, TILE)
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    r = tl.arange(0, DRP)
    ones = tl.full([TILE, 16], 1.0, tl.float32).to(ELEMENT)
    for tile in range(begin // TILE, (end + TILE - 1) // TILE):
        position = tile * TILE + offsets
        if LISTED:
            stored, k_block = _listed(keys, row, entries, position, end, D, ELEMENT)
            k_at = k_block + d[None, :]
        else:
            k_address = tl.load(keys + row * entries + tile)
            k_block = pointer(k_address, STORED)
            stored = (position < end) & (k_address != 0)
            k_at = k_block + head * D + offsets[:, None] * (heads * D) + d[None, :]
        if CODED:
            block = pointer(tl.load(key_scales + row * entries + tile), tl.float16)
            k = _block_keys(k_block, block, head, heads, k_address != 0, BITS, D, ELEMENT)
            scores = tl.dot(q, k, input_precision=PRECISION)
            if (tile + 1) * TILE > first:  # a query sees floats of the keys in its own block
                newest = tl.load(beside + row * entries + tile)
                held = (stored & (newest != 0))[:, None] & (d < D)[None, :]
                at = pointer(newest, ELEMENT) + head * D + offsets[:, None] * (heads * D) + d[None, :]
                exact = tl.dot(q, tl.trans(tl.load(at, mask=held, other=0.0)), input_precision=PRECISION)
                scores = tl.where((own // TILE == tile)[:, None], exact, scores)
        else:
            k = tl.load(k_at, mask=stored[:, None] & (d < D)[None, :], other=0)
            if BITS == 8:
                k = k.to(tl.float32).to(ELEMENT)
            scores = tl.dot(q, tl.trans(k), input_precision=PRECISION)
            if BITS == 8:
                scores = scores * _scales(key_scales, row, entries, tile, offsets, heads, head, stored)[None, :]
        if DR > 0:
            if LISTED:
                _, r_block = _listed(beside, row, entries, position, end, DR, ELEMENT)
                r_at = r_block + r[None, :]
            else:
                r_at = pointer(tl.load(beside + row * entries + tile), ELEMENT) + offsets[:, None] * DR + r[None, :]
            rope_key = tl.load(r_at, mask=stored[:, None] & (r < DR)[None, :], other=0.0)
            scores = tl.dot(q_rope, tl.trans(rope_key), scores, input_precision=PRECISION)
        if LATENT:
            v = k
        else:
            inside = stored[:, None] & (dv < DV)[None, :]
            if LISTED:
                _, v_block = _listed(values, row, entries, position, end, DV, ELEMENT)
                v = tl.load(v_block + dv[None, :], mask=inside, other=0)
            else:
                v_block = pointer(tl.load(values + row * entries + tile), STORED)
                if CODED:
                    LINE: tl.constexpr = DV * BITS // 8
                    BYTES: tl.constexpr = DV // 4 if BITS == 3 else LINE
                    line = v_block + head * LINE + offsets[:, None] * (heads * LINE)
                    byte = tl.arange(0, BYTES)[None, :]
                    packed = tl.load(line + byte, mask=stored[:, None], other=0)
                    thirds = packed
                    if BITS == 3:
                        thirds = tl.load(line + BYTES + byte // 2, mask=stored[:, None], other=0)
                    v = _fields(packed, thirds, TILE, BYTES, BITS).to(ELEMENT)
                else:
                    v_at = v_block + head * DV + offsets[:, None] * (heads * DV) + dv[None, :]
                    v = tl.load(v_at, mask=inside, other=0)
                    if BITS == 8:
                        v = v.to(tl.float32).to(ELEMENT)
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
        if BITS > 0:
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


@triton.jit(do_not_specialize=["entries", "width", "pairs", "parts", "window", "chunk"])
def attend(
    q, q_rope, keys, values, beside, key_scales, value_scales, out, part_top, part_total, part_acc, starts, counts,
    sinks, slopes, entries, width, pairs, parts, scale, softcap, window, chunk,
    HAS_SOFTCAP: tl.constexpr, HAS_SLOPES: tl.constexpr, HAS_SINKS: tl.constexpr, LATENT: tl.constexpr,
    LISTED: tl.constexpr, BITS: tl.constexpr, SPLIT: tl.constexpr, WHOLE: tl.constexpr, HEADS: tl.constexpr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, DP: tl.constexpr, DV: tl.constexpr, DVP: tl.constexpr,
    DR: tl.constexpr, DRP: tl.constexpr, ELEMENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One tile of queries of one row and kv head. Grid: (pairs * tiles of queries, parts or 1).

    There are rows * kv heads `pairs`. The last tiles, which see most, are the first programs.
    q: float32 [R, T, H, D]. keys, values: int64 [R, entries], addresses of blocks [64, K, D], 0 where none is held.
    LATENT: keys are values too. DR > 0: q_rope float32 [R, T, H, DR] meets the rope keys in blocks `beside`. LISTED:
    addresses are those of vectors, and a row has one token and one head of keys. BITS > 0: keys and values are codes of
    `kv_format`. key_scales and value_scales are addresses of blocks of float16: of 8 bits [64, K], and of fewer those
    of a block of keys. Then blocks `beside` have the newest keys as floats.
    out: float32 [R, T, H, DV]. WHOLE: all parts are merged here; else a program computes one part into part_top and
    part_total [tiles, pairs, parts, ROWS] and part_acc [tiles, pairs, parts, ROWS, DV], which `merge` reads.
    """
    KV_HEADS: tl.constexpr = HEADS // GROUP
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // pairs
    pair = tl.program_id(0) % pairs
    row = (pair // KV_HEADS).to(tl.int64)
    head = pair % KV_HEADS
    index = tile * ROWS + tl.arange(0, ROWS)
    token = index // GROUP
    query_head = head * GROUP + index % GROUP
    start = tl.load(starts + row)
    count = tl.load(counts + row)
    valid = token < count
    own = start + token
    first = start + tile * ROWS // GROUP  # the first and the last position of the tile's queries
    last = start + tl.minimum((tile * ROWS + ROWS - 1) // GROUP, count - 1)
    end = tl.where(first < start + count, last + 1, 0)  # a tile of padding reads nothing
    low = tl.maximum(tl.maximum(0, first - window + 1), first // chunk * chunk)
    d = tl.arange(0, DP)
    dv = tl.arange(0, DVP)
    q_at = q + ((row * width + token[:, None]) * HEADS + query_head[:, None]) * D + d[None, :]
    queries = tl.load(q_at, mask=valid[:, None] & (d < D)[None, :], other=0.0).to(ELEMENT)
    slope = tl.zeros([ROWS], tl.float32)
    if HAS_SLOPES:
        slope = tl.load(slopes + query_head)
    turned = queries
    if DR > 0:
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
                keys, values, beside, key_scales, value_scales, entries, row, head, KV_HEADS, first, slope, scale,
                softcap, window, chunk, HAS_SOFTCAP, HAS_SLOPES, LATENT, LISTED, BITS, ROWS, D, DP, DV, DVP, DR, DRP,
                ELEMENT, PRECISION,
            )  # fmt: skip
            top, total, acc = _merged(top, total, acc, more_top, more_total, more_acc)
        y = _finished(top, total, acc, sinks, query_head, HAS_SINKS)
        out_at = out + ((row * width + token[:, None]) * HEADS + query_head[:, None]) * DV + dv[None, :]
        tl.store(out_at, y, mask=valid[:, None] & (dv < DV)[None, :])
    else:
        part = tl.program_id(1)
        top, total, acc = _part(
            queries, turned, own, valid, tl.maximum(part * SPLIT, low), tl.minimum((part + 1) * SPLIT, end),
            keys, values, beside, key_scales, value_scales, entries, row, head, KV_HEADS, first, slope, scale, softcap,
            window, chunk, HAS_SOFTCAP, HAS_SLOPES, LATENT, LISTED, BITS, ROWS, D, DP, DV, DVP, DR, DRP, ELEMENT,
            PRECISION,
        )  # fmt: skip
        place = (tile * pairs + pair) * parts + part
        line = tl.arange(0, ROWS)
        tl.store(part_top + place * ROWS + line, top)
        tl.store(part_total + place * ROWS + line, total)
        tl.store(part_acc + (place * ROWS + line[:, None]) * DV + dv[None, :], acc, mask=(dv < DV)[None, :])


@triton.jit(do_not_specialize=["width", "pairs", "parts"])
def merge(
    out, part_top, part_total, part_acc, starts, counts, sinks, width, pairs, parts,
    HAS_SINKS: tl.constexpr, SPLIT: tl.constexpr, HEADS: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr,
    DV: tl.constexpr, DVP: tl.constexpr,
):  # fmt: skip
    """Parts that `attend` computed, in their order. Grid: (tiles of queries * pairs,)."""
    KV_HEADS: tl.constexpr = HEADS // GROUP
    pair = tl.program_id(0) % pairs
    row = (pair // KV_HEADS).to(tl.int64)
    head = pair % KV_HEADS
    line = tl.arange(0, ROWS)
    index = tl.program_id(0) // pairs * ROWS + line
    token = index // GROUP
    query_head = head * GROUP + index % GROUP
    count = tl.load(counts + row)
    valid = token < count
    held = (tl.load(starts + row) + count + SPLIT - 1) // SPLIT
    dv = tl.arange(0, DVP)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, DVP], tl.float32)
    place = tl.program_id(0) * parts
    for part in range(0, held):
        at = (place + part) * ROWS + line
        more_top = tl.load(part_top + at)
        more_total = tl.load(part_total + at)
        more_acc = tl.load(part_acc + at[:, None] * DV + dv[None, :], mask=(dv < DV)[None, :], other=0.0)
        top, total, acc = _merged(top, total, acc, more_top, more_total, more_acc)
    y = _finished(top, total, acc, sinks, query_head, HAS_SINKS)
    out_at = out + ((row * width + token[:, None]) * HEADS + query_head[:, None]) * DV + dv[None, :]
    tl.store(out_at, y, mask=valid[:, None] & (dv < DV)[None, :])


@triton.jit(do_not_specialize=["entries", "width"])
def append(new, table, starts, counts, entries, width, K: tl.constexpr, D: tl.constexpr, DP: tl.constexpr,
           ELEMENT: tl.constexpr):  # fmt: skip
    """Store a new token of a row, rounded, in its block [64, K, D]. Grid: (rows * T,). new: float32 [R, T, K, D]."""
    row = (tl.program_id(0) // width).to(tl.int64)
    token = tl.program_id(0) % width
    if token < tl.load(counts + row):
        position = tl.load(starts + row) + token
        address = tl.load(table + row * entries + position // TILE)
        block = pointer(address, ELEMENT)
        d = tl.arange(0, DP)
        inside = d < K * D
        values = tl.load(new + (row * width + token) * K * D + d, mask=inside)
        tl.store(block + (position % TILE) * K * D + d, values.to(ELEMENT), mask=inside)


@triton.jit
def rope(x, cos, sin, out, heads, D: tl.constexpr, DP: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Rotate one head of one token. Grid: (tokens, heads). x: float32 [N, H, D]; cos, sin: float32 [N, HALF]."""
    token = tl.program_id(0).to(tl.int64)
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
    """Sums and differences of the numbers of x [LINES, D] that are HALF apart."""
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


@triton.jit(do_not_specialize=["lines"])
def hadamard(x, out, lines, LINES: tl.constexpr, D: tl.constexpr, LOG_D: tl.constexpr):
    """Vectors times a Hadamard matrix, its own inverse. Grid: (tiles of lines,). x, out: float32 [lines, D]."""
    line = tl.program_id(0).to(tl.int64) * LINES + tl.arange(0, LINES)
    at = line[:, None] * D + tl.arange(0, D)[None, :]
    inside = (line < lines)[:, None]
    tl.store(out + at, _hadamard(tl.load(x + at, mask=inside, other=0.0), LINES, D, LOG_D), mask=inside)


@triton.jit
def _rounded(x):
    """The nearest integers, even ones from halfway: a float32 of this size has no bits after the point."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def _coded(x, N: tl.constexpr, BITS: tl.constexpr):
    """Lines x [LINES, N] in few bits: codes, int8 or bytes [LINES, N * BITS / 8], bytes of third bits, and scales
    float16 [LINES]. Of 3 bits the codes are N / 4 bytes and the third bits N / 8; else the latter are nothing."""
    MOST: tl.constexpr = 127.0 if BITS == 8 else ((1 << BITS) - 1) / 2
    scale = tl.max(tl.abs(x), 1) / MOST
    if BITS == 2:
        scale = tl.minimum(scale, 1.15 * tl.sqrt(tl.sum(x * x, 1) / N))  # `kv_format.SPREAD`
    scale = tl.minimum(scale, 65504.0).to(tl.float16)
    x = x / tl.where(scale == 0, 1.0, scale.to(tl.float32))[:, None]
    if BITS == 8:
        codes = tl.minimum(tl.maximum(_rounded(x), -127.0), 127.0).to(tl.int8)
        return codes, codes, scale
    else:
        LOWER: tl.constexpr = 2 if BITS == 3 else BITS
        FIELDS: tl.constexpr = 8 // LOWER
        number = tl.minimum(tl.maximum(_rounded(x + MOST), 0.0), 2 * MOST).to(tl.int32)
        field = tl.reshape(number, [x.shape[0], FIELDS, N // FIELDS])
        place = tl.arange(0, FIELDS)[None, :, None]
        lower = tl.sum((field & ((1 << LOWER) - 1)) << place * LOWER, 1).to(tl.uint8)
        if BITS == 3:
            thirds = tl.reshape(tl.sum((field >> 2) << place, 1), [x.shape[0], N // 8, 2])
            return lower, tl.sum(thirds << (tl.arange(0, 2) * 4)[None, None, :], 2).to(tl.uint8), scale
        else:
            return lower, lower, scale


@triton.jit(do_not_specialize=["entries", "width"])
def append_codes(
    new, codes, scales, starts, counts, entries, width,
    K: tl.constexpr, KP: tl.constexpr, D: tl.constexpr, LOG_D: tl.constexpr, BITS: tl.constexpr,
):  # fmt: skip
    """Store a new token of a row as codes of its Hadamard transform, and their scales. Grid: (rows * T,).

    new: float32 [R, T, K, D]; codes, scales: addresses int64 [R, entries] of blocks [64, K, D * BITS / 8] of bytes and
    [64, K] of float16.
    """
    LINE: tl.constexpr = D * BITS // 8
    BYTES: tl.constexpr = D // 4 if BITS == 3 else LINE
    row = (tl.program_id(0) // width).to(tl.int64)
    token = tl.program_id(0) % width
    if token < tl.load(counts + row):
        position = tl.load(starts + row) + token
        entry = row * entries + position // TILE
        head = tl.arange(0, KP)
        d = tl.arange(0, D)
        inside = (head < K)[:, None]
        x = tl.load(new + ((row * width + token) * K + head[:, None]) * D + d[None, :], mask=inside, other=0.0)
        numbers, thirds, scale = _coded(_hadamard(x, KP, D, LOG_D), D, BITS)
        block = pointer(tl.load(codes + entry), tl.int8 if BITS == 8 else tl.uint8)
        line = block + ((position % TILE) * K + head[:, None]) * LINE
        tl.store(line + tl.arange(0, BYTES)[None, :], numbers, mask=inside)
        if BITS == 3:
            tl.store(line + BYTES + tl.arange(0, D // 8)[None, :], thirds, mask=inside)
        scale_block = pointer(tl.load(scales + entry), tl.float16)
        tl.store(scale_block + (position % TILE) * K + head, scale, mask=head < K)


@triton.jit(do_not_specialize=["entries"])
def encode_blocks(
    floats, codes, scales, starts, counts, entries,
    K: tl.constexpr, D: tl.constexpr, BITS: tl.constexpr, ELEMENT: tl.constexpr,
):  # fmt: skip
    """Codes of a head's keys in a block that a step makes whole. Grid: (rows, blocks, K).

    floats, codes, scales: addresses int64 [R, entries] of blocks [64, K, D] of ELEMENT, transformed; [64, K, D * BITS /
    8] of bytes; and [64, K, n] of float16, for scales and middles of channels.
    """
    CHANNEL: tl.constexpr = TILE * BITS // 8
    BYTES: tl.constexpr = TILE // 4 if BITS == 3 else CHANNEL
    LINE: tl.constexpr = D * BITS // 8
    NUMBERS: tl.constexpr = (2 * D + TILE - 1) // TILE
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(2)
    start = tl.load(starts + row)
    block = start // TILE + tl.program_id(1)
    if (block + 1) * TILE <= start + tl.load(counts + row):
        entry = row * entries + block
        d = tl.arange(0, D)
        p = tl.arange(0, TILE)
        at = pointer(tl.load(floats + entry), ELEMENT)
        x = tl.load(at + (p[None, :] * K + head) * D + d[:, None]).to(tl.float32)
        middle = (tl.min(x, 1) + tl.max(x, 1)) * 0.5
        middle = tl.minimum(tl.maximum(middle, -65504.0), 65504.0).to(tl.float16)
        numbers, thirds, scale = _coded(x - middle.to(tl.float32)[:, None], TILE, BITS)
        to = d[:, None] * CHANNEL + tl.arange(0, BYTES)[None, :]
        into = pointer(tl.load(codes + entry), tl.uint8)
        tl.store(into + _of_block(to, head, K, LINE), numbers)
        if BITS == 3:
            to = d[:, None] * CHANNEL + BYTES + tl.arange(0, TILE // 8)[None, :]
            tl.store(into + _of_block(to, head, K, LINE), thirds)
        beside = pointer(tl.load(scales + entry), tl.float16) + head * NUMBERS
        e = d + D
        tl.store(beside + d // NUMBERS * (K * NUMBERS) + d % NUMBERS, scale)
        tl.store(beside + e // NUMBERS * (K * NUMBERS) + e % NUMBERS, middle)
