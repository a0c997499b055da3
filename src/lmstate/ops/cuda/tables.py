"""The integers of a step that its kernels read: tokens, starts, counts and addresses of blocks, sent in one copy."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from lmstate.ops.cuda.device import on_real_gpu


class StepBuffers:
    """Tensors of a step of R rows and T tokens, int64, that never move, and the pinned arrays that fill them.

    tokens `[R, T]`, starts `[R]`, counts `[R]`, tables `[buffers, R, entries]`: addresses of blocks, 0 where none is
    held. Two arrays take turns, each behind an event: a copy may still read one while the next step is written. A step
    whose blocks are those of the last one sends no addresses.
    """

    def __init__(self, rows: int, width: int, buffers: int, entries: int, device: torch.device) -> None:
        self.shape = rows, width, entries
        self._head = rows * width + 2 * rows
        size = self._head + buffers * rows * entries
        self._real = on_real_gpu(device)
        self._hosts = [torch.zeros(size, dtype=torch.int64, pin_memory=self._real) for _ in range(2)]
        self._sent: list[torch.cuda.Event | None] = [None, None]
        self._written: list[list[NDArray[np.int64] | None]] = [[None] * buffers for _ in range(2)]
        """The tables that are in each array."""
        self._held: list[NDArray[np.int64] | None] = [None] * buffers
        """The tables that are on the device."""
        self._turn = 0
        self._mirror = torch.zeros(size, dtype=torch.int64, device=device)
        head, tables = self._mirror.split([self._head, size - self._head])
        tokens, self.starts, self.counts = head.split([rows * width, rows, rows])
        self.tokens, self.tables = tokens.view(rows, width), tables.view(buffers, rows, entries)

    def send(
        self,
        tokens: NDArray[np.int64],
        starts: Sequence[int],
        counts: Sequence[int],
        tables: Sequence[NDArray[np.int64]],
    ) -> None:
        """Fill the tensors: tokens `[r, t]`, r and t at most R and T; tables int64 `[r, n]`, n at most the entries.

        Rows after r bring no tokens and hold no blocks. A table is never written into after it was given.
        """
        rows, width, entries = self.shape
        r, t = tokens.shape
        turn = self._turn = 1 - self._turn
        if (event := self._sent[turn]) is not None:
            event.synchronize()
        numbers = self._hosts[turn].numpy()
        head = numbers[: self._head]
        head.fill(0)
        head[: rows * width].reshape(rows, width)[:r, :t] = tokens
        head[rows * width :][:r] = starts
        head[rows * width + rows :][:r] = counts
        size = self._head
        if any(table is not held for table, held in zip(tables, self._held, strict=True)):
            size = len(numbers)
            room = numbers[self._head :].reshape(len(tables), rows, entries)
            for i, table in enumerate(tables):
                if table is not self._written[turn][i]:
                    self._written[turn][i] = None  # until it is whole
                    room[i].fill(0)
                    own = table[:, :entries]  # a row may hold blocks after the step, of a draft that was refused
                    room[i, :r, : own.shape[1]] = own
                    self._written[turn][i] = table
            self._held = list(tables)
        self._mirror[:size].copy_(self._hosts[turn][:size], non_blocking=True)
        if self._real:
            event = self._sent[turn] = self._sent[turn] or torch.cuda.Event()
            event.record(torch.cuda.current_stream(self._mirror.device))
