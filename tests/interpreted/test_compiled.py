"""Every kernel compiles for NVIDIA's architectures, on a machine without a GPU."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    "arch", [pytest.param(80, marks=pytest.mark.soak), 90, pytest.param(100, marks=pytest.mark.soak), 120]
)
def test_every_kernel_compiles_and_products_use_the_matrix_unit(arch: int, tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.interpreted.compile_kernels", str(arch)]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    lines = [json.loads(line) for line in made.stdout.splitlines()]
    assert {line["kernel"] for line in lines} == {
        "attend", "merge", "append", "rope", "product", "rms_norm", "glu", "gated_delta_rule", "ssd", "causal_conv"
    }  # fmt: skip
    for line in lines:
        assert line["bytes"] > 0 and not line["fused"], line
        if line["kernel"] in ("attend", "product"):
            assert line["units"], line
