"""Which body runs: forced by the environment, by gradients, by tracing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch

import lmstate.ops as ops
from lmstate.ops import cpu, dispatch
from lmstate.ops.cpu import variants

PROGRAM = """
import torch, lmstate.ops as ops
x = torch.linspace(-1, 1, 64)[None]
w = ops.quantize(torch.linspace(-1, 1, 16 * 64).view(16, 64), "int8")
print(ops.info()[0]["body"], ops.linear(x, w).sum().item())
"""


def run(forced: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "LMSTATE_OPS": forced, "OMP_NUM_THREADS": "1"}
    return subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("forced", ["reference", *cpu.usable()])
def test_the_environment_forces_a_body(forced: str) -> None:
    done = run(forced)
    assert done.returncode == 0, done.stderr
    body, total = done.stdout.split()
    assert body == forced
    exact = ops.quantize(torch.linspace(-1, 1, 16 * 64).view(16, 64), "int8").dequantize() @ torch.linspace(-1, 1, 64)
    tolerance = 1e-5 if forced == "reference" else 0.3
    assert abs(float(total) - exact.sum().item()) < tolerance


def test_an_unknown_body_is_refused_by_name() -> None:
    done = run("avx1024")
    told = "LMSTATE_OPS=avx1024: there are reference, portable, avx2, avxvnni, avx512"
    assert done.returncode != 0 and told in done.stderr


def test_a_variant_that_was_not_built_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    monkeypatch.setattr(variants, "path_of", lambda variant: tmp_path / f"{variant}.so")  # type: ignore[operator]
    with pytest.raises(cpu.NativeError, match="was not built"):
        cpu.open_library("avx2")
    assert cpu.usable() == ()


def test_a_library_of_other_sources_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    assert all(variants.built(variant) for variant in cpu.usable())
    monkeypatch.setattr(variants, "_digest", lambda: 1)
    assert cpu.usable() == ()
    with pytest.raises(cpu.NativeError, match="other sources"):
        cpu.open_library("portable")


def test_without_a_native_library_one_line_says_that_the_references_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMSTATE_OPS", raising=False)
    monkeypatch.setattr(cpu, "usable", lambda: ())
    with pytest.warns(RuntimeWarning, match="runs on its references"):
        chosen = dispatch.choice.__wrapped__()
    assert chosen.library is None and chosen.name == "reference"


def test_gradients_and_tracing_go_through_the_references(variant: str) -> None:
    x = torch.randn(2, 8)
    assert dispatch.native(x) is not None
    assert dispatch.native(x.requires_grad_()) is None
    with torch.no_grad():
        assert dispatch.native(x) is not None
    assert dispatch.native(torch.empty(1, device="meta")) is None


def test_info_names_every_operation_and_its_body(variant: str) -> None:
    told = ops.info()
    ops_told = {line["op"] for line in told}
    assert {"attend", "linear", "norm", "rope", "append", "glu", "gated_delta_mixer", "mamba2_mixer", "ssd"} <= ops_told
    assert all(line["body"] and line["why"] for line in told)
    assert told[0]["body"] == variant
