"""A text's hidden states, pooled: read in parts, between which the engine goes on with its streams."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmstate.models.embeddings import EMBED_CHUNK, chosen_pooling, pooled, read_part

if TYPE_CHECKING:
    from lmstate.models.model import Model

BESIDE_STREAMS = 64  # tokens of a text that are read in one go while others are answered

Call = Callable[[Callable[["Model"], None]], Future[None]]
"""As `Engine.call`."""


class EmbeddedText:
    """A text on its way through the model. `vector` is float32 `[E]`; cancelling it ends the reading."""

    def __init__(self, model: Model, tokens: Sequence[int], pooling: str, call: Call, busy: Callable[[], bool]) -> None:
        """`busy`: whether requests wait for the next step. Raises ValueError for an unknown pooling."""
        self.vector: Future[Tensor] = Future()
        self._tokens, self._pooling = list(tokens), chosen_pooling({}, pooling)
        self._call, self._busy = call, busy
        self._state = model.new_state(rewind=0)
        self._state.expect(0, len(self._tokens))
        self._parts: list[Tensor] = []

    def go_on(self) -> None:
        """Read the next part soon. Raises EngineClosed."""
        self._call(self._read).add_done_callback(self._after)

    def _read(self, model: Model) -> None:
        start = self._state.lengths[0]
        count = BESIDE_STREAMS if self._busy() else EMBED_CHUNK
        self._parts.append(read_part(model, self._state, self._tokens[start : start + count]))

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
