"""The state of a layer that reads each token's input together with the one before it."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.errors import UnsupportedError
from lmstate.state.changes import Changes
from lmstate.state.layers.base import Layout
from lmstate.state.layers.recurrent import RecurrentState
from lmstate.state.layers.scans import Carry


class LastInputState(RecurrentState):
    """The last input of every row, float32 `[R, E]`: `advance` gives the inputs moved by one token.

    All that is remembered of a row is of its last token, so that a span in front of it can be dropped.
    """

    def __init__(self, layout: Layout, width: int, name: str):
        super().__init__(layout, previous, [(width,)], width, names=[name])

    def refuses_drop(self, row: int) -> str | None:
        return None

    def drop(self, row: int, length: int, start: int, stop: int, changes: Changes) -> None:
        if stop < length or not start:
            held = {} if stop == length else self.capture(row, length)
            self.restore(row, length - (stop - start), held, changes)
        elif start >= self.earliest_rewind(row, length):
            self.rewind(row, length, start, changes)
        else:
            raise UnsupportedError(
                f"the last {stop - start} tokens of row {row} cannot be dropped: a layer has forgotten what it read of "
                f"token {start - 1}. Rewind to {start}, which computes it again"
            )


def previous(inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
    """A scan: `[R, T, E]` -> what came one token before, and the last of each row `[R, E]`."""
    moved = torch.cat([carry[0][:, None], inputs], dim=1)  # [R, 1 + T, E]
    last = moved.gather(1, counts.to(moved.device).view(-1, 1, 1).expand(-1, 1, moved.shape[2]))[:, 0]
    return moved[:, :-1], (last,)
