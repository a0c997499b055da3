"""Choosing positions by an index, and putting them side by side, checked so that C may trust its pointers."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from lmstate.ops.cpu import abi
from lmstate.ops.cpu.abi import KINDS
from lmstate.ops.cpu.arguments import function, integers, table_pointers, table_shape
from lmstate.ops.types.block_table import BLOCK_TOKENS, Stored


class ChoosingBodies:
    """The bodies of one variant."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._choose = function(library, "lmstate_choose")
        self._gather = function(library, "lmstate_gather")

    def can_choose(self, q: Tensor, keys: Stored, weights: Tensor | None = None) -> bool:
        """Whether these dtypes and strides are among those of the body."""
        floats = (q,) if weights is None else (q, weights)
        dense = all(x.stride(-1) == 1 for x in (keys, *floats))
        return dense and keys.dtype in KINDS and all(x.dtype == torch.float32 for x in floats)

    def choose(
        self, q: Tensor, weights: Tensor, keys: Stored, starts: Tensor, counts: Tensor, budget: int, rate: int = 1
    ) -> Tensor:
        """`ops.attention.choose.choose_positions`."""
        if weights.shape != q.shape[:3]:
            raise ValueError(f"weights {list(weights.shape)} do not fit queries {list(q.shape)}")
        chosen = torch.empty(*q.shape[:2], budget, dtype=torch.int64)
        w_row, w_token, _ = weights.stride()
        self._run(chosen, q, keys, starts, counts, weights=weights.data_ptr(), w_row=w_row, w_token=w_token, rate=rate)
        return chosen

    def choose_blocks(
        self, q: Tensor, keys: Stored, starts: Tensor, counts: Tensor, *, budget: int, size: int, local: int
    ) -> Tensor:
        """`ops.attention.attend_blocks.choose_blocks`."""
        chosen = torch.empty(*q.shape[:3], budget, dtype=torch.int64)
        self._run(chosen, q, keys, starts, counts, size=size, local=local, rate=1)
        return chosen

    def _run(self, chosen: Tensor, q: Tensor, keys: Stored, starts: Tensor, counts: Tensor, **others: int) -> None:
        """Fill `chosen`; `others` are fields of `abi.CHOOSE` that not both choices have."""
        rows, tokens, heads, dim = q.shape
        slots = keys.shape[2]
        if keys.shape != (rows, 1, slots, dim):
            raise ValueError(f"queries {list(q.shape)} do not fit index keys {list(keys.shape)}")
        starts, counts = integers(starts, "starts", rows), integers(counts, "counts", rows)
        scores = torch.empty(*chosen.shape[:-1], -(-slots // BLOCK_TOKENS) * BLOCK_TOKENS, dtype=torch.float32)
        q_row, q_token, q_head, _ = q.stride()
        (table,), (table_row, block) = table_pointers(keys), table_shape(keys)
        given = {"weights": 0, "w_row": 0, "w_token": 0, "size": 0, "local": 0, **others}
        arguments = abi.CHOOSE.pack(
            q=q.data_ptr(), keys=keys.data_ptr(), starts=starts.data_ptr(), counts=counts.data_ptr(), table=table,
            scores=scores.data_ptr(), chosen=chosen.data_ptr(), rows=rows, tokens=tokens, heads=heads, dim=dim,
            slots=slots, budget=chosen.shape[-1], q_row=q_row, q_token=q_token, q_head=q_head,
            key_row=keys.stride(0), key_slot=keys.stride(2), table_row=table_row, block=block,
            kind=KINDS[keys.dtype], threads=torch.get_num_threads(), **given,
        )  # fmt: skip
        status = self._choose(arguments)
        if status < 0:
            raise MemoryError("no memory to turn the keys of an index")
        if status:
            raise ValueError(f"row {status - 1} does not fit: its start, its new tokens, and {slots} stored positions")

    def gather(self, stored: Stored, chosen: Tensor, head: int = 0) -> Tensor:
        """Vectors of a head of `[R, K, S, D]` at positions int64 `[R, N]` -> `[R, N, D]`; zeros where one is -1."""
        rows, heads, slots, width = stored.shape
        out = torch.empty(*chosen.shape, width, dtype=stored.dtype)
        fits = chosen.shape[0] == rows and 0 <= head < heads and stored.stride(3) == 1
        if not (fits and chosen.is_contiguous()):
            raise ValueError(f"positions {list(chosen.shape)} of {list(stored.shape)} cannot be gathered")
        size = out.element_size()
        (table,), (table_row, block) = table_pointers(stored), table_shape(stored)
        arguments = abi.GATHER.pack(
            source=stored.data_ptr(), table=table, chosen=chosen.data_ptr(), to=out.data_ptr(), rows=rows,
            count=chosen.shape[1], bytes=width * size, slots=slots, row=stored.stride(0) * size,
            slot=stored.stride(2) * size, table_row=table_row, block=block, threads=torch.get_num_threads(),
            head=head * stored.stride(1) * size,
        )  # fmt: skip
        if status := self._gather(arguments):
            raise ValueError(f"a position of row {status - 1} is not stored: there are {slots}")
        return out
