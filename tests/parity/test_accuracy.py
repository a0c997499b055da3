"""What rounded arithmetic costs on real weights: perplexity, and greedy text of native and reference bodies."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import lmstate
from tests import real_model

ROOT = Path(__file__).parents[2]
# The licence and the project's own words: several thousand tokens of English that lie in the repository.
LENGTH = 4096  # tokens
PAGES = ["LICENSE", "README.md", "CONTRIBUTING.md", "docs/state.md", "docs/models.md"]
DECODE = 24  # tokens a step: few enough for the bodies of decode


@lru_cache(maxsize=1)
def tokens() -> tuple[int, ...]:
    text = "\n".join((ROOT / page).read_text(encoding="utf-8") for page in PAGES)
    return tuple(lmstate.load(real_model.smollm2()).tokenizer.encode(text)[:LENGTH])


@lru_cache(maxsize=8)
def perplexity(weights: str, step: int, length: int) -> float:
    """exp of the mean negative log-likelihood of each token after those before it, fed `step` tokens at a time."""
    model, ids = lmstate.load(real_model.smollm2(), weights=weights), tokens()[:length]
    state, lost = model.new_state(), 0.0
    for start in range(0, len(ids), step):
        piece = list(ids[start : start + step])
        logits = model([piece], state, logits="all")
        assert logits is not None
        following = torch.tensor(ids[start + 1 : start + 1 + step])
        lost += float(torch.nn.functional.cross_entropy(logits[0, : len(following)], following, reduction="sum"))
    return math.exp(lost / (len(ids) - 1))


def test_perplexity_is_that_of_float32_arithmetic() -> None:
    """One test for both, so that no two processes compute float32's. Of fewer tokens the mean is off by more than the
    bound: its standard error is 0.06 % after 1,500 of them, and 0.04 % after all."""
    exact = perplexity("float32", 512, LENGTH)
    assert 1 < exact < 100
    for weights, bound in {"auto": 0.002, "bfloat16": 0.0005}.items():
        got = perplexity(weights, 512, LENGTH)
        print(f"\n{LENGTH} tokens: float32 {exact:.4f}, {weights} {got:.4f}, {got / exact - 1:+.3%}")
        assert abs(got / exact - 1) < bound


@pytest.mark.parametrize("weights", ["auto", "bfloat16"])
def test_decode_is_as_accurate(weights: str) -> None:
    """Logits are the same bits; what is left is the order in which the losses are summed."""
    whole, parts = perplexity(weights, 512, 768), perplexity(weights, DECODE, 768)
    assert parts == pytest.approx(whole, rel=1e-6)


def test_native_and_reference_bodies_give_the_same_text_in_float32() -> None:
    script = (
        "import lmstate; m = lmstate.load('smollm2', weights='float32'); "
        "print(m.generate('The history of the railway begins', max_new_tokens=200))"
    )
    texts = set()
    for body in ("reference", ""):
        environment = {**os.environ, "LMSTATE_OPS": body, "OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, env=environment, check=True
        )
        texts.add(done.stdout)
    assert len(texts) == 1 and len(texts.pop()) > 200
