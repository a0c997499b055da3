"""The contract of a drafter: it proposes tokens, and is told which ones a row really got."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor

from lmstate.errors import StateError
from lmstate.state.validate import token_ids


@dataclass(frozen=True)
class Draft:
    """A proposed continuation of one row.

    confidence  for each token, the drafter's own estimate in 0..1 that it is right where those before it are; its
                scale does not matter, since how often each level holds is measured. None: only the place counts
    drawn_from  for each token, the distribution float64 `[V]` that it was drawn from; None: the tokens were not drawn
                at random. Verification by rejection sampling needs it
    """

    tokens: tuple[int, ...] = ()
    confidence: tuple[float, ...] | None = None
    drawn_from: tuple[Tensor, ...] | None = None

    def __post_init__(self) -> None:
        for name, beside in (("confidence", self.confidence), ("drawn_from", self.drawn_from)):
            if beside is not None and len(beside) != len(self.tokens):
                raise ValueError(
                    f"a draft has {len(self.tokens)} tokens and {len(beside)} of {name}; give one for each"
                )

    def __len__(self) -> int:
        return len(self.tokens)

    def cut(self, length: int) -> Draft:
        """The first `length` tokens."""
        if length >= len(self.tokens):
            return self
        return Draft(
            self.tokens[:length],
            None if self.confidence is None else self.confidence[:length],
            None if self.drawn_from is None else self.drawn_from[:length],
        )


@runtime_checkable
class Drafter(Protocol):
    """Proposes tokens for the rows of a batch. Its proposals change speed, never text."""

    def propose(self, rows: Sequence[int], depth: int) -> Sequence[Draft | Sequence[int]]:
        """Propose at most `depth` next tokens for each of `rows`; none where it has no idea.

        Every call is about the rows as `observe` last told of them; a proposal obliges to nothing.
        """

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        """Each of `rows` goes on with these tokens: its whole text at first, then what was accepted of drafts and the
        model's own token after them.
        """


@runtime_checkable
class ForgettingDrafter(Drafter, Protocol):
    """A drafter that can be told that a row has ended. Others are given a new number for each new row, for ever."""

    def forget(self, row: int) -> None:
        """The row has ended: what `observe` tells next under its number is another text."""


def as_draft(proposed: Draft | Sequence[int], vocab_size: int, most: int) -> Draft:
    """A drafter's answer, made safe to verify: at most `most` tokens, up to the first id that is not one of the
    model's.

    Raises StateError where it is not a draft, or where `drawn_from` holds anything but distributions over the
    vocabulary.
    """
    if not isinstance(proposed, Draft):
        proposed = Draft(tuple(token_ids(proposed, "a draft")))
    tokens, confidence, drawn_from = token_ids(proposed.tokens, "a draft"), proposed.confidence, proposed.drawn_from
    if confidence is not None:
        confidence = tuple(min(1.0, max(0.0, float(sure))) for sure in confidence)  # NaN becomes 0
    if wrong := [q for q in drawn_from or () if not isinstance(q, Tensor) or list(q.shape) != [vocab_size]]:
        shape = list(wrong[0].shape) if isinstance(wrong[0], Tensor) else f"{wrong[0]!r:.80}"
        raise StateError(f"a token of a draft was drawn from {shape}; a distribution over the model is [{vocab_size}]")
    valid = next((at for at, token in enumerate(tokens) if not 0 <= token < vocab_size), len(tokens))
    return Draft(tuple(tokens), confidence, drawn_from).cut(min(valid, most))
