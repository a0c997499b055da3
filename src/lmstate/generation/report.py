"""Values that a generation hands out: pieces of text, and statistics."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

from lmstate.generation.row import Finish
from lmstate.speculation.speculator import DraftReport


class RowPiece(NamedTuple):
    """Text that a row's answer grew by."""

    row: int
    text: str


@dataclass(frozen=True)
class Report:
    """Statistics of a generation, summed over the rows. Seconds exclude the time that the caller held the iterator."""

    fed: int  # tokens computed before the first one: the prompt, and what the state had queued
    reused: int  # tokens that the state had computed before
    generated: int  # tokens of the answers
    prefill_seconds: float  # the prompt's forward, up to the first token
    decode_seconds: float  # the steps after it
    decoded: int  # tokens that those steps gave
    finished: tuple[Finish | None, ...]  # why each row ended; None: it has not, or was interrupted
    draft: DraftReport = field(default_factory=DraftReport)  # what speculation did

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first; 0.0 where there was no second."""
        return self.decoded / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def fed_per_second(self) -> float:
        return self.fed / self.prefill_seconds if self.prefill_seconds else 0.0
