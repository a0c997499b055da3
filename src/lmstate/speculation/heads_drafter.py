"""A model's own multi-token prediction heads as the drafter (DeepSeek-V3, 2412.19437)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, runtime_checkable

from lmstate.speculation.drafter import Draft
from lmstate.speculation.text_drafter import TextDrafter
from lmstate.state import State

SURE = 0.88  # a text drafter's confidence after a match of 8 tokens


class AheadDraft(NamedTuple):
    """Drafted tokens of a row, and how probable each is to the head that drafted it."""

    tokens: tuple[int, ...]
    confidence: tuple[float, ...]


@runtime_checkable
class HeadedModel(Protocol):
    """The part of `lmstate.Model` that drafts."""

    def has_heads(self, state: State) -> bool:
        """Whether a state of this model has layers of its heads."""

    def draft_ahead(self, state: State, last: Mapping[int, int], depth: int) -> dict[int, AheadDraft]:
        """Drafts of the heads after each row's next token, which is not in the state yet."""


class HeadsDrafter:
    """Drafts with the heads of the model that verifies, which have a layer each in its state.

    They read every step of that state, so that it is theirs too: rewound, forked and restored together. Drafts are the
    heads' most likely tokens. A row whose text is not what the state holds and one token more gets none.

    text  asked first: where what it drafts follows a long match it is free, deeper, and more often right
    """

    def __init__(self, model: HeadedModel, state: State, text: TextDrafter | None = None) -> None:
        """Raises ValueError if the state has no layers of heads."""
        if not model.has_heads(state):
            raise ValueError(
                'draft="heads" was asked for, and the state has no layers of multi-token prediction heads: load the '
                "model with heads=True, and make a state of it that is not static and under no policy that evicts"
            )
        self._model, self._text = model, text
        self._lengths: dict[int, int] = {}
        self._last: dict[int, int] = {}
        self.move(state, {row: row for row in range(state.rows)})

    def move(self, state: State, places: Mapping[int, int]) -> None:
        """The rows are in this state from now on: `places` has the index of each, by its number."""
        self._state, self._places = state, places

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        if self._text is not None:
            self._text.observe(rows, accepted)
        for row, tokens in zip(rows, accepted):
            if tokens:
                self._lengths[row] = self._lengths.get(row, 0) + len(tokens)
                self._last[row] = tokens[-1]

    def forget(self, row: int) -> None:
        """The row has ended: its next text may be another one."""
        self._lengths.pop(row, None)
        self._last.pop(row, None)
        if self._text is not None:
            self._text.forget(row)

    def propose(self, rows: Sequence[int], depth: int) -> list[Draft]:
        drafts: dict[int, Draft] = {}
        if self._text is not None:
            drafts = {row: draft for row, draft in zip(rows, self._text.propose(rows, depth)) if _sure(draft)}
        places = {row: self._places[row] for row in rows if row not in drafts and row in self._places}
        held = self._state.lengths
        last = {at: self._last[row] for row, at in places.items() if held[at] == self._lengths.get(row, 0) - 1}
        ahead = self._model.draft_ahead(self._state, last, depth) if last else {}
        drafts |= {row: Draft(*ahead[at]) for row, at in places.items() if at in ahead}
        return [drafts.get(row, Draft()) for row in rows]


def _sure(draft: Draft) -> bool:
    return bool(draft.tokens) and draft.confidence is not None and draft.confidence[0] >= SURE
