"""The loss in chunks on the GPU, and its gradients, are those of the processor."""

from __future__ import annotations

from pathlib import Path

import pytest

from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.training import TrainableModel, loss
from tests.cuda import needs_gpu
from tests.training.small import furthest, gradients, ragged, theirs

pytestmark = needs_gpu


@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3", "qwen3_next", "mamba2", "falcon_h1", "lfm2"])
def test_gradients_in_chunks_are_those_of_the_processor(case: str, tmp_path: Path) -> None:
    theirs(case).save_pretrained(tmp_path)
    rows, losses, found = ragged(40, 23, 5), [], []
    for device in ("cpu", "cuda"):
        model = TrainableModel(WeightLoader(open_source(tmp_path), "float32", device=device))
        value = loss(model, rows, chunk=16)
        value.backward()
        losses.append(float(value.detach()))
        found.append({name: None if grad is None else grad.cpu() for name, grad in gradients(model).items()})
    assert losses[1] == pytest.approx(losses[0], abs=1e-5)
    worst, name = furthest(found[1], found[0], floor=1e-5)
    assert worst < 1e-3, name
