"""Tiles of queries or rows, warps and stages of each kernel, in a table: nothing is timed while a model runs.

They are chosen so that what a thread computes stays in its registers, and so that the shared memory of sm_80, 90, 100
and 120 suffices; wide float32 vectors need more, see `shared_needed`. `tests/interpreted/resources.json` tells both.
None was timed on a card. Results do not depend on them: rows and outputs of a tile do not meet, and the matrix unit
sums in one order.

A product of few rows is as fast as its weight comes from memory. A memory of 5 TB/s that answers after 600 ns has 3 MB
on the way. For that, a product has many programs, and each reads several steps ahead.
"""

from __future__ import annotations

from typing import NamedTuple

from lmstate.ops.cuda.device import FEW_ROWS, padded

PROGRAMS = 256
"""Programs that keep a GPU busy: the largest have 130 to 190 processors."""
LARGE = 128
"""Rows and outputs of the largest tile of a product."""


class KernelShape(NamedTuple):
    """Rows of a tile, warps of a program, stages of its loads, outputs of a tile of a product."""

    rows: int
    warps: int
    stages: int = 2
    outputs: int = 64


def attention(queries: int, width: int, bits: int = 0) -> KernelShape:
    """The shape for `queries` queries per KV head, and values of `width` elements: floats, or codes of `bits` bits."""
    most = 32 if width <= 128 and not bits else FEW_ROWS
    return KernelShape(min(padded(queries), most), 8, 3)  # an address is read two steps ahead, keys one


def shared_needed(width: int, itemsize: int) -> int:
    """Shared memory that a program of attention to keys of this width takes, if it is more than each GPU has."""
    if itemsize < 4 or width <= 128:
        return 0
    return 151_632 if width <= 256 else 188_992


def product(rows: int, outputs: int, itemsize: int, sums: int = 1) -> KernelShape:
    """The shape for `rows` rows of activations and `outputs` outputs, of elements of `itemsize` bytes.

    sums: 2 where a program computes a gate and what it opens.
    """
    wide = LARGE // sums
    if itemsize == 2 and rows >= LARGE and -(-rows // LARGE) * -(-outputs // wide) >= PROGRAMS // 2:
        return KernelShape(LARGE, 8, 3, wide)
    tile = row_tile(rows)
    return product_of_tiles(tile, -(-rows // tile), outputs, itemsize)


def row_tile(rows: int) -> int:
    """Rows of a tile that has no more than a quarter of the largest one's numbers."""
    return min(padded(rows, FEW_ROWS), 64)


def product_of_tiles(tile: int, tiles: int, outputs: int, itemsize: int) -> KernelShape:
    """The shape for `tiles` tiles of `tile` rows, at most 64: the widest that gives enough programs, or a square."""
    wide = next(wide for wide in (64, 32, 16) if wide <= tile or tiles * -(-outputs // wide) >= PROGRAMS)
    return KernelShape(tile, 8 if tile == 64 else 4, (6 if tile == FEW_ROWS else 4) if itemsize == 2 else 2, wide)


GATED_DELTA = SSD = KernelShape(8, 1)
"""`rows`: values that a program holds. One warp sums over keys without a barrier, token by token."""
