"""Tiles of queries or rows, warps and stages of each kernel, in a table: nothing is timed while a model runs.

They are chosen so that what a thread computes stays in its registers, and so that the shared memory of sm_80, 90, 100
and 120 suffices; wide float32 vectors need more, see `shared_needed`. `tests/interpreted/resources.json` tells both.
None was timed on a card. Results do not depend on them: rows of a tile do not meet, and the matrix unit sums in one
order.
"""

from __future__ import annotations

from typing import NamedTuple

from lmstate.ops.cuda.device import FEW_ROWS, padded


class KernelShape(NamedTuple):
    """Rows of a tile, warps of a program, stages of its loads."""

    rows: int
    warps: int
    stages: int = 2


def attention(queries: int, width: int, bits: int = 0) -> KernelShape:
    """The shape for `queries` queries per KV head, and values of `width` elements: floats, or codes of `bits` bits."""
    most = 32 if width <= 128 and not bits else FEW_ROWS
    return KernelShape(min(padded(queries), most), 8)


def shared_needed(width: int, itemsize: int) -> int:
    """Shared memory that a program of attention to keys of this width takes, if it is more than each GPU has."""
    if itemsize < 4 or width <= 128:
        return 0
    return 151_616 if width <= 256 else 188_992


def product(rows: int) -> KernelShape:
    """The shape for `rows` rows of activations."""
    tile = min(padded(rows, FEW_ROWS), 64)
    return KernelShape(tile, 8 if tile == 64 else 4)


GATED_DELTA = SSD = KernelShape(8, 1)
"""`rows`: values that a program holds. One warp sums over keys without a barrier, token by token."""
