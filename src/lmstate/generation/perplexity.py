"""Perplexity of a text: how surprised a model is by it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from lmstate.language_model import LanguageModel

CHUNK = 256  # tokens whose logits are in memory at a time


@dataclass(frozen=True)
class TextScore:
    """The sum of the negative log likelihoods of `predicted` tokens, in nats."""

    nats: float
    predicted: int
    windows: int

    @property
    def perplexity(self) -> float:
        """e to the mean negative log likelihood of a token."""
        return math.exp(self.nats / self.predicted)


def score_text(model: LanguageModel, tokens: Sequence[int], window: int) -> TextScore:
    """Score a text in windows of `window` tokens, each from an empty state.

    The first token of a window is given, the others are predicted. Raises ValueError for a text of less than two tokens
    or such a window.
    """
    if len(tokens) < 2 or window < 2:
        raise ValueError(f"a text of {len(tokens)} tokens in windows of {window} leaves no token to predict")
    nats, predicted, windows = 0.0, 0, 0
    for begin in range(0, len(tokens) - 1, window):
        part = tokens[begin : begin + window]
        if len(part) < 2:
            break
        windows += 1
        state = model.new_state(rewind=0)
        for first in range(0, len(part) - 1, CHUNK):
            following = torch.tensor(part[first + 1 : first + CHUNK + 1])
            logits = model([part[first : first + len(following)]], state, logits="all")
            assert logits is not None
            chosen = logits[0].double().log_softmax(-1).cpu().gather(1, following[:, None])
            nats -= float(chosen.sum())
            predicted += len(following)
    return TextScore(nats, predicted, windows)
