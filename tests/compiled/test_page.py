"""The page on compiling and exporting runs as written, on a small model and without code generation."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import pytest
import torch

import lmstate
from tests.invariants.mirror import close
from tests.zoo import ours

PAGE = Path(__file__).parents[2] / "docs" / "compile-and-export.md"


class Words:
    def chat(self, messages: list[dict[str, str]]) -> list[int]:
        return [len(message["content"]) for message in messages] + [7, 8, 9]


def test_the_page_runs_as_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours("gemma3-pattern")
    monkeypatch.setattr(model, "_tokenizer", Words())
    monkeypatch.setattr(lmstate, "load", lambda *_, **__: model, raising=False)
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager"))
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    for block in re.findall(r"```python\n(.*?)```", PAGE.read_text(), flags=re.S):
        exec(block, names)
    state, ids, logits = names["state"], names["ids"], names["logits"]
    assert isinstance(state, lmstate.State) and isinstance(ids, list) and isinstance(logits, torch.Tensor)
    assert state.lengths == [len(ids) + 8]
    close(logits, model([state.tokens(0)[: len(ids) + 1]])[:, -1])
