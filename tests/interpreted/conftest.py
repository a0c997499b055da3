"""Kernels in Triton's interpreter, which `tests/conftest.py` chooses."""

from __future__ import annotations

import os
from importlib.util import find_spec

import pytest

if find_spec("triton") is None or os.environ["TRITON_INTERPRET"] != "1":
    collect_ignore_glob = ["test_*.py"]


@pytest.fixture(autouse=True)
def rounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Repair the interpreter of Triton 3.7 for bfloat16, see `bfloat16.py`; and use the largest tiles."""
    from lmstate.ops.cuda import configs
    from tests.interpreted.bfloat16 import shim

    shim(monkeypatch)
    monkeypatch.setattr(configs, "PROGRAMS", 1)  # few programs, each of which takes long here
