"""Carries of 16 and 8 bits over ranks that are threads: each rank rounds its part as one process rounds the whole."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

import lmstate
from lmstate.errors import UnsupportedError
from lmstate.models.model import Model
from tests.distributed.helpers import one_process, over_threads, same, saved
from tests.zoo import text

IDS = text(200)[0].tolist()
SUMMING: dict[str, dict[str, float]] = {
    "qwen3_5-tied": {}, "kimi_linear": {}, "mamba2-groups": {}, "mamba2": {}, "jamba": {}, "zamba-deep": {},
    "recurrent_gemma": {"lru_width": 192}, "rwkv": {"attention_hidden_size": 64}, "minimax": {}, "qwen4_exp": {},
    "xlstm": {"num_heads": 16, "qk_dim_factor": 1.0}, "falcon_h1": {"mamba_d_state": 16},
}  # fmt: skip
"""Recurrences that sum over tokens, by heads, groups, channels and blocks, alone and beside attention; of sizes whose
halves are whole groups."""


def told(model: Model, folder: Path, carries: int) -> tuple[list[Tensor], list[lmstate.Snapshot]]:
    """Logits and snapshots of rows that pass multiples of 64 in chunks, drafts and rewinds."""
    state, out, snapshots = model.new_state(2, carries=carries), [], []
    out.append(model([IDS[:100], IDS[:64]], state))
    snapshots.append(state.snapshot(1))  # codes
    out.append(model([IDS[100:128], IDS[64:70]], state, logits="all"))
    out.append(model([IDS[:9], IDS[:3]], state, logits="all", commit=False))
    state.commit([0, 2])
    snapshots += [state.snapshot(0), state.snapshot(1)]
    snapshots[1].save(folder / "row")
    state.rewind(0, 120)
    state.select([1, 0])
    out.append(model([IDS[:70], IDS[120:130]], state, logits="all"))
    state.restore(0, lmstate.Snapshot.load(folder / "row"))
    state.rewind(1, 3)
    return [*out, model([IDS[128:140], IDS[3:5]], state)], snapshots


@pytest.mark.parametrize("carries", [16, 8])
@pytest.mark.parametrize("case", SUMMING)
def test_rounded_carries_are_those_of_one_process(case: str, carries: int, tmp_path: Path) -> None:
    folder = saved(case, tmp_path, **SUMMING[case])
    with over_threads(folder, "float32", 2) as (model, _):
        (ours, own), (theirs, whole) = (
            told(each, tmp_path, carries) for each in (model, one_process(folder, "float32"))
        )
        assert same(ours, theirs)
        layers = [pair for a, b in zip(own, whole) for pair in zip(a.layers, b.layers, strict=True)]
        assert any(name.endswith(f"int{carries}") for layer, _ in layers for name in layer)
        for layer, expected in layers:
            assert set(layer) == set(expected)
            assert all(torch.equal(layer[name], expected[name]) for name in expected)


def test_parts_that_begin_inside_a_group_are_refused(tmp_path: Path) -> None:
    """24 numbers on each of two ranks."""
    with over_threads(saved("recurrent_gemma", tmp_path), "float32", 2) as (model, _):
        with pytest.raises(UnsupportedError, match=r"carries=8 .* use carries=32"):
            model.new_state(carries=8)
        assert model([IDS[:3]]) is not None
