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

    def can_choose(self, q: Tensor, weights: Tensor, keys: Stored) -> bool:
        """Whether these dtypes and strides are among those of the body."""
        return (
            q.dtype == weights.dtype == torch.float32
            and keys.dtype in KINDS
            and q.stride(3) == weights.stride(2) == keys.stride(3) == 1
        )

    def choose(
        self, q: Tensor, weights: Tensor, keys: Stored, starts: Tensor, counts: Tensor, budget: int, rate: int = 1
    ) -> Tensor:
        """`ops.attention.choose.choose_positions`."""
        rows, tokens, heads, dim = q.shape
        slots = keys.shape[2]
        if keys.shape != (rows, 1, slots, dim) or weights.shape != (rows, tokens, heads):
            raise ValueError(
                f"queries {list(q.shape)} and weights {list(weights.shape)} do not fit index keys {list(keys.shape)}"
            )
        starts, counts = integers(starts, "starts", rows), integers(counts, "counts", rows)
        padded = -(-slots // BLOCK_TOKENS) * BLOCK_TOKENS
        scores = torch.empty(rows, tokens, padded, dtype=torch.float32)
        chosen = torch.empty(rows, tokens, budget, dtype=torch.int64)
        (q_row, q_token, q_head, _), (w_row, w_token, _) = q.stride(), weights.stride()
        (table,), (table_row, block) = table_pointers(keys), table_shape(keys)
        arguments = abi.CHOOSE.pack(
            q=q.data_ptr(), weights=weights.data_ptr(), keys=keys.data_ptr(), starts=starts.data_ptr(),
            counts=counts.data_ptr(), table=table, scores=scores.data_ptr(), chosen=chosen.data_ptr(), rows=rows,
            tokens=tokens, heads=heads, dim=dim, slots=slots, budget=budget, q_row=q_row, q_token=q_token,
            q_head=q_head, w_row=w_row, w_token=w_token, key_row=keys.stride(0), key_slot=keys.stride(2),
            table_row=table_row, block=block, kind=KINDS[keys.dtype], threads=torch.get_num_threads(),
            rate=rate,
        )  # fmt: skip
        status = self._choose(arguments)
        if status < 0:
            raise MemoryError("no memory to turn the keys of an index")
        if status:
            raise ValueError(f"row {status - 1} does not fit: its start, its new tokens, and {slots} stored positions")
        return chosen

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
