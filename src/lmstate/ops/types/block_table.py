"""Stored vectors that are in blocks of positions, as operations read and write them."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple, TypeAlias, cast, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK_TOKENS = 64
"""Positions of a block: as many as attention scores together, and as keys share the scales of a channel."""


class KVBlock(ABC):
    """`BLOCK_TOKENS` positions of one row in one layer: a tensor `[*heads, B, D]` for each of its buffers.

    It lives as long as it is held.
    """

    __slots__ = ("__weakref__", "_tensors", "filled", "nbytes")

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        self.filled = 0
        """The number of first positions that may hold numbers, also of discarded tokens; used in slabs only."""
        self._tensors: tuple[Tensor, ...] | None = None

    @property
    @abstractmethod
    def pointers(self) -> tuple[int, ...]:
        """Addresses of the buffers: all that native bodies need."""

    @abstractmethod
    def make(self) -> tuple[Tensor, ...]:
        """Its tensors, made at first use."""

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Of each buffer, `[*heads, B, D]`."""
        if self._tensors is None:
            with torch.inference_mode(False):  # also if the first caller is in that mode: others may follow gradients
                self._tensors = self.make()
        return self._tensors

    def requires_grad(self, buffer: int | None = None) -> bool:
        """Whether a gradient follows what is in a buffer; None: in any of them."""
        tensors = self._tensors or ()
        return any(tensor.requires_grad for tensor in (tensors if buffer is None else tensors[buffer : buffer + 1]))

    def forget_graph(self) -> None:
        """Have no gradient follow what is in it."""
        self._tensors = None


class RowBlocks(NamedTuple):
    """The blocks of one row, from the one of position 0 on. Never changed: rows, forks and snapshots hold the same."""

    blocks: tuple[KVBlock | None, ...] = ()
    """None for those that a window has left behind."""
    shared: int = 0
    """The number of first blocks that other holders may share: a write into one of them goes to a copy."""
    low: int = 0
    """The first position that is whole."""


