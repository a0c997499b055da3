"""What torch's default dtype is, is the user's business: a model loads and steps to the same logits under any."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from tests.sweeps import sampled
from tests.zoo import CASES, SAMPLE, pair, text


@contextmanager
def default(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def walk(model: lmstate.Model) -> torch.Tensor:
    """Logits of a prompt, of single tokens, and of several after a rewind."""
    ids, state = text(50)[0].tolist(), model.new_state(rows=2)
    out = [model([ids[:40], ids[:7]], state)] + [model([[t], [t]], state) for t in ids[40:44]]
    state.rewind(0, 41)
    out.append(model([ids[44:], []], state))
    return torch.stack(out)


@pytest.mark.parametrize("case", sampled(list(CASES), SAMPLE))
def test_logits_do_not_depend_on_the_default_dtype(case: str, tmp_path: Path) -> None:
    theirs, ours = pair(case)
    theirs.save_pretrained(tmp_path)
    expected = walk(ours)
    for dtype in (torch.float64, torch.bfloat16):
        with default(dtype):
            got = walk(build(WeightLoader(open_source(tmp_path), "float32")))
        assert got.dtype == torch.float32 and torch.equal(got, expected)
