"""What only a GPU can show; each file is skipped where there is none."""

from __future__ import annotations

import tempfile
from functools import lru_cache
from pathlib import Path

import pytest
import torch

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from tests.zoo import pair, text

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU that torch can use")


@lru_cache(maxsize=8)
def on_gpu(case: str, weights: str = "float32") -> lmstate.Model:
    """A model of the zoo, on the GPU."""
    theirs, _ = pair(case)
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        return build(WeightLoader(open_source(Path(folder)), weights, device="cuda"))


def ids(length: int, seed: int = 0) -> list[int]:
    return text(length, seed=seed)[0].tolist()
