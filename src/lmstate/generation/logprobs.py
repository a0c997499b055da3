"""Log probabilities of tokens under the model's own distribution."""

from __future__ import annotations

from math import inf
from typing import NamedTuple

from torch import Tensor


class TokenLogprob(NamedTuple):
    """The log probability of a token under the model's own distribution, before penalties, temperature and filters."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # the most likely tokens, best first


def logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Of a token, and of the `top` most likely ones, from logits float32 `[V]`. -inf for a mark, which has no logit."""
    values = logits.log_softmax(-1)
    own = float(values[token]) if token < len(values) else -inf
    if not top:
        return TokenLogprob(token, own)
    best, ids = values.topk(min(top, len(values)))
    return TokenLogprob(token, own, tuple(zip(ids.tolist(), best.tolist())))
