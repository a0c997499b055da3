"""Products with float and packed weights, norms and gates.

A product sums its inputs in steps of `STEP` in order, in one accumulator, whatever the number of rows of a tile. On
Hopper mma.sync and wgmma give the same bits for bfloat16 and float16 (arXiv 2511.10909).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lmstate.ops.cuda.kernels.functions import gated, pointer


@triton.jit
def _inputs(x, row, k, valid, inside, K, ELEMENT: tl.constexpr):
    return tl.load(x + row[:, None] * K + k[None, :], mask=valid[:, None] & inside[None, :], other=0.0).to(ELEMENT)


@triton.jit
def _unpacked(
    weight, n, real, first, inputs, groups,
    KIND: tl.constexpr, ELEMENT: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
):  # fmt: skip
    """The inputs from `first` on of outputs n of a packed weight, [STEP, OUTPUTS] in ELEMENT, zero after its end.

    A word of 32 bits has eight inputs of an output, or of int8 four.
    """
    FIELDS: tl.constexpr = 8 if KIND == "int4" else 4
    WORDS: tl.constexpr = 32 // FIELDS  # of a group and output
    SIZE: tl.constexpr = 320 if KIND == "int4" else 544  # bytes of a group of 16 outputs
    begin = n.to(tl.int64) // 16 * groups
    word = tl.arange(0, STEP // FIELDS)
    at = begin[None, :] + (first // 32 + word // WORDS)[:, None]
    at = weight.to(tl.pointer_type(tl.int32)) + at * (SIZE // 4) + (word % WORDS * 16)[:, None] + (n % 16)[None, :]
    inside = (first + word * FIELDS < inputs)[:, None] & real[None, :]
    field = tl.arange(0, FIELDS)
    shift = field % 4 * 8 + field // 4 * 4
    packed = tl.load(at, mask=inside, other=0)[:, None, :] >> shift[None, :, None]
    number = (packed & (15 if KIND == "int4" else 255)).to(tl.float32)
    number = tl.reshape(number, [STEP // 32, 32, OUTPUTS])
    group = first // 32 + tl.arange(0, STEP // 32)
    at = weight.to(tl.pointer_type(tl.float16)) + (begin[None, :] + group[:, None]) * (SIZE // 2)
    at = at + WORDS * 32 + (n % 16)[None, :]
    inside = (group * 32 < inputs)[:, None] & real[None, :]
    if KIND == "int8":
        number = number - 128.0
    number = number * tl.load(at, mask=inside, other=0.0).to(tl.float32)[:, None, :]
    if KIND == "int4":
        number = number + tl.load(at + 16, mask=inside, other=0.0).to(tl.float32)[:, None, :]
    return tl.reshape(number.to(ELEMENT), [STEP, OUTPUTS])


@triton.jit
def _summed(
    x, row, valid, weight, n, real, inputs, groups,
    KIND: tl.constexpr, ELEMENT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """The product of rows of x [.., inputs] and outputs n of a weight, [ROWS, OUTPUTS] float32."""
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, inputs, STEP):
        k = first + tl.arange(0, STEP)
        inside = k < inputs
        a = _inputs(x, row, k, valid, inside, inputs, ELEMENT)
        if KIND == "float":
            at = weight + n[None, :].to(tl.int64) * inputs + k[:, None]
            w = tl.load(at, mask=inside[:, None] & real[None, :], other=0.0)
        else:
            w = _unpacked(weight, n, real, first, inputs, groups, KIND, ELEMENT, OUTPUTS, STEP)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
    return acc


@triton.jit(do_not_specialize=["rows"])
def product(
    x, weight, bias, stream, out, rows, outputs, inputs, groups, scale,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STREAM: tl.constexpr, ELEMENT: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`stream + scale * (x @ weight.T + bias)`, a tile of rows and outputs. Grid: (tiles of outputs, tiles of rows).

    x: float32 or ELEMENT [rows, inputs]; stream, out: float32 [rows, outputs]; bias: float32 [outputs]. weight:
    `float`, a matrix [outputs, inputs] of ELEMENT; `int4` and `int8`, the packing of `ops.weights.grouped`,
    [outputs / 16, groups, 320 or 544] bytes, whose numbers are rounded to ELEMENT before they are multiplied.
    """
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    valid = row < rows
    real = n < outputs
    acc = _summed(x, row, valid, weight, n, real, inputs, groups, KIND, ELEMENT, ROWS, OUTPUTS, STEP, PRECISION)
    if HAS_BIAS:
        acc = acc + tl.load(bias + n, mask=real, other=0.0)[None, :]
    at = row[:, None] * outputs + n[None, :]
    stored = valid[:, None] & real[None, :]
    if HAS_STREAM:
        acc = tl.load(stream + at, mask=stored, other=0.0) + acc * scale
    tl.store(out + at, acc, mask=stored)


