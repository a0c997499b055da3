"""Constrained decoding: the protocol of a grammar, and the masks and drafts that follow from one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from lmstate.speculation.drafter import Draft

NOTHING_ALLOWED = "the grammar allows no token here: it is of another vocabulary, or at its end"


@runtime_checkable
class Grammar(Protocol):
    """Constraint on the next token of an answer. One object an answer; `copy` makes those of the other answers."""

    @property
    def complete(self) -> bool:
        """Whether the answer may end here."""

    @property
    def ended(self) -> bool:
        """Whether it must."""

    def allowed(self) -> Tensor | None:
        """bool `[V]`: what may come next; None for anything."""

    def accept(self, token: int) -> None:
        """The answer goes on with this token."""

    def rollback(self, count: int) -> None:
        """The last `count` accepted tokens never came."""

    def forced(self) -> Sequence[int]:
        """Tokens that must come now, if there is only one way on."""

    def copy(self) -> Grammar:
        """Another one at the same place."""


def check_grammar(grammar: object) -> None:
    """Raise ValueError for anything but a grammar."""
    if not isinstance(grammar, Grammar):
        raise ValueError(f"grammar is {grammar!r:.80}; it must have the methods of lmstate.generation.grammar.Grammar")


def forbidden(grammar: Grammar, ends: frozenset[int], device: torch.device) -> Tensor | None:
    """Tokens that must not come next, bool `[V]`; None if all may. `ends` end the answer, where it is complete."""
    allowed = grammar.allowed()
    if allowed is None:
        return None
    barred = ~allowed.to(device)
    barred[list(ends)] = not grammar.complete
    return barred


def admitted(grammar: Grammar, draft: Draft, ends: frozenset[int]) -> Draft:
    """A draft up to the first token that the grammar does not allow, with those in it that are forced.

    The grammar walks along the draft and is rolled back. An error that it raises ends the draft: it is raised again
    when a token is chosen. A draft that was drawn at random stays as it is, since which of its tokens are verified may
    not depend on what they are.
    """
    if draft.drawn_from is not None:
        return draft
    tokens: list[int] = []
    sure: list[float] = []
    certain: list[int] = []  # forced, to come next
    at = 0
    try:
        while not grammar.ended and (certain or at < len(draft)):
            forced = bool(certain)
            token = certain.pop(0) if forced else draft.tokens[at]
            if token in ends or not (forced or _allows(grammar, token)):
                break
            on_draft = at < len(draft) and draft.tokens[at] == token
            grammar.accept(token)
            tokens.append(token)
            sure.append(1.0 if forced else draft.confidence[at] if draft.confidence is not None else 0.5)
            at = at + 1 if on_draft else len(draft)
            if not certain:
                certain = list(grammar.forced())
    except Exception as error:
        del error  # an accept that failed counts for nothing
    if tokens:
        grammar.rollback(len(tokens))
    return draft if tuple(tokens) == draft.tokens else Draft(tuple(tokens), tuple(sure))


def _allows(grammar: Grammar, token: int) -> bool:
    allowed = grammar.allowed()
    return allowed is None or bool(allowed[token])
