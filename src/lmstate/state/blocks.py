"""Blocks of stored positions: the pool that counts them, and what a snapshot holds of a row by reference."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import accumulate
from math import prod
from numbers import Integral
from threading import RLock
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from lmstate.errors import CapacityError, StateError
from lmstate.ops import memory
from lmstate.ops.types.block_table import BLOCK_TOKENS, KVBlock, RowBlocks
from lmstate.ops.types.slabs import BufferShape, Slabs


class BlockPool:
    """Account of the blocks of one or several states, in bytes, with a limit if there is one.

    A block counts from its allocation until it has no holder: no row, no mark, no snapshot.
    """

    def __init__(self, limit: int | None = None) -> None:
        """`limit`: bytes. Raises `StateError` for a number below 0, and for anything but a number."""
        if limit is not None and not (isinstance(limit, Integral) and limit >= 0):
            raise StateError(
                f"a pool of {limit!r:.80} bytes was asked for; give a whole number from 0 on, or None for no limit"
            )
        self.limit = limit
        self._nbytes = 0
        self._sizes: dict[ref[KVBlock], int] = {}
        # A block may end in any thread, in the middle of anything: its callback runs no line of Python.
        self._ended: deque[ref[KVBlock]] = deque()
        self.lock = RLock()
        """States in several threads may share a pool: held by who requires room until it has taken it."""

    def __repr__(self) -> str:
        limit = "" if self.limit is None else f" of {self.limit / 2**20:,.1f}"
        return f"BlockPool({self.nbytes / 2**20:,.1f}{limit} MiB)"

    def __deepcopy__(self, memo: dict[int, Any]) -> BlockPool:
        return self  # copies of a state share its blocks

    @property
    def nbytes(self) -> int:
        """Bytes of the blocks that are held."""
        with self.lock:
            self._forget_ended()
            return self._nbytes

    def allocate(self, spec: BlockSpec, count: int = 1, zeroed: bool = True) -> list[KVBlock]:
        """Blocks of zeros, or of any numbers."""
        blocks = spec.new(count, zeroed)
        with self.lock:
            self._forget_ended()
            for block in blocks:
                self._sizes[ref(block, self._ended.append)] = block.nbytes
                self._nbytes += block.nbytes
        return blocks

    def _forget_ended(self) -> None:
        while self._ended:
            self._nbytes -= self._sizes.pop(self._ended.popleft())

    def require(self, nbytes: int) -> None:
        """Raise `CapacityError` if there is no room for `nbytes` bytes."""
        if self.limit is not None and self.nbytes + nbytes > self.limit:
            raise CapacityError(
                f"{nbytes / 2**20:,.2f} MiB of blocks were asked for; the pool holds {self.nbytes / 2**20:,.2f} of at "
                f"most {self.limit / 2**20:,.2f} MiB: drop rows, marks or snapshots, or make a larger pool"
            )


@dataclass(frozen=True)
class Buffer:
    """The vectors that a layer keeps of every position, under one name."""

    heads: tuple[int, ...]  # (K,), or () where all heads share them
    width: int
    dtype: torch.dtype
    device: torch.device

    def zeros(self, slots: int, rows: tuple[int, ...] = ()) -> Tensor:
        """`[*rows, *heads, slots, width]`"""
        return torch.zeros(*rows, *self.heads, slots, self.width, dtype=self.dtype, device=self.device)

    @property
    def shape(self) -> tuple[int, ...]:
        """Of a block."""
        return (*self.heads, BLOCK_TOKENS, self.width)

    @property
    def nbytes(self) -> int:
        """Of a block."""
        return prod(self.heads) * BLOCK_TOKENS * self.width * self.dtype.itemsize


class BlockSpec:
    """Sizes of the blocks of some buffers, and where they are: on a CPU those of a block in one piece of memory, where
    decoding reads fast, on other devices many blocks in one tensor. Either become tensors of their own at first use."""

    def __init__(self, buffers: Mapping[str, Buffer]) -> None:
        self.buffers = dict(buffers)
        self.nbytes = sum(buffer.nbytes for buffer in buffers.values())
        device = next((buffer.device for buffer in buffers.values()), torch.device("cpu"))
        shapes = [BufferShape(buffer.heads, buffer.width, buffer.dtype) for buffer in buffers.values()]
        self.slabs = None if device.type == "cpu" else Slabs(shapes, device)
        """Their memory on a device other than the processor."""
        sizes = [-(-buffer.nbytes // memory.LINE) * memory.LINE for buffer in buffers.values()]
        *self._places, self._size = accumulate(sizes, initial=0)

    def new(self, count: int, zeroed: bool) -> list[KVBlock]:
        """Blocks that are not counted, of zeros or of any numbers. Raises MemoryError."""
        if self.slabs is not None:
            return self.slabs.take(count, zeroed)
        blocks: list[KVBlock] = []
        for _ in range(count):
            piece = memory.pieces.take(self._size)
            if zeroed:
                piece.memory[:] = _zeros(self._size)
            blocks.append(_PieceBlock(self, piece))
        return blocks

    def pointers(self, piece: memory.PageSpan) -> tuple[int, ...]:
        """Addresses of the buffers of a block."""
        return tuple(piece.address + at for at in self._places)

    def tensors(self, piece: memory.PageSpan) -> tuple[Tensor, ...]:
        """The buffers of a block."""
        return tuple(piece.tensor(at, b.shape, b.dtype) for at, b in zip(self._places, self.buffers.values()))

    def written(self, pool: BlockPool, start: int, tensors: Mapping[str, Tensor]) -> list[KVBlock]:
        """New blocks of tensors `[*heads, n, D]`, one for each buffer, of the positions from `start` on.

        Zeros are before them in the first block, and after them in the last. Raises `CapacityError` of the pool.
        """
        whole = [tensors[name] for name in self.buffers]
        stop = start + whole[0].shape[-2]
        begins = range(start // BLOCK_TOKENS * BLOCK_TOKENS, stop, BLOCK_TOKENS) if start < stop else ()
        spans = [(max(begin, start), min(begin + BLOCK_TOKENS, stop)) for begin in begins]
        with pool.lock:
            pool.require(len(spans) * self.nbytes)
            blocks = [block for a, b in spans for block in pool.allocate(self, zeroed=b - a < BLOCK_TOKENS)]
        for block, begin, (first, end) in zip(blocks, begins, spans):
            for own, of in zip(block.tensors, whole):
                own[..., first - begin : end - begin, :] = of[..., first - start : end - start, :].to(own)
            block.filled = end - begin
        return blocks


class _PieceBlock(KVBlock):
    """A block in one piece of the processor's memory."""

    __slots__ = ("_piece", "_pointers", "_spec")

    def __init__(self, spec: BlockSpec, piece: memory.PageSpan) -> None:
        super().__init__(spec.nbytes)
        self._spec, self._piece, self._pointers = spec, piece, spec.pointers(piece)

    @property
    def pointers(self) -> tuple[int, ...]:
        return self._pointers

    def make(self) -> tuple[Tensor, ...]:
        return self._spec.tensors(self._piece)


