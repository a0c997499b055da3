"""Long texts: how far the model is with one, and whether it was made for that many tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import TYPE_CHECKING

from lmstate.cli.output import note
from lmstate.models.model import Logits, Model, Tokens
from lmstate.state import LayerState, State, Step

if TYPE_CHECKING:
    from rich.progress import Progress
    from torch import Tensor


def warn_of_length(model: Model, held: int, length: int) -> None:
    """Say so where a text that had `held` tokens grows to `length`, past what the model was made for."""
    most = model.config.max_positions
    if most is not None and held <= most < length:
        note(f"lmstate: the text has {length:,} tokens, and the model was made for {most:,}: answers may be nonsense")


def watched(model: Model) -> Model:
    """The model, on a terminal one that shows how far it is with a text that it takes in several parts."""
    if not sys.stderr.isatty():
        return model
    return Watched(**{part.name: getattr(model, part.name) for part in fields(model) if part.init})


class Watched(Model):
    """Computes what the other model does, part by part as it does."""

    _total = 0  # tokens of the call that runs
    _progress: Progress | None = None

    def __call__(
        self,
        tokens: Tokens,
        state: State | None = None,
        logits: Logits | None = None,
        commit: bool = True,
        parents: Sequence[Sequence[int]] | None = None,
    ) -> Tensor | None:
        held = [] if state is None else state.lengths
        late = [0 if state is None else state.rewind_cost(row, length) for row, length in enumerate(held)]
        self._total = max(map(len, tokens), default=0) + max(late, default=0)
        try:
            return super().__call__(tokens, state, logits, commit, parents)
        finally:
            if self._progress is not None:
                self._progress.stop()
                self._progress = None

    def run_layers(
        self, tokens: Tensor, step: Step, layers: Sequence[LayerState], state: State | None = None
    ) -> Tensor:
        hidden = super().run_layers(tokens, step, layers, state)
        if step.width < self._total:
            self._advance(step.width)
        return hidden

    def _advance(self, tokens: int) -> None:
        if self._progress is None:
            from rich.console import Console
            from rich.progress import Progress

            self._progress = Progress(console=Console(stderr=True), transient=True)
            self._progress.start()
            self._progress.add_task("reading the prompt", total=self._total)
        self._progress.advance(self._progress.task_ids[0], tokens)
