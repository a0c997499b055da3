"""Drafters for tests: right or wrong by chance, and one that draws at random from a known distribution."""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch

from lmstate.speculation import Draft, Speculator


class NoisyOracle:
    """Knows how each row goes on without drafts, and says each token rightly with probability `right`."""

    def __init__(self, wholes: Sequence[Sequence[int]], right: float, vocab: int, seed: int = 0) -> None:
        self.wholes = [list(whole) for whole in wholes]
        self.right, self.vocab = right, vocab
        self.texts: list[list[int]] = [[] for _ in wholes]
        self.random = random.Random(seed)

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        assert len(rows) == len(accepted) > 0
        for row, tokens in zip(rows, accepted):
            assert tokens, "a row that goes on has new tokens"
            self.texts[row] += tokens
            assert self.texts[row] == self.wholes[row][: len(self.texts[row])]

    def propose(self, rows: Sequence[int], depth: int) -> list[list[int]]:
        drafts = []
        for row in rows:
            ahead = self.wholes[row][len(self.texts[row]) :][: self.random.randint(0, depth)]
            drafts.append(
                [token if self.random.random() < self.right else self.random.randrange(self.vocab) for token in ahead]
            )
        return drafts


class RandomDrafter:
    """Draws every token from one fixed distribution."""

    def __init__(self, probabilities: torch.Tensor, seed: int) -> None:
        self.probabilities = probabilities
        self.generator = torch.Generator().manual_seed(seed)

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        pass

    def propose(self, rows: Sequence[int], depth: int) -> list[Draft]:
        drafts = []
        for _ in rows:
            tokens = torch.multinomial(self.probabilities, depth, replacement=True, generator=self.generator).tolist()
            drafts.append(Draft(tuple(tokens), drawn_from=(self.probabilities,) * depth))
        return drafts


def always(drafter: object, vocab: int, rows: int = 1, depth: int = 4) -> Speculator:
    """Speculation that drafts at every step, whatever it costs."""
    return Speculator(drafter, vocab, rows, depth=depth)  # type: ignore[arg-type]
