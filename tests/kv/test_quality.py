"""What few bits cost on the default model's real weights: the bars that the project sets itself."""

from __future__ import annotations

import math
from functools import lru_cache

import pytest
import torch
from bench.longcontext import text
from torch import Tensor

import lmstate
from lmstate import kv
from tests import real_model

TOKENS, STEP = 1536, 256


@lru_cache(maxsize=1)
def model() -> lmstate.Model:
    return lmstate.load(real_model.smollm2(), activations=16)  # so that nothing but keys and values is rounded much


@lru_cache(maxsize=4)
def predictions(policy: kv.Policy) -> Tensor:
    """Log probabilities `[TOKENS, V]`, fed in steps, so that what is stored is read again."""
    state, ids = model().new_state(kv=policy), model().tokenizer.encode(text())[:TOKENS]
    steps = [model()([ids[first : first + STEP]], state, logits="all") for first in range(0, TOKENS, STEP)]
    return torch.cat([step[0] for step in steps if step is not None]).log_softmax(-1)


@lru_cache(maxsize=1)
def exact() -> Tensor:
    return predictions(kv.Dense(torch.float32))


def apart(policy: kv.Policy) -> float:
    """Nats a token between what is predicted and what should be: no luck of the text lowers it, as it does a loss."""
    return float((exact().exp() * (exact() - predictions(policy))).sum(-1).mean())


@pytest.mark.parametrize(("bits", "most"), [(8, 0.003), (4, 0.02)])
def test_perplexity_stays_within_the_bar(bits: int, most: float) -> None:
    ids = torch.tensor(model().tokenizer.encode(text())[1:TOKENS])[:, None]
    lost, least = (float(-one[:-1].gather(1, ids).mean()) for one in (predictions(kv.Quantized(bits)), exact()))
    assert math.exp(lost - least) - 1 < most


@pytest.mark.parametrize(("bits", "most"), [(8, 0.003), (4, 0.02)])
def test_predictions_stay_within_the_bar(bits: int, most: float) -> None:
    """The bars of perplexity once more, in nats: 0.3 % is 0.003 of them."""
    assert apart(kv.Quantized(bits)) < most
