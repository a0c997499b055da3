"""Room to grow after a tensor: a token copies no other, and a reorder of rows what follows their common prefix."""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from lmstate.integrations.transformers.cache.layers.sharing import Sharing

FIRST_SLOTS = 64
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


class GrowableTensor:
    """The memory `[R, ..., S, D]` that a view `[R, ..., n, D]` of it (n <= S) can grow into, along the axis before D.

    The view is the truth, and its owner may replace it: a tensor that is not a view of this memory is taken over at the
    next `extend`. The result of `extend` stays as it is until tokens are removed and others written in their place, or
    rows are selected.

    Deep copies that share the tensors (see `StateCache.fork`) write after what any of them has written, or, where that
    is taken, into memory of their own.
    """

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        self.view: Tensor | None = None
        self._sharing = Sharing()
        # [R][R]: leading positions that two rows have in common, at least; None: not known. Never changed in place.
        self._common: list[list[int]] | None = None

    def extend(self, held: Tensor | None, new: Tensor, slots: int | None = None) -> Tensor:
        """A view of `held` (None: nothing) followed by `new`; in memory of `slots` tokens where it has to move."""
        length = 0 if held is None else held.shape[-2]
        need = length + new.shape[-2]
        if held is not self.view:
            self.drop()
        if torch.is_grad_enabled():
            # Written in place, what the backward pass needs would count as changed: also keys without a gradient, which
            # queries with one were multiplied by.
            self._move(None, 0)
            self._common = None
            self.view = new if held is None else torch.cat([held, new], dim=-2)
            return self.view
        memory = self.slots
        fits = memory is not None and need <= memory.shape[-2] and not frozen(memory)
        if memory is None or not fits or not self._sharing.claim(length, need):
            shape = (*new.shape[:-2], max(slots or max(need, 2 * length), FIRST_SLOTS), new.shape[-1])
            memory = torch.empty(shape, dtype=new.dtype, device=new.device)
            if held is not None:
                memory.narrow(-2, 0, length).copy_(held)
            self._move(memory, need)
        memory.narrow(-2, length, new.shape[-2]).copy_(new)
        self.view = memory.narrow(-2, 0, need)
        return self.view

    def cut(self, held: Tensor, length: int) -> Tensor:
        """A view of the first `length` tokens of `held`, with the room of the others after it."""
        kept = held.narrow(-2, 0, length)
        if held is self.view:
            self.view = kept
            self._shift(0, length)
        return kept

    def last(self, held: Tensor, length: int) -> Tensor:
        """A view of the last `length` tokens of `held`, which the next `extend` takes to fresh memory."""
        before = held.shape[-2] - length
        kept = held.narrow(-2, before, length)
        if held is self.view:
            self.slots, self.view = None, kept
            self._shift(before, length)
        return kept

    def select(self, held: Tensor, rows: Tensor) -> Tensor:
        """`held[rows]`, with the same room after it.

        With as many rows as before, memory that is not shared is changed in place: after the part that each changed
        row has in common with the one that it becomes.
        """
        if held is not self.view:
            self.drop()
            self.view = held
        order: list[int] = rows.tolist()
        before, length = held.shape[0], held.shape[-2]
        if order == list(range(before)):
            return held
        if not all(0 <= row < before for row in order):
            raise IndexError(f"rows {order} of a batch of {before} rows were asked for: take 0 to {before - 1}")
        common = self._known(held)
        slots = self.slots
        in_place = slots is not None and not frozen(slots) and not torch.is_grad_enabled() and self._sharing.alone
        if in_place and len(order) == before:
            changed = [row for row, source in enumerate(order) if row != source]
            start = min(common[row][order[row]] for row in changed)
            behind = held.narrow(-2, start, length - start)
            sources = behind.index_select(0, _indices([order[row] for row in changed], held))
            behind.index_copy_(0, _indices(changed, held), sources)
            view = held
        elif slots is None:
            view = held.index_select(0, _indices(order, held))
            self._move(None, 0)
        else:
            moved = slots.index_select(0, _indices(order, held))
            self._move(moved, length)
            view = moved.narrow(-2, 0, length)
        self._common = [[length if a == b else common[a][b] for b in order] for a in order]
        self.view = view
        return view

    def drop(self) -> None:
        """Forget the memory. Who shares it still counts this one, whose owner may hold a view of it, until it moves."""
        self.slots = self.view = self._common = None

    # ---- inside

    def _move(self, slots: Tensor | None, written: int) -> None:
        """Go on in other memory, of which nothing that is shared is a view."""
        self.slots = slots
        self._sharing.leave(written)

    def _shift(self, by: int, length: int) -> None:
        """Forget the first `by` positions, and all but `length` after them."""
        if self._common is not None:
            self._common = [[min(max(n - by, 0), length) for n in row] for row in self._common]

    def _known(self, held: Tensor) -> list[list[int]]:
        """Positions that each two rows have in common, at least: of the rows between them, too, where not known.

        Rows fed side by side are compared once, as far as they agree: `generate` repeats a prompt before it is fed.
        """
        if self._common is None:
            next_to = [agreement(a, b) for a, b in itertools.pairwise(held)]
            rows, length = range(held.shape[0]), held.shape[-2]
            self._common = [[min(next_to[min(i, j) : max(i, j)], default=length) for j in rows] for i in rows]
        return self._common


def agreement(a: Tensor, b: Tensor) -> int:
    """The number of leading positions at which `a` and `b [..., n, D]` are the same to the bit."""
    length, start, step = a.shape[-2], 0, FIRST_SLOTS
    bits = _BITS[a.element_size()]
    a, b = a.detach().view(bits), b.detach().view(bits)
    while start < length:
        step = min(step, length - start)
        x, y = a.narrow(-2, start, step), b.narrow(-2, start, step)
        if not torch.equal(x, y):
            differs = (x != y).any(-1).reshape(-1, step).any(0)
            return start + int(differs.nonzero()[0])
        start, step = start + step, 2 * step
    return length


def frozen(slots: Tensor) -> bool:
    """Whether torch forbids writing into this memory here: it was made in inference mode."""
    return slots.is_inference() and not torch.is_inference_mode_enabled()


def _indices(rows: list[int], like: Tensor) -> Tensor:
    return torch.tensor(rows, dtype=torch.long, device=like.device)
