"""Whole models on the interpreted kernels: parity with transformers, and the same bits for any cut."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from tests.interpreted.standin import interpreted_gpu
from tests.other_device import DEVICE
from tests.zoo import pair, text

TO_THE_BIT = ("llama", "mamba2", "deepseek_v3")
CLOSE = ("qwen3_next-dense",)  # torch computes its gates, and rounds the last numbers of a vector otherwise on a CPU
LONG_CASES = ("mistral", "gemma2", "gpt_oss", "falcon_h1", "deepseek_v32", "minimax_m3", "deepseek_v4")
LONG = [pytest.param(case, marks=pytest.mark.soak) for case in LONG_CASES]


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """A pretended GPU whose kernels are interpreted, without graphs; the names of those that were launched."""
    monkeypatch.setattr("lmstate.models.graphs.fuses", lambda: False)
    with interpreted_gpu(monkeypatch) as gpu:
        yield gpu.launches


def on_device(case: str, folder: Any, weights: str) -> lmstate.Model:
    return build(WeightLoader(open_source(folder), weights, device=DEVICE))


@pytest.mark.parametrize("case", [*TO_THE_BIT, *CLOSE, *LONG])
def test_a_model_has_transformers_logits_and_the_same_bits_for_any_cut(
    case: str, launches: list[str], tmp_path: Any
) -> None:
    theirs, _ = pair(case)
    with torch._C.DisableTorchFunction():
        theirs.save_pretrained(tmp_path)
        ids = text(9)
        expected = theirs(ids).logits[0]
    model, tokens = on_device(case, tmp_path, "float32"), ids[0].tolist()
    whole = model([tokens], model.new_state(), logits="all")
    with torch._C.DisableTorchFunction():
        torch.testing.assert_close(whole[0], expected, rtol=0, atol=1e-4)
    assert "product" in launches and {"attend", "gated_delta_rule", "ssd"} & set(launches)
    for cut in ([1, 2, 1, 5], [8, 1]):
        state, first, pieces = model.new_state(), 0, []
        for size in cut:
            pieces.append(model([tokens[first : first + size]], state, logits="all")[0])
            first += size
        same(case, torch.cat(pieces), whole[0])
    beside = model.new_state(rows=2)
    rows = model([tokens[:4], tokens], beside)
    same(case, rows, torch.stack([whole[0, 3], whole[0, -1]]))


def same(case: str, given: torch.Tensor, expected: torch.Tensor) -> None:
    """The same bits, or in the models of `CLOSE` nearly the same numbers."""
    with torch._C.DisableTorchFunction():
        torch.testing.assert_close(given, expected, rtol=0, atol=1e-5 if case in CLOSE else 0)
