"""Products with float and packed weights, norms and gates.

A product sums its inputs in steps of `STEP` in order, in one accumulator, whatever the number of rows of a tile. On
Hopper mma.sync and wgmma give the same bits for bfloat16 and float16 (arXiv 2511.10909).
"""

from __future__ import annotations

import triton
import triton.language as tl

from lmstate.ops.cuda.kernels.functions import activated


@triton.jit
def _inputs(x, row, k, valid, inside, K, ELEMENT: tl.constexpr):
    return tl.load(x + row[:, None] * K + k[None, :], mask=valid[:, None] & inside[None, :], other=0.0).to(ELEMENT)


@triton.jit
def product(
    x, weight, bias, stream, out, rows, outputs, inputs, groups, scale,
    KIND: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_STREAM: tl.constexpr, ELEMENT: tl.constexpr,
    ROWS: tl.constexpr, OUTPUTS: tl.constexpr, STEP: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """`stream + scale * (x @ weight.T + bias)`, a tile of rows and outputs. Grid: (tiles of outputs, tiles of rows).

    x: float32 [rows, inputs]; stream, out: float32 [rows, outputs]; bias: float32 [outputs]. weight: `float`, a matrix
    [outputs, inputs] of ELEMENT; `int4` and `int8`, the packing of `ops.weights.grouped`, [outputs / 16, groups, 320
    or 544] bytes, whose numbers are rounded to ELEMENT before they are multiplied.
    """
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    n = tl.program_id(0) * OUTPUTS + tl.arange(0, OUTPUTS)
    step = tl.arange(0, STEP)
    valid = row < rows
    real = n < outputs
    acc = tl.zeros([ROWS, OUTPUTS], tl.float32)
    for first in range(0, inputs, STEP):
        k = first + step
        inside = k < inputs
        a = _inputs(x, row, k, valid, inside, inputs, ELEMENT)
        mask = inside[:, None] & real[None, :]
        if KIND == "float":
            w = tl.load(weight + n[None, :] * inputs + k[:, None], mask=mask, other=0.0)
        else:
            size: tl.constexpr = 320 if KIND == "int4" else 544
            quants: tl.constexpr = 256 if KIND == "int4" else 512
            block = (n[None, :].to(tl.int64) // 16 * groups + (k // 32)[:, None]) * size
            lane = n[None, :] % 16
            i = (k % 32)[:, None]
            if KIND == "int4":
                byte = tl.load(weight + block + i // 8 * 64 + lane * 4 + i % 4, mask=mask, other=0)
                number = ((byte >> (i % 8 // 4 * 4).to(tl.uint8)) & 15).to(tl.float32)
            else:
                byte = tl.load(weight + block + i // 4 * 64 + lane * 4 + i % 4, mask=mask, other=0)
                number = byte.to(tl.float32) - 128.0
            at = (weight + block + quants).to(tl.pointer_type(tl.float16)) + lane
            number = number * tl.load(at, mask=mask, other=0.0).to(tl.float32)
            if KIND == "int4":
                number = number + tl.load(at + 16, mask=mask, other=0.0).to(tl.float32)
            w = number.to(ELEMENT)
        acc = tl.dot(a, w, acc, input_precision=PRECISION)
    if HAS_BIAS:
        acc = acc + tl.load(bias + n, mask=real, other=0.0)[None, :]
    at = row[:, None] * outputs + n[None, :]
    stored = valid[:, None] & real[None, :]
    if HAS_STREAM:
        acc = tl.load(stream + at, mask=stored, other=0.0) + acc * scale
    tl.store(out + at, acc, mask=stored)


@triton.jit
def rms_norm(x, weight, out, width, eps, WIDTH: tl.constexpr):
    """Normalize one row. Grid: (rows,). x, out: float32 [rows, width]; weight: float32 [width]."""
    e = tl.arange(0, WIDTH)
    inside = e < width
    row = tl.program_id(0).to(tl.int64) * width
    values = tl.load(x + row + e, mask=inside, other=0.0)
    mean = tl.sum(values * values, 0) / width
    y = values * tl.rsqrt(mean + eps) * tl.load(weight + e, mask=inside, other=0.0)
    tl.store(out + row + e, y, mask=inside)


@triton.jit
def glu(x, out, width, ACT: tl.constexpr, WIDTH: tl.constexpr):
    """act(gate) * up, a part of a row. Grid: (rows, parts of `WIDTH`). x: float32 [rows, 2 * width] = gate | up."""
    row = tl.program_id(0).to(tl.int64)
    e = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    inside = e < width
    gate = tl.load(x + row * 2 * width + e, mask=inside, other=0.0)
    up = tl.load(x + row * 2 * width + width + e, mask=inside, other=0.0)
    tl.store(out + row * width + e, activated(gate, ACT) * up, mask=inside)
