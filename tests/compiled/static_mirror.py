"""A mirror (see `tests.invariants.mirror`) whose state is static, and whose tokens go through a step on tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

import lmstate
from tests.invariants.mirror import Mirror, close

Step = Callable[..., Tensor]
CAPACITY = 150


class StaticMirror(Mirror):
    """`step`: `model.decode_step`, or the same compiled."""

    def __init__(self, model: lmstate.Model, step: Step, rows: int = 1, **options: Any) -> None:
        super().__init__(model, rows, **{"capacity": CAPACITY, "static": True, **options})
        self.step = step
        self.addresses = addresses(self.state)

    def feed(self, ids: Sequence[Sequence[int]], accept: Sequence[int] | None = None) -> None:
        """A step of as many tokens in every row; `accept` of them become real, all by default."""
        got = self.step(self.tensor(ids), self.state, logits="all")
        accept = [len(new) for new in ids] if accept is None else accept
        assert self.state.pending == [len(new) for new in ids]
        for row, new, logits, n in zip(self.rows, ids, got, accept):
            close(logits, self.expected([*row, *new])[-len(new) :])
            row += new[:n]
        self.state.commit(list(accept))

    def ragged(self, ids: Sequence[Sequence[int]], width: int) -> None:
        """A step of at most `width` tokens a row, padded."""
        padded = [[*row, *[0] * (width - len(row))] for row in ids]
        got = self.step(self.tensor(padded), self.state, self.tensor([len(row) for row in ids]))
        self.state.commit()
        for index, (row, new) in enumerate(zip(self.rows, ids)):
            row += new
            if new:
                close(got[index], self.expected(row)[-1])
            else:
                assert got[index].isnan().all()

    def tensor(self, numbers: Any) -> Tensor:
        return torch.tensor(numbers, device=self.model.device)

    def check(self, probe: bool = True) -> None:
        super().check(probe)
        assert addresses(self.state) == self.addresses, "a tensor of the state has moved"


def addresses(state: lmstate.State) -> list[int]:
    """Of every tensor that a step uses."""
    held = [tensor for layer in state.layers for tensor in layer.static_tensors().values()]
    return [tensor.data_ptr() for tensor in [*held, state._device.positions]]
