"""The benchmark of a GPU, as far as a processor can run it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from bench import gpu, gpu_runs

PARAMETERS = {"135M": 0.135, "1.7B": 1.5, "8B": 8.0, "qwen3.5-0.8B": 0.75, "granite-h-1B": 1.5}  # billions


@pytest.mark.parametrize("shape", PARAMETERS)
def test_shapes_have_the_size_that_they_are_named_for(shape: str) -> None:
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(gpu_runs.SHAPES[shape]())
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(PARAMETERS[shape], rel=0.1)


def test_cases_are_measured_and_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "gpu.json"
    shape = ["--shape", "tiny", "--device", "cpu", "--kinds", "float32", "int4"]
    gpu.main([*shape, "--rounds", "1", "--no-graphs", "--only", "near", "--out", str(out)])
    kept = json.loads(out.read_text())
    engines = {"transformers", "lmstate float32", "lmstate int4"}
    assert {case["name"]: set(case["rates"]) for case in kept["cases"]} == {
        "decode 1 near 24": engines, "decode 3 near 24": engines,
    }  # fmt: skip
    assert all(0 < share < 1 for case in kept["cases"] for share in case["shares"].values())
    assert "| decode 3 near 24 |" in capsys.readouterr().out


def test_requests_count_their_tokens() -> None:
    _, ours = gpu_runs.models("tiny", "cpu", ["float32"])
    assert gpu_runs.our_engine(ours["float32"], 3, 20, 5)() == 15


def test_bars_tell_what_was_missed() -> None:
    cases = [
        gpu.Case("decode 1 near 512", {gpu.PEER: 10.0, "lmstate bfloat16": 150.0}),
        gpu.Case("graph 1 near 512", {gpu.COMPILED: 40.0}),
    ]
    reached = gpu.bars("135M", cases, (512,))
    assert [(bar, value) for _, bar, value in reached] == [(3.0, 3.75), (20.0, 15.0)]
    assert gpu.markdown("135M", cases, reached).count("(missed)") == 1
