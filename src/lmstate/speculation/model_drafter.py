"""A smaller model as the drafter: it runs ahead on a state of its own, which every verdict rewinds."""

from __future__ import annotations

import os
import random
from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from lmstate.language_model import LanguageModel
from lmstate.speculation.drafter import Draft

DEEPEST = 32  # a verdict rewinds at most this many tokens, for which the state recomputes nothing
DOUBTFUL = 0.05  # a row whose draft is no more probable than this drafts no further


class Distribution(Protocol):
    """Sampling distribution of logits [1, V]: see `lmstate.generation.Sampler`."""

    @property
    def greedy(self) -> bool: ...

    def candidates(self, logits: Tensor) -> tuple[Tensor, Tensor]: ...  # float64 [1, k], int64 [1, k]


class ModelDrafter:
    """Drafts with a model that has the tokenizer of the one that verifies.

    sampler  draws the drafts at random, to be verified by rejection sampling; its filters should be those of the model
             that verifies. None, or a greedy one: drafts are the most likely tokens
    seed     of the draws
    vocab_size  of the model that verifies: no other tokens are drafted
    reading  tokens of a row's text that a proposal reads at most: a row drafts nothing until all of its text is read
    """

    def __init__(
        self,
        model: LanguageModel,
        rows: int,
        vocab_size: int,
        sampler: Distribution | None = None,
        seed: int | None = None,
        reading: int | None = None,
    ) -> None:
        self.model = model
        self._reading = reading
        self._vocab_size = vocab_size
        self._state = model.new_state(rows=rows, rewind=DEEPEST)
        self._texts: list[list[int]] = [[] for _ in range(rows)]
        self._drafts: list[tuple[int, list[int]]] = [(0, []) for _ in range(rows)]  # what the state has past the text
        self._sampler = None if sampler is None or sampler.greedy else sampler
        self._random = random.Random(os.urandom(16) if seed is None else f"lmstate:draft:{seed}")

    def observe(self, rows: Sequence[int], accepted: Sequence[Sequence[int]]) -> None:
        if rows and max(rows) >= len(self._texts):
            raise ValueError(f"a drafter of {len(self._texts)} rows was told of row {max(rows)}: make it for more rows")
        for row, tokens in zip(rows, accepted):
            self._texts[row] += tokens

    def forget(self, row: int) -> None:
        """The row has ended: its next text may be another one."""
        self.replace_text(row, 0, ())

    def replace_text(self, row: int, keep: int, tokens: Sequence[int]) -> None:
        """The row's text is its first `keep` tokens and then these."""
        start, drafted = self._drafts[row]
        if keep < start:
            self._drafts[row] = keep, self._texts[row][keep:start] + drafted
        self._texts[row][keep:] = tokens

    def propose(self, rows: Sequence[int], depth: int) -> list[Draft]:
        vocab = self.model.config.vocab_size
        feed: list[list[int]] = [[] for _ in self._texts]
        behind: dict[int, list[int]] = {}
        going = []
        for row in rows:
            held = self._rewind(row)
            missing = self._texts[row][held:]
            if missing and max(missing) >= vocab:
                continue
            if self._reading is not None and len(missing) > self._reading:
                behind[row] = missing[: self._reading]
                self._drafts[row] = held + self._reading, []
            elif missing:
                feed[row] = missing
                going.append(row)
        if behind:
            self.model([behind.get(row, []) for row in range(len(feed))], self._state, logits="none")
        tokens: dict[int, list[int]] = {row: [] for row in rows}
        confidence: dict[int, list[float]] = {row: [] for row in rows}
        drawn: dict[int, list[Tensor]] = {row: [] for row in rows}
        reached = dict.fromkeys(going, 1.0)
        for at in range(min(depth, DEEPEST)):
            if not going:
                break
            logits = self.model(feed, self._state)
            assert logits is not None
            for row in going:
                self._drafts[row] = len(self._texts[row]), list(tokens[row])
            chosen, probability = self._choose(logits[:, : self._vocab_size], going, drawn)
            feed = [[] for _ in self._texts]
            on = []
            for row, token, sure in zip(going, chosen, probability):
                tokens[row].append(token)
                confidence[row].append(sure)
                reached[row] *= sure
                # Whether a token is verified may not depend on which one was drawn, only on those before it: a draft
                # ends after a doubtful token, never in front of it.
                if reached[row] > DOUBTFUL and at + 1 < depth and token < vocab:
                    feed[row] = [token]
                    on.append(row)
            going = on
        sampled = self._sampler is not None
        return [
            Draft(tuple(tokens[row]), tuple(confidence[row]), tuple(drawn[row]) if sampled else None) for row in rows
        ]

    def _rewind(self, row: int) -> int:
        """Take the state back to what it has of the row's text, less its last token; returns how many that is."""
        text = self._texts[row]
        start, drafted = self._drafts[row]
        held = start
        for token in drafted:
            if held >= len(text) or text[held] != token:
                break
            held += 1
        held = min(held, len(text) - 1)
        held = max(0, min(held, self._state.lengths[row]))
        if held < self._state.lengths[row]:
            self._state.rewind(row, held)
        self._drafts[row] = held, []
        return held

    def _choose(
        self, logits: Tensor, rows: Sequence[int], drawn: dict[int, list[Tensor]]
    ) -> tuple[list[int], list[float]]:
        """A token for each row and its probability, from logits [R, V] of all rows of the state."""
        if self._sampler is None:
            here = logits[list(rows)]
            best = here.max(-1)
            sure = 1 / (here - best.values[:, None]).exp().sum(-1)
            return best.indices.tolist(), sure.tolist()
        tokens, sures = [], []
        for row in rows:
            (probabilities,), (ids,) = self._sampler.candidates(logits[row : row + 1])
            cumulative = probabilities.cumsum(0)
            point = torch.tensor(self._random.random(), dtype=torch.float64, device=cumulative.device) * cumulative[-1]
            below = torch.nextafter(cumulative[-1], torch.zeros_like(cumulative[-1]))
            index = torch.searchsorted(cumulative, torch.minimum(point, below), right=True)
            dense = torch.zeros(self._vocab_size, dtype=torch.float64, device=logits.device)
            drawn[row].append(dense.scatter_(0, ids, probabilities / cumulative[-1]))
            tokens.append(int(ids[index]))
            sures.append(float(probabilities[index]))
        return tokens, sures