class BlockTable:
    """Keys, values, latents, codes or scales of R rows: position p of a row is in place p % B of its block p // B.

    It stands for a tensor `[R, K, S, D]`, S the positions that have a place in the table; native bodies read
    `pointers`, contiguous int64 `[R, S / B]`, instead.
    """

    def __init__(
        self, rows: Sequence[RowBlocks], buffer: int, pointers: NDArray[np.int64], heads: int, width: int, like: Tensor
    ) -> None:
        """`rows`: followed as they change. `buffer`: which tensor of the blocks. `like`: of their dtype and device."""
        self.rows, self.buffer, self.pointers = rows, buffer, pointers
        self.address: int = pointers.__array_interface__["data"][0]
        """Of the first pointer, for C."""
        self.heads, self.width = heads, width
        self.dtype, self.device, self.is_cpu = like.dtype, like.device, like.is_cpu
        self.requires_grad = any(
            block.requires_grad(buffer) for row in rows for block in row.blocks if block is not None
        )

    def of_pointers(self, pointers: NDArray[np.int64]) -> BlockTable:
        """A table of single heads at these addresses, contiguous int64 `[R', S' / B]`, for native bodies alone."""
        made = copy.copy(self)
        made.rows, made.pointers, made.heads = (), pointers, 1
        made.address = pointers.__array_interface__["data"][0]
        return made

    @property
    def blocks(self) -> list[list[Tensor | None]]:
        """Of each row, `[K, B, D]`."""
        return [self._row(r) for r in range(len(self.rows))]

    def _row(self, r: int, first: int = 0, last: int | None = None) -> list[Tensor | None]:
        shape = (self.heads, BLOCK_TOKENS, self.width)
        blocks = self.rows[r].blocks[first:last]
        return [None if block is None else block.tensors[self.buffer].view(shape) for block in blocks]

    @property
    def shape(self) -> torch.Size:
        rows, entries = self.pointers.shape
        return torch.Size((rows, self.heads, entries * BLOCK_TOKENS, self.width))

    def __len__(self) -> int:
        return len(self.rows)

    @overload
    def stride(self) -> tuple[int, ...]: ...
    @overload
    def stride(self, axis: int) -> int: ...

    def stride(self, axis: int | None = None) -> tuple[int, ...] | int:
        """Of a block, the row's axis aside."""
        strides = (0, BLOCK_TOKENS * self.width, self.width, 1)
        return strides if axis is None else strides[axis]

    def data_ptr(self) -> int:
        """0: the pointers are in the table."""
        return 0

    def forget(self) -> None:
        """Keep nothing of what rows held before."""

    def dense(self) -> Tensor:
        """The same as rings `[R, K, S', D]` of the S' positions of the row that holds most: p in slot p % S'."""
        blocks = self.blocks
        begins = [next((i for i, block in enumerate(row) if block is not None), len(row)) for row in blocks]
        count = max((len(row) - begin for row, begin in zip(blocks, begins)), default=0)
        # Of no size where no row holds fewer: on another device, to fill it is a launch.
        fewer = any(len(row) - begin < count for row, begin in zip(blocks, begins))
        size = (self.heads, BLOCK_TOKENS if fewer else 0, self.width)
        nothing = torch.zeros(size, dtype=self.dtype, device=self.device)
        rings = []
        for row, begin in zip(blocks, begins):
            ring = [nothing] * count
            for i, block in enumerate(row[begin:], begin):
                assert block is not None, "a row's blocks follow each other"
                ring[i % count] = block
            rings.append(torch.cat(ring or [nothing], dim=1))
        return rings[0][None] if len(rings) == 1 else torch.stack(rings)

    def span(self, rows: range, low: int, end: int, tracked: bool = False) -> Tensor:
        """The positions low..end of some rows, `[n, K, end - low, D]`.

        tracked: gradients follow what is read, which must not change then when more is written.
        """
        first, last = low // BLOCK_TOKENS, -(-end // BLOCK_TOKENS)
        if low == end:
            return torch.zeros(len(rows), self.heads, 0, self.width, dtype=self.dtype, device=self.device)
        found = []
        for r in rows:
            blocks = self._row(r, first, last)
            assert None not in blocks, "a row's blocks follow each other"
            found.append(torch.cat(cast(list[Tensor], blocks), dim=1))
        whole = found[0][None] if len(found) == 1 else torch.stack(found)
        return whole[:, :, low - first * BLOCK_TOKENS : end - first * BLOCK_TOKENS]

    def write(self, new: Tensor, starts: Tensor, counts: Tensor) -> None:
        """Store each row's first `counts[r]` new tokens `[R, T, K, D]` from position `starts[r]` on, rounded."""
        for row, each, start, count in zip(self.blocks, new, starts.tolist(), counts.tolist()):
            self._write(row, each[:count].transpose(0, 1), start)
        self.requires_grad |= new.requires_grad

    def write_back(self, rings: Tensor, starts: Tensor, counts: Tensor, least: int = 1) -> None:
        """Store what a step made of `dense()`: from the `least` positions on that its first one is among."""
        for row, ring, start, count in zip(self.blocks, rings, starts.tolist(), counts.tolist()):
            if not count:
                continue
            first = start // least * least
            positions = torch.arange(first, start + count, device=self.device) % ring.shape[1]
            self._write(row, ring[:, positions], first)

    def _write(self, row: Sequence[Tensor | None], values: Tensor, start: int) -> None:
        """values `[K, n, D]` at the positions from `start` on."""
        done = 0
        while done < values.shape[1]:
            index, place = divmod(start + done, BLOCK_TOKENS)
            count, block = min(BLOCK_TOKENS - place, values.shape[1] - done), row[index]
            assert block is not None, "no room was reserved for the step"
            block[:, place : place + count] = values[:, done : done + count]
            done += count


Stored: TypeAlias = Tensor | BlockTable
"""Vectors of R rows, `[R, K, S, D]`: rings, position p in slot p % S, or blocks."""


def dense(x: Stored) -> Tensor:
    """Rings, for a reference."""
    return x.dense() if isinstance(x, BlockTable) else x
