"""Every kernel compiles for NVIDIA's architectures without a GPU, and keeps what it computes in registers."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

from lmstate.ops.cuda.configs import shared_needed

ROOT = Path(__file__).parents[2]
SHARED = {80: 166_912, 90: 232_448, 100: 232_448, 120: 101_376}
"""Bytes of shared memory that a program may have (CUDA C++ Programming Guide, compute capabilities)."""

SPILLED = 8
"""Bytes of registers that a thread keeps in memory, at most."""
NEEDED = {"attend, float32": shared_needed(256, 4), "attend, float32 latents": shared_needed(512, 4)}
"""Shared memory of kernels that run where the GPU has so much."""
AHEAD = 8
"""Groups of copies, two a step, that are under way in a product of few rows, which is as fast as its weight comes."""
SMALL_LOADS = 8
"""Loads of 1 or 2 bytes in a kernel of products, at most: keys and weights are read 16 bytes at a time."""


@pytest.mark.parametrize(
    "arch", [pytest.param(80, marks=pytest.mark.soak), 90, pytest.param(100, marks=pytest.mark.soak), 120]
)
def test_kernels_compile_to_the_registers_and_units_of_the_table(arch: int, tmp_path: Path) -> None:
    """The table is made by `python -m tests.interpreted.compile_kernels write`."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path)
    command = [sys.executable, "-m", "tests.interpreted.compile_kernels", str(arch)]
    made = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert made.returncode == 0, made.stderr[-3000:]
    told = json.loads((ROOT / "tests/interpreted/resources.json").read_text())
    found = json.loads(made.stdout)
    for label, row in found.items():
        assert row["shared"] <= NEEDED.get(label, SHARED[arch]), (label, row)
        assert label not in ("product", "product, int4", "product, int8") or row["ahead"] >= AHEAD, (label, row)
        if "float32" in label:  # products without the matrix unit
            continue
        assert not row["contracted"] and row["stack"] <= SPILLED, (label, row)
        multiplies = {"attend", "product", "ranks"} & set(re.split(r"\W", label))
        assert not multiplies or row["units"], label
        few = row["loads"]["1 or 2"] <= SMALL_LOADS or "bits" in label  # scales and middles of channels
        assert not multiplies or (few and row["loads"]["16 bytes"]), (label, row)
    if told["triton"] == version("triton"):
        assert found == told[str(arch)]


VARIES = {"attention": {"entries", "width", "pairs", "parts", "lines"}, "chosen": {"width"}, "dense": {"rows"}}
"""Integers that differ from step to step, by the file of the kernels; `width` is that of features elsewhere."""


def test_no_kernel_is_compiled_again_for_another_length_or_number_of_rows() -> None:
    """Triton compiles a kernel for an integer of 1, of multiples of 16, and of others, unless told not to."""
    folder, seen = ROOT / "src/lmstate/ops/cuda/kernels", set()
    for path in folder.glob("*.py"):
        for kernel in ast.parse(path.read_text()).body:
            if isinstance(kernel, ast.FunctionDef) and kernel.name[0] != "_":
                varies = VARIES.get(path.stem, set())
                if path.stem == "recurrent" and kernel.name != "gated_norm":
                    varies = {"width"}
                own = {arg.arg for arg in kernel.args.args} & varies
                told = {node.value for each in kernel.decorator_list for node in ast.walk(each)
                        if isinstance(node, ast.Constant)}  # fmt: skip
                assert own <= told, (kernel.name, own - told)
                seen |= own
    assert seen == {"entries", "width", "pairs", "parts", "lines", "rows"}


def test_every_kernel_is_in_the_table() -> None:
    folder = ROOT / "src/lmstate/ops/cuda/kernels"
    text = "".join(path.read_text() for path in folder.glob("*.py") if path.name != "functions.py")
    kernels = set(re.findall(r"^def ([a-z]\w*)\(", text, re.M))
    told = json.loads((ROOT / "tests/interpreted/resources.json").read_text())
    for arch in ("80", "90", "100", "120"):
        assert kernels == {label.split(",")[0] for label in told[arch]}
