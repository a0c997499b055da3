"""The Python of docs/training.md runs as it is written, from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "training.md"


def test_the_page_of_training_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) == 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, PAGE.name, "exec"), names)
    assert float(names["value"].detach()) > 0  # type: ignore[attr-defined]
    assert names["state"].lengths == [0, 0, 0]  # type: ignore[attr-defined]
    assert (tmp_path / "adapter" / "adapter_model.safetensors").stat().st_size > 0
