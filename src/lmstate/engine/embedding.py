"""A text's hidden states, pooled: read in parts, between which the engine goes on with its streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING, Literal, get_args

import torch
from torch import Tensor

from lmstate import ops

if TYPE_CHECKING:
    from lmstate.models.model import Model

Pooling = Literal["mean", "last", "cls"]
POOLINGS: tuple[str, ...] = get_args(Pooling)
BESIDE_STREAMS, ALONE = 64, 512  # tokens of a text that are read in one go

Call = Callable[[Callable[["Model"], None]], Future[None]]
"""As `Engine.call`."""


class EmbeddedText:
    """A text on its way through the model. `vector` is float32 `[E]`; cancelling it ends the reading."""

    def __init__(self, model: Model, tokens: Sequence[int], pooling: str, call: Call, busy: Callable[[], bool]) -> None:
        """`busy`: whether requests wait for the next step. Raises ValueError for an unknown pooling."""
        if pooling not in POOLINGS:
            raise ValueError(f"unknown pooling={pooling!r}; expected one of {', '.join(POOLINGS)}")
        self.vector: Future[Tensor] = Future()
        self._tokens, self._pooling, self._call, self._busy = list(tokens), pooling, call, busy
        self._state = model.new_state(rewind=0)
        self._state.expect(0, len(self._tokens))
        self._parts: list[Tensor] = []

    def go_on(self) -> None:
        """Read the next part soon. Raises EngineClosed."""
        self._call(self._read).add_done_callback(self._after)

    def _read(self, model: Model) -> None:
        start = self._state.lengths[0]
        count = BESIDE_STREAMS if self._busy() else ALONE
        hidden = model.hidden([self._tokens[start : start + count]], self._state)[0]
        self._parts.append(ops.norm(hidden, model.norm))

    def _after(self, part: Future[None]) -> None:
        try:
            part.result()
            if self._state.lengths[0] == len(self._tokens):
                vector = pooled(torch.cat(self._parts), self._pooling)
                if self.vector.set_running_or_notify_cancel():
                    self.vector.set_result(vector)
            elif not self.vector.cancelled():
                self.go_on()
        except Exception as error:
            if self.vector.set_running_or_notify_cancel():
                self.vector.set_exception(error)


def pooled(hidden: Tensor, pooling: str) -> Tensor:
    """One vector, float32 `[E]`, from `[T, E]`."""
    return (hidden.mean(0) if pooling == "mean" else hidden[-1 if pooling == "last" else 0]).float()
