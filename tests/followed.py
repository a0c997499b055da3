"""`Model.follow` by calls of the model, as a GPU's graphs give it: for tests of what generates with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import lmstate


def follow_by_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Have every model follow its own tokens; returns the numbers of tokens that were asked for, as they come."""
    asked: list[int] = []

    def follow(
        model: lmstate.Model, tokens: list[list[int]], state: lmstate.State, most: int
    ) -> tuple[list[list[int]], Tensor] | None:
        if most < 2 or max(map(len, tokens), default=0) != 1:
            return None
        asked.append(most)
        read: list[list[int]] = [list(row) for row in tokens]
        while True:
            logits = model(read, state, logits="all", commit=False)
            if max(map(len, read)) == most:
                return read, logits
            state.discard()
            best: list[Any] = logits[:, -1].argmax(-1).tolist()
            read = [row and [*row, token] for row, token in zip(read, best)]

    monkeypatch.setattr(lmstate.Model, "follow", follow)
    return asked


def calls(model: lmstate.Model, tokens: list[list[int]], state: lmstate.State, count: int) -> list[Tensor]:
    """Logits float32 `[R, V]` of calls with a token a row, or none, each after the other."""
    found, feed = [], tokens
    for _ in range(count):
        logits = model(feed, state)
        found.append(logits)
        with torch._C.DisableTorchFunction():
            best = logits.argmax(-1).tolist()
        feed = [row and [token] for row, token in zip(feed, best)]
    return found
