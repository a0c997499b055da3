"""What rounded arithmetic costs on real weights: perplexity, and greedy text of native and reference bodies."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path
from typing import Literal

import pytest
import torch
from torch import Tensor

import lmstate
from tests import real_model

ROOT = Path(__file__).parents[2]
LENGTH = 768  # tokens of English that lie in the repository
BOUNDS = {("auto", 8): 0.004, ("auto", 16): 0.002, ("bfloat16", "auto"): 0.0005}  # auto weights: the file's Q4_1
DECODE = 24  # tokens a step: few enough for the bodies of decode


@lru_cache(maxsize=1)
def tokens() -> tuple[int, ...]:
    text = (ROOT / "LICENSE").read_text(encoding="utf-8")
    return tuple(lmstate.load(real_model.smollm2()).tokenizer.encode(text)[:LENGTH])


@lru_cache(maxsize=3)
def predictions(weights: str, activations: Literal["auto", 8, 16] = "auto", step: int = 512) -> Tensor:
    """Log probabilities `[LENGTH, V]`, fed `step` tokens at a time."""
    model = lmstate.load(real_model.smollm2(), weights=weights, activations=activations)
    ids = list(tokens())
    state = model.new_state()
    logits = [model([ids[start : start + step]], state, logits="all") for start in range(0, len(ids), step)]
    return torch.cat([piece[0] for piece in logits if piece is not None]).log_softmax(-1)


def loss(predicted: Tensor) -> float:
    """The mean negative log-likelihood of each token after those before it: the logarithm of the perplexity."""
    return float(-predicted[:-1].gather(1, torch.tensor(tokens()[1:])[:, None]).mean())


def test_perplexity_is_that_of_float32_arithmetic() -> None:
    """One test for both, so that no two processes compute float32's.

    What rounding adds to the logarithm of the perplexity is the divergence of its predictions from the exact ones. Over
    all words that might follow, its standard error is 0.0013 % after 768 tokens; over those that do follow it would be
    0.07 %, more than a bound.
    """
    exact = predictions("float32")
    assert 0 < loss(exact) < math.log(100)
    for (weights, activations), bound in BOUNDS.items():
        apart = float((exact.exp() * (exact - predictions(weights, activations))).sum(-1).mean())
        print(f"\n{LENGTH} tokens: {weights}, {activations} adds {apart:.5%} to {math.exp(loss(exact)):.3f}")
        assert 0 < apart < bound


@pytest.mark.parametrize("weights", ["auto", "bfloat16"])
def test_decode_is_as_accurate(weights: str) -> None:
    """Logits are the same bits, and so are their losses."""
    assert loss(predictions(weights, step=DECODE)) == pytest.approx(loss(predictions(weights)), rel=1e-6)


def test_native_and_reference_bodies_give_the_same_text_in_float32() -> None:
    script = (
        "import lmstate; m = lmstate.load('smollm2', weights='float32'); "
        "print(m.generate('The history of the railway begins', max_new_tokens=100))"
    )
    texts = set()
    for body in ("reference", ""):
        environment = {**os.environ, "LMSTATE_OPS": body, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
        )
        texts.add(done.stdout)
    assert len(texts) == 1 and len(texts.pop()) > 200
