"""Room to grow behind a tensor, so that adding a token copies that token and no other."""

from __future__ import annotations

import torch
from torch import Tensor

FIRST_SLOTS = 64


class GrowableTensor:
    """The memory `[..., S, D]` that a view `[..., n, D]` of it (n <= S) can grow into, along the next-to-last axis.

    The view is the truth, and its owner may replace it: a tensor that is no view of this memory is taken over at the
    next `extend`. What `extend` hands out stays as it is until tokens are removed and others written in their place.
    """

    def __init__(self) -> None:
        self.slots: Tensor | None = None
        self.view: Tensor | None = None

    def extend(self, held: Tensor | None, new: Tensor) -> Tensor:
        """A view of `held` (None: nothing) followed by `new`."""
        length = 0 if held is None else held.shape[-2]
        need = length + new.shape[-2]
        if torch.is_grad_enabled() and (new.requires_grad or (held is not None and held.requires_grad)):
            # Written in place, a value that the backward pass needs would be gone.
            self.slots, self.view = None, new if held is None else torch.cat([held, new], dim=-2)
            return self.view
        slots = self.slots
        if held is not self.view or slots is None or need > slots.shape[-2] or frozen(slots):
            slots = self.allocate(new, need if length == 0 else max(need, 2 * length))
            if held is not None:
                slots.narrow(-2, 0, length).copy_(held)
        slots.narrow(-2, length, new.shape[-2]).copy_(new)
        self.view = slots.narrow(-2, 0, need)
        return self.view

    def allocate(self, like: Tensor, slots: int) -> Tensor:
        """Fresh memory for at least `slots` tokens; the old one stays with whoever holds a view of it."""
        shape = (*like.shape[:-2], max(slots, FIRST_SLOTS), like.shape[-1])
        self.slots = torch.empty(shape, dtype=like.dtype, device=like.device)
        return self.slots

    def cut(self, held: Tensor, length: int) -> Tensor:
        """A view of the first `length` tokens of `held`, with the room of the others behind it."""
        kept = held.narrow(-2, 0, length)
        if held is self.view:
            self.view = kept
        return kept

    def select(self, held: Tensor, rows: Tensor) -> Tensor:
        """`held[rows]`, with the same room behind it."""
        if held is not self.view or self.slots is None:
            self.drop()
            return held.index_select(0, rows.to(held.device))
        self.slots = self.slots.index_select(0, rows.to(held.device))
        self.view = self.slots.narrow(-2, 0, held.shape[-2])
        return self.view

    def drop(self) -> None:
        self.slots = self.view = None


def frozen(slots: Tensor) -> bool:
    """Whether torch forbids writing into this memory here: it was made in inference mode."""
    return slots.is_inference() and not torch.is_inference_mode_enabled()
