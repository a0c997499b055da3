"""The README's Python runs as it is written, from top to bottom."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path

import pytest

import lmstate

ROOT = Path(__file__).parents[2]


def test_the_readme_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"^```python\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.S | re.M)
    assert len(blocks) >= 4
    names: dict[str, object] = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), names)
    texts = names["texts"]
    assert isinstance(texts, list) and len(texts) == 2 and all(texts)
    assert (tmp_path / "row.lmstate").stat().st_size > 0


def test_the_page_of_models_names_every_family() -> None:
    from lmstate.models.families import FAMILIES

    named = set(re.findall(r"[\w-]+", (ROOT / "docs" / "models.md").read_text(encoding="utf-8")))
    assert [family for family in FAMILIES if family not in named] == []


def test_the_page_of_files_names_every_architecture_of_gguf() -> None:
    from lmstate.checkpoints.gguf.config import ARCHITECTURES

    named = set(re.findall(r"[\w-]+", (ROOT / "docs" / "models.md").read_text(encoding="utf-8")))
    assert [arch for arch in ARCHITECTURES if arch not in named] == []


def test_links_in_documents_lead_somewhere() -> None:
    for page in [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_public_surface_is_there_and_says_what_it_is() -> None:
    for name in lmstate.__all__:
        assert (getattr(lmstate, name).__doc__ or "").strip(), f"lmstate.{name} has no docstring"


def test_what_the_reference_lists_is_there_and_says_what_it_is() -> None:
    page = (ROOT / "docs" / "reference.md").read_text(encoding="utf-8")
    found = re.findall(r"^::: ([\w.]+)$(?:\n    options:\n      members: \[([^]]*)\])?", page, re.M)
    listed = {name.rpartition(".")[2] for name, _ in found} | set(dir(import_module("lmstate.errors")))
    assert len(found) == page.count(":::") and {*lmstate.__all__} - listed == {"kv"}
    for name, members in found:
        module, _, last = name.rpartition(".")
        thing = getattr(import_module(module), last, None) or import_module(name)
        assert (thing.__doc__ or "").strip(), f"{name} has no docstring"
        fields = {field for base in getattr(thing, "__mro__", ()) for field in vars(base).get("__annotations__", {})}
        for member in filter(None, re.split(r"[\s,]+", members)):
            assert member in dir(thing) or member in fields, f"{name} has no {member}"