@cache
def _zeros(size: int) -> bytes:
    return bytes(size)


class CapturedBlocks(Mapping[str, Tensor]):
    """Positions `start .. stop - 1` of a row's buffers, held as blocks; tensors `[*heads, n, D]` are made on demand.

    A value: a holder of the blocks copies one before writing into it.
    """

    def __init__(
        self,
        buffers: Mapping[str, Buffer],
        row: RowBlocks,
        start: int,
        stop: int,
        unfinished: Mapping[str, int] | None = None,
    ) -> None:
        """`row.low` may be before `start`: the blocks hold more. `unfinished`: from which position on what is in a
        buffer is of no meaning, and reads as zeros."""
        self.buffers, self.row, self.start, self.stop = buffers, row, start, stop
        self.unfinished = unfinished or {}

    def __getitem__(self, name: str) -> Tensor:
        index = {name: i for i, name in enumerate(self.buffers)}[name]
        pieces = []
        for i in range(self.start // BLOCK_TOKENS, -(-self.stop // BLOCK_TOKENS)):
            block = self.row.blocks[i]
            assert block is not None, "a block that is captured was given up"
            first = i * BLOCK_TOKENS
            pieces.append(block.tensors[index][..., max(self.start - first, 0) : self.stop - first, :])
        if not pieces:
            return self.buffers[name].zeros(0)
        whole = torch.cat(pieces, dim=-2)  # a copy, also of one
        if (ends := self.unfinished.get(name)) is not None:
            whole[..., max(ends - self.start, 0) :, :] = 0
        return whole

    def __iter__(self) -> Iterator[str]:
        return iter(self.buffers)

    def __len__(self) -> int:
        return len(self.buffers)

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)

    def __deepcopy__(self, memo: dict[int, Any]) -> CapturedBlocks:
        return self

    @property
    def nbytes(self) -> int:
        """Of the positions, not of the blocks that hold them."""
        return (self.stop - self.start) * sum(buffer.nbytes for buffer in self.buffers.values()) // BLOCK_TOKENS

    def blocks(self) -> list[KVBlock]:
        return [block for block in self.row.blocks if block is not None]

    def follow(self, before: CapturedBlocks) -> None:
        """Complete the first block by what the piece before it holds there. The block must not have another holder
        yet."""
        index, place = divmod(self.start, BLOCK_TOKENS)
        if not place:
            return
        first, earlier = self.row.blocks[index], before.row.blocks[index]
        assert first is not None and earlier is not None, "a block that is captured was given up"
        if first is not earlier:  # else both are parts of one piece
            for own, other in zip(first.tensors, earlier.tensors):
                own[..., :place, :] = other[..., :place, :]

    def cut(self, start: int, stop: int) -> CapturedBlocks:
        """A part of the positions, which holds no other blocks."""
        first, last = start // BLOCK_TOKENS, -(-stop // BLOCK_TOKENS)
        blocks = (None,) * first + self.row.blocks[first:last]
        return self.like(RowBlocks(blocks, last, start), start, stop)

    def like(self, row: RowBlocks, start: int, stop: int) -> CapturedBlocks:
        """Other positions of the same buffers."""
        return CapturedBlocks(self.buffers, row, start, stop, self.unfinished)

    @staticmethod
    def joined(pieces: Sequence[CapturedBlocks]) -> CapturedBlocks:
        """Pieces of one row that follow each other. A block that two share is that of the later one.

        The writer of the later piece wrote into the earlier one's block, or into a copy of it.
        """
        blocks: list[KVBlock | None] = []
        for piece in pieces:
            first = piece.start // BLOCK_TOKENS
            blocks[first:] = [*[None] * (first - len(blocks)), *piece.row.blocks[first:]]
        start, last = pieces[0].start, pieces[-1]
        row = RowBlocks(tuple(blocks), len(blocks), start)
        return last.like(row, start, last.stop)


