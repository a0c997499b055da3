"""Long texts: how far the model is with one, and whether it was made for that many tokens."""

from __future__ import annotations

import sys
from time import monotonic
from typing import TYPE_CHECKING

from lmstate.cli.output import CLEAR, Interrupt, note

if TYPE_CHECKING:
    from lmstate.models.model import Model

QUIET_SECONDS = 5.0  # off a terminal: until the first line, and between two


def warn_of_length(model: Model, held: int, length: int) -> None:
    """Say so where a text that had `held` tokens grows to `length`, past what the model was made for."""
    most = model.context_size
    if most is not None and held <= most < length:
        note(f"lmstate: the text has {length:,} tokens, and the model was made for {most:,}: answers may be nonsense")


class PromptProgress:
    """A `Model.on_part` that tells on stderr how far a long prompt is.

    On a terminal in one line that goes away, elsewhere in a line every few seconds of one that takes long. Ctrl-C stops
    it between two parts.
    """

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._told = monotonic()
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        if 0 < done < total:
            Interrupt.check()
        if self._terminal:
            if 0 < done < total:
                self._shown = True
                print(f"{CLEAR}{_line(done, total)}", end="", file=sys.stderr, flush=True)
            elif self._shown:
                self._shown = False
                print(CLEAR, end="", file=sys.stderr, flush=True)
        elif done == 0:
            self._told = monotonic()
        elif done < total and monotonic() - self._told >= QUIET_SECONDS:
            self._told = monotonic()
            note(_line(done, total))


def _line(done: int, total: int) -> str:
    return f"lmstate: read {done:,} of {total:,} tokens ({100 * done // total} %)"
