"""A draw from a row's distribution. Weights are whole numbers: their sums are exact, in any order."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _weights(x, row, place, top, threshold, width, by, least, unit):
    """Weights int64 of a row's numbers at places: `exp(by * (x - top))` in units of 1 / `unit`, 0 where left out."""
    values = tl.load(x + row * width + place, mask=place < width, other=float("-inf"))
    bits = values.to(tl.int32, bitcast=True)
    upper = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits).to(tl.int64)
    rank = upper * 4294967296 + (4294967295 - place.to(tl.int64))
    e = tl.exp(((values - top) * by).to(tl.float64))
    kept = (place < width) & (rank >= threshold) & (e >= least)
    return tl.where(kept, (e * unit).to(tl.int64), 0)


@triton.jit
def weigh_parts(x, tops, thresholds, sums, width, parts, by, least, unit, WIDTH: tl.constexpr):
    """The sum of the weights of a part of a row. Grid: (rows, parts).

    x: float32 [rows, width]; tops: float32 [rows], the largest numbers; thresholds: int64 [rows], the least rank that
    is kept, see `ops.cuda.sampling.ranks`; sums: int64 [rows, parts].
    """
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    top, threshold = tl.load(tops + row), tl.load(thresholds + row)
    weights = _weights(x, row, place, top, threshold, width, by, least, unit)
    tl.store(sums + row * parts + tl.program_id(1), tl.sum(weights, 0))


@triton.jit
def draw(
    x, tops, thresholds, sums, uniform, picked, width, parts, by, least, unit, WIDTH: tl.constexpr, PARTS: tl.constexpr
):  # fmt: skip
    """The place whose share of the sum a number falls on. Grid: (rows,).

    As `weigh_parts`; uniform: float64 [rows] in 0..1; picked: int64 [rows], -1 where the largest number is not finite.
    """
    row = tl.program_id(0).to(tl.int64)
    top, threshold = tl.load(tops + row), tl.load(thresholds + row)
    p = tl.arange(0, PARTS)
    ends = tl.cumsum(tl.load(sums + row * parts + p, mask=p < parts, other=0), 0)
    total = tl.max(ends, 0)
    point = (tl.load(uniform + row) * total.to(tl.float64)).to(tl.int64)
    point = tl.maximum(tl.minimum(point, total - 1), 0)
    part = tl.minimum(tl.sum((ends <= point).to(tl.int32), 0), parts - 1)
    before = tl.max(tl.where(p < part, ends, 0), 0)
    place = part * WIDTH + tl.arange(0, WIDTH)
    own = tl.cumsum(_weights(x, row, place, top, threshold, width, by, least, unit), 0)
    found = part * WIDTH + tl.sum((own <= point - before).to(tl.int32), 0)
    finite = (tl.abs(top) < float("inf")) & (total > 0)
    tl.store(picked + row, tl.where(finite, tl.minimum(found, width - 1).to(tl.int64), -1))
