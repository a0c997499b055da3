"""Acceptance: which of a draft's tokens the model itself gives.

A draft that was not drawn at random (the text's own, a model's most likely tokens) is verified by choosing each token
exactly as plain decoding does, with the row's own random numbers, and comparing. That is rejection sampling for a
proposal of one token: it holds with the model's probability of it. Greedy or sampled, the text is the one without
drafts, and with a seed the very same.

A token drawn from a distribution q is verified against the model's p by rejection sampling (Leviathan et al. 2023, Chen
et al. 2023): it is accepted with min(1, p/q), else the token is drawn from what p has more than q. The text has the
distribution p exactly, whatever q is, but uses up random numbers of its own: a seed gives another text than without
drafts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from lmstate.speculation.drafter import Draft


class TreePicker(Protocol):
    """The part of `lmstate.generation.sampling.TokenPicker` that verification of trees uses."""

    def pick(self, logits: Tensor, rows: Sequence[int]) -> list[int]:
        """The next token of each of `rows`, from logits [len(rows), V]."""


class DraftedRow(Protocol):
    """The part of `lmstate.generation.row.AnswerRow` that verification uses."""

    feed: list[int]  # tokens given to the row that the model has not read

    @property
    def over(self) -> bool:
        """Whether the answer has ended."""

    def pick(self, logits: Tensor) -> int:
        """The next token, from logits float32 `[V]`."""

    def distribution(self, logits: Tensor) -> Tensor:
        """Distribution that `pick` draws from: float64 `[V]`, from logits `[V]`."""

    def uniform(self) -> float:
        """A random number in 0..1 from the row's stream."""

    def chosen(self, token: int) -> None:
        """The row goes on with this token, which `pick` did not choose."""


def verify(
    row: DraftedRow,
    logits: Tensor,
    draft: Draft,
    give: Callable[[int, Tensor], None],
    best: Sequence[int | None] | None = None,
) -> int:
    """Choose a row's next tokens along a draft for as long as they agree; returns how many of its tokens hold.

    logits  float32 `[T, V]`: after the last token that the row had, and after each drafted one
    give    gets every chosen token with the logits that it was chosen from, and adds it to `row.feed`, which has to be
            empty; it may add more, that need no choosing
    best    the most likely token at each place, for a row that takes those; None where it is to be picked

    Afterwards `row.feed` has the tokens that no place of `logits` has read. The token that ends the answer does not
    count as one that holds.
    """
    given = row.feed
    while True:
        at = len(given)
        token = None if best is None else best[at]
        if token is None:
            drawn = draft.drawn_from is not None and at < len(draft)
            token = _accept_or_redraw(row, logits[at], draft, at) if drawn else row.pick(logits[at])
        give(token, logits[at])
        agreed = next((i for i, pair in enumerate(zip(given, draft.tokens)) if pair[0] != pair[1]), None)
        agreed = min(len(given), len(draft)) if agreed is None else agreed
        if row.over:
            return min(agreed, at)
        if agreed < len(given):
            del given[:agreed]
            return agreed


def verify_tree(
    logits: Tensor,
    row: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    picker: TreePicker,
    give: Callable[[int, int], bool],
) -> list[int]:
    """The path of a tree that the model itself takes, for `state.commit_path`.

    tokens, parents: node 0 is the row's last token, and the others are drafted; logits: float32 [nodes, V]. Every token
    is chosen as plain decoding does and followed to the child that has it: the text is the one without drafts.
    """
    path = [0]
    while True:
        (token,) = picker.pick(logits[path[-1] : path[-1] + 1], [row])
        children = (node for node, parent in enumerate(parents) if parent == path[-1] and tokens[node] == token)
        child = next(children, None)
        if not give(row, token) or child is None:
            return path
        path.append(child)


def _accept_or_redraw(row: DraftedRow, logits: Tensor, draft: Draft, at: int) -> int:
    """The token at a place of a draft that was drawn at random, or another one in its place."""
    assert draft.drawn_from is not None
    token, q = draft.tokens[at], draft.drawn_from[at]
    p = row.distribution(logits)
    if row.uniform() * float(q[token]) >= float(p[token]):
        rest = (p - q).clamp(min=0)
        cumulative = rest.cumsum(0)
        total = cumulative[-1]
        # Rounding may leave nothing of a p that equals q; it rejects with no probability then.
        if float(total) > 0:
            point = row.uniform() * total
            below = torch.nextafter(total, torch.zeros_like(total))
            token = int(torch.searchsorted(cumulative, torch.minimum(point, below), right=True))
    row.chosen(token)
    return token