@triton.jit(do_not_specialize=["rows"])
def product_glu(
    x, weight, bias, out, rows, outputs, inputs, groups,
    ACT: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, ELEMENT: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """act(gate) * up of gate | up = `x @ weight.T + bias`. Grid: (tiles of outputs, tiles of rows).

    As `product`, of a weight with 2 * outputs; out: float32 [rows, outputs].
    """
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    valid = row < rows
    real = n < outputs
    gate = _summed(x, row, valid, weight, n, real, inputs, groups, KIND, ELEMENT, ROWS, OUTPUTS, STEP, PRECISION)
    m = n + outputs
    up = _summed(x, row, valid, weight, m, real, inputs, groups, KIND, ELEMENT, ROWS, OUTPUTS, STEP, PRECISION)
    if HAS_BIAS:
        gate = gate + tl.load(bias + n, mask=real, other=0.0)[None, :]
        up = up + tl.load(bias + m, mask=real, other=0.0)[None, :]
    at = row[:, None] * outputs + n[None, :]
    tl.store(out + at, gated(gate, up, ACT), mask=valid[:, None] & real[None, :])


@triton.jit(do_not_specialize=["rows"])
def per_head_product(
    x, matrices, out, rows, heads, inputs, outputs,
    ELEMENT: tl.constexpr, ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A head's product with its matrix. Grid: (tiles of outputs, tiles of rows, heads).

    x: float32 [rows, heads, inputs]; matrices: [heads, inputs, outputs] of ELEMENT; out: float32 [rows, heads,
    outputs].
    """
    head = tl.program_id(2).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    valid = row < rows
    real = n < outputs
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, inputs, STEP):
        k = first + tl.arange(0, STEP)
        inside = k < inputs
        a = _inputs(x, row * heads + head, k, valid, inside, inputs, ELEMENT)
        w = tl.load(
            matrices + (head * inputs + k[:, None]) * outputs + n[None, :], mask=inside[:, None] & real[None, :],
            other=0.0,
        )  # fmt: skip
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
    at = (row[:, None] * heads + head) * outputs + n[None, :]
    tl.store(out + at, acc, mask=valid[:, None] & real[None, :])


@triton.jit
def expert_product(
    x, weights, biases, order, experts, firsts, ends, out, outputs, inputs, groups,
    SHARE: tl.constexpr, KIND: tl.constexpr, HAS_BIAS: tl.constexpr, ELEMENT: tl.constexpr, ROWS: tl.constexpr,
    OUTPUTS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Products of routes, each a token and one of its experts, with their expert's weight.

    Grid: (tiles of outputs, tiles of routes). A tile has routes of one expert. `experts` int64 [tiles] tells which, or
    the number of experts where a tile has none; `firsts` int64 [tiles], where they begin in `order`. `order` int64
    [routes] has the routes of each expert together, up to its place in `ends` int64 [experts + 1]. weights: addresses
    int64 [experts] of weights as those of `product`; biases: of float32 [outputs]. x: float32 [routes / SHARE,
    inputs], of SHARE routes that follow each other; out: float32 [routes, outputs].
    """
    expert = tl.load(experts + tl.program_id(1))
    first = tl.load(firsts + tl.program_id(1))
    end = tl.load(ends + expert)
    if first < end:
        place = first + tl.arange(0, ROWS)
        valid = place < end
        route = tl.load(order + place, mask=valid, other=0)
        n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
        real = n < outputs
        address = tl.load(weights + expert)
        if KIND == "float":
            weight = pointer(address, ELEMENT)
        else:
            weight = pointer(address, tl.uint8)
        row = route // SHARE
        acc = _summed(x, row, valid, weight, n, real, inputs, groups, KIND, ELEMENT, ROWS, OUTPUTS, STEP, PRECISION)
        if HAS_BIAS:
            bias = tl.load(biases + expert).to(tl.pointer_type(tl.float32))
            acc = acc + tl.load(bias + n, mask=real, other=0.0)[None, :]
        tl.store(out + route[:, None] * outputs + n[None, :], acc, mask=valid[:, None] & real[None, :])


@triton.jit
def weigh(y, weights, out, width, TOP_K: tl.constexpr, WEIGHS: tl.constexpr, WIDTH: tl.constexpr):
    """The sum of a token's routes in their order. Grid: (tokens, parts of `WIDTH`).

    y: float32 [tokens * TOP_K, width]; weights: float32 [tokens * TOP_K]; out: float32 [tokens, width].
    """
    token = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = e < width
    total = tl.zeros([WIDTH], tl.float32)
    for k in range(0, TOP_K):
        part = tl.load(y + (token * TOP_K + k) * width + e, mask=inside, other=0.0)
        if WEIGHS:
            part = part * tl.load(weights + token * TOP_K + k)
        total = total + part
    tl.store(out + token * width + e, total, mask=inside)


@triton.jit
def argmax_parts(x, largest, places, width, parts, WIDTH: tl.constexpr):
    """The largest number of a part of a row and its first place; NaN is larger than all. Grid: (rows, parts).

    x: float32 [rows, width]; largest: float32 [rows, parts]; places: int64 [rows, parts].
    """
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    values = tl.load(x + row * width + e, mask=e < width, other=float("-inf"))
    nothing = values != values
    any_nothing = tl.max(nothing.to(tl.int32), 0) > 0
    top = tl.max(tl.where(nothing, float("-inf"), values), 0)
    found = tl.where(any_nothing, nothing, (values == top) & (e < width))
    place = tl.min(tl.where(found, e, width), 0)
    tl.store(largest + row * parts + tl.program_id(1), tl.where(any_nothing, float("nan"), top))
    tl.store(places + row * parts + tl.program_id(1), place.to(tl.int64))


@triton.jit
def argmax_merged(largest, places, top, place, parts, PARTS: tl.constexpr):
    """The largest of a row's parts, the first of equals. Grid: (rows,). top: float32 [rows]; place: int64 [rows]."""
    row = tl.program_id(0).to(tl.int64)
    p = tl.arange(0, PARTS)
    values = tl.load(largest + row * parts + p, mask=p < parts, other=float("-inf"))
    nothing = values != values
    any_nothing = tl.max(nothing.to(tl.int32), 0) > 0
    best = tl.max(tl.where(nothing, float("-inf"), values), 0)
    found = tl.where(any_nothing, nothing, (values == best) & (p < parts))
    first = tl.min(tl.where(found, p, parts), 0)
    tl.store(top + row, tl.where(any_nothing, float("nan"), best))
    tl.store(place + row, tl.load(places + row * parts + first))


@triton.jit
def norm(
    x, weight, bias, out, width, own, eps, LAYER: tl.constexpr, HAS_BIAS: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Normalize one row by its root mean square, or if LAYER by mean and deviation. Grid: (rows,).

    x, out: float32 [rows, width]; weight, bias: float32 [own, width], of rows whose numbers are alike modulo `own`.
    """
    e = tl.arange(0, WIDTH)
    inside = e < width
    at = tl.program_id(0).to(tl.int64)
    values = tl.load(x + at * width + e, mask=inside, other=0.0)
    if LAYER:
        values = tl.where(inside, values - tl.sum(values, 0) / width, 0.0)
    mean = tl.sum(values * values, 0) / width
    parameters = at % own * width + e
    y = values * tl.rsqrt(mean + eps) * tl.load(weight + parameters, mask=inside, other=0.0)
    if HAS_BIAS:
        y = y + tl.load(bias + parameters, mask=inside, other=0.0)
    tl.store(out + at * width + e, y, mask=inside)


@triton.jit
def glu(x, out, width, ACT: tl.constexpr, WIDTH: tl.constexpr):
    """`gated`, a part of a row. Grid: (rows, parts of `WIDTH`). x: float32 [rows, 2 * width] = gate | up."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = e < width
    gate = tl.load(x + row * 2 * width + e, mask=inside, other=0.0)
    up = tl.load(x + row * 2 * width + width + e, mask=inside, other=0.0)
    tl.store(out + row * width + e, gated(gate, up, ACT), mask=inside)
