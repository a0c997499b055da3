"""The command line without weights: `lmstate.load` gives a small real model that repeats what the user says."""

from __future__ import annotations

import pytest
from typer.testing import CliRunner

import lmstate
from lmstate.checkpoints.hub import ALIASES
from tests.cli.scripted import ScriptedModel, scripted


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a patched `lmstate.load` gives models for: the program refuses others before it calls it."""
    for name in ("m", "tiny", "small", "missing", "no-model"):
        monkeypatch.setitem(ALIASES, name, ALIASES["smollm2"])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> ScriptedModel:
    fake = scripted()
    asked: list[tuple[str, str]] = []

    def load(name: str, weights: str = "auto", **_: object) -> ScriptedModel:
        asked.append((name, weights))
        if name == "missing":
            raise FileNotFoundError("no model is called missing;\n  try smollm2")
        return fake

    fake.asked = asked  # type: ignore[attr-defined]
    monkeypatch.setattr(lmstate, "load", load, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # so that no command measures
    return fake


@pytest.fixture
def runner() -> CliRunner:
    return CliRunner()
