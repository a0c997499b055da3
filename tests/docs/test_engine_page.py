"""The Python of docs/engine.md, storage-tiers.md and generation.md, and the loop of docs/speculation.md, run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

import lmstate
from tests.real_model import smollm2

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (DOCS / page).read_text(encoding="utf-8"), re.S | re.M)


def test_the_page_of_the_engine_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (block,) = blocks("engine.md")
    names: dict[str, Any] = {}
    exec(compile(block, "engine.md", "exec"), names)
    assert names["request"].result().texts[0] in capsys.readouterr().out
    assert any((tmp_path / "prefixes").iterdir())


def test_the_stores_of_the_page_of_tiers_keep_prefixes() -> None:
    smollm2()
    names: dict[str, Any] = {}
    shared, alone = blocks("storage-tiers.md")
    exec(compile(shared, "storage-tiers.md", "exec"), names)
    assert (names["reuse"].reused, names["reuse"].tier) == (9, "shared")
    assert any("/entries/" in name for name in names["blobs"].blobs)
    exec(compile(alone, "storage-tiers.md", "exec"), names)
    assert (names["answer"].usage.reused, names["answer"].usage.reuse.tier) == (9, "shelf")
    plain = names["model"].generate("Here is a text that is read once. And on.", max_new_tokens=8)
    assert names["answer"].texts[0] == str(plain)


def test_the_page_of_generation_runs(capsys: pytest.CaptureFixture[str]) -> None:
    smollm2()
    names: dict[str, Any] = {}
    for block in blocks("generation.md"):
        exec(compile(block, "generation.md", "exec"), names)
    held = names["model"].tokenizer.decode(names["state"].tokens(0))
    assert "And a mountain?" in held and "And a longer one?" not in held
    assert names["answer"] in held and "Hello!" in capsys.readouterr().out


def test_the_loop_of_ones_own_gives_the_plain_text() -> None:
    model = lmstate.load(str(smollm2()))
    names: dict[str, Any] = {"model": model, "prompt": "1 2 3 4 1 2 3 4 1 2 3 4 1 2"}
    exec(compile(blocks("speculation.md")[-1], "speculation.md", "exec"), names)
    plain = model.new_state()
    model.generate(names["prompt"], plain, max_new_tokens=100, draft=None)
    text = names["text"]
    assert len(text) >= 100 and text == names["state"].tokens(0)
    assert text[: plain.lengths[0]] == plain.tokens(0)[: len(text)]
    assert names["speculator"].report().accepted > 0