class Parts(Mapping[str, Tensor]):
    """Mappings of the members of a layer as one, under the names `{member}.{name}`."""

    def __init__(self, members: Sequence[Mapping[str, Tensor]]) -> None:
        self.members = tuple(members)

    def __getitem__(self, name: str) -> Tensor:
        member, _, rest = name.partition(".")
        if not member.isdecimal() or int(member) >= len(self.members):
            raise KeyError(name)
        return self.members[int(member)][rest]

    def __iter__(self) -> Iterator[str]:
        return (f"{i}.{name}" for i, member in enumerate(self.members) for name in member)

    def __len__(self) -> int:
        return sum(map(len, self.members))

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def nbytes_of(captured: Mapping[str, Tensor]) -> int:
    """Bytes of what a captured layer says, each position once, however many blocks hold it."""
    if isinstance(captured, CapturedBlocks):
        return captured.nbytes
    if isinstance(captured, Parts):
        return sum(map(nbytes_of, captured.members))
    return sum(tensor.nbytes for tensor in captured.values())


def pieces_of(captured: Mapping[str, Tensor]) -> Iterator[CapturedBlocks]:
    """All that a captured layer holds in blocks, one after the other."""
    if isinstance(captured, CapturedBlocks):
        yield captured
    elif isinstance(captured, Parts):
        for member in captured.members:
            yield from pieces_of(member)


def held_by(captured: Mapping[str, Tensor]) -> Iterator[KVBlock | Tensor]:
    """Blocks of a captured layer, which others may hold too, and its tensors."""
    if isinstance(captured, CapturedBlocks):
        yield from captured.blocks()
    elif isinstance(captured, Parts):
        for member in captured.members:
            yield from held_by(member)
    else:
        yield from captured.values()
