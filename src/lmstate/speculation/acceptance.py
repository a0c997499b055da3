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


class TokenPicker(Protocol):
    """The part of `lmstate.generation.sampling.TokenPicker` that verification uses."""

    def pick(self, logits: Tensor, rows: Sequence[int]) -> list[int]:
        """The next token of each of `rows`, from logits [len(rows), V]."""

    def distribution(self, logits: Tensor, row: int) -> Tensor:
        """Distribution that `pick` draws from: float64 `[V]`, from logits `[V]`."""

    def uniform(self, row: int) -> float:
        """A random number in 0..1 from the row's stream."""

    def take(self, row: int, token: int) -> None:
        """The row goes on with this token, which `pick` did not choose."""


def verify(
    logits: Tensor,
    rows: Sequence[int],
    drafts: Sequence[Draft],
    picker: TokenPicker,
    give: Callable[[int, int], bool],
) -> list[int]:
    """Number of draft tokens that each of `rows` accepts. `give(row, token)` gets every chosen token in turn.

    logits: float32 [len(rows), 1 + the longest draft, V]: after the row's last token and after each drafted one.
    `give` answers whether the row goes on; one that does not ends there, and the token that ended it does not count as
    accepted. Each other row gets one token more than it accepts.
    """
    accepted = [0] * len(rows)
    going = list(range(len(rows)))
    at = 0
    while going:
        chosen = _choose(logits[:, at], at, going, rows, drafts, picker)
        on = []
        for index, token in zip(going, chosen):
            draft = drafts[index].tokens
            if give(rows[index], token) and at < len(draft) and draft[at] == token:
                accepted[index] += 1
                on.append(index)
        going = on
        at += 1
    return accepted


def verify_tree(
    logits: Tensor,
    row: int,
    tokens: Sequence[int],
    parents: Sequence[int],
    picker: TokenPicker,
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


def _choose(
    logits: Tensor, at: int, going: list[int], rows: Sequence[int], drafts: Sequence[Draft], picker: TokenPicker
) -> list[int]:
    """The next token of each row that goes on, from logits [len(rows), V] at place `at` of the drafts."""
    drawn = [index for index in going if drafts[index].drawn_from is not None and at < len(drafts[index])]
    plain = [index for index in going if index not in drawn]
    tokens: dict[int, int] = {}
    if plain:
        here = logits if len(plain) == len(rows) else logits[plain]
        tokens.update(zip(plain, picker.pick(here, [rows[index] for index in plain])))
    for index in drawn:
        draft = drafts[index]
        assert draft.drawn_from is not None
        tokens[index] = _accept_or_redraw(logits[index], rows[index], draft.tokens[at], draft.drawn_from[at], picker)
    return [tokens[index] for index in going]


def _accept_or_redraw(logits: Tensor, row: int, token: int, q: Tensor, picker: TokenPicker) -> int:
    p = picker.distribution(logits, row)
    if picker.uniform(row) * float(q[token]) >= float(p[token]):
        rest = (p - q).clamp(min=0)
        cumulative = rest.cumsum(0)
        total = cumulative[-1]
        # Rounding may leave nothing of a p that equals q; it rejects with no probability then.
        if float(total) > 0:
            point = picker.uniform(row) * total
            below = torch.nextafter(total, torch.zeros_like(total))
            token = int(torch.searchsorted(cumulative, torch.minimum(point, below), right=True))
    picker.take(row, token)
    return token
