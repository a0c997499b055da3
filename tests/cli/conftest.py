"""The command line without weights: `lmstate.load` gives a scripted model that repeats what the user says."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from typer.testing import CliRunner

import lmstate
from lmstate.checkpoints.hub import ALIASES
from tests.generation.fake_model import EOS, FakeModel, FakeTokenizer, ids


class ChatTokenizer(FakeTokenizer):
    has_chat_template = True

    def chat(self, messages: Sequence[dict[str, str]], add_generation_prompt: bool = False) -> list[int]:
        text = "".join(f"[{message['role']}]{message['content']}[end]\n" for message in messages)
        return self.encode(text + "[assistant]" * add_generation_prompt)


def repeat(held: list[int]) -> int:
    """The next token of the answer "You said ...": of the last user message of a chat, or of the plain text."""
    text = FakeTokenizer().decode(held)
    before, _, answer = text.rpartition("[assistant]") if "[assistant]" in text else ("", "", "")
    said = before.rpartition("[user]")[2].partition("[end]")[0] if before else text.partition(":")[0]
    wanted = f"You said {said}." if before else " and so on"
    done = answer if before else text.partition(":")[2]
    return ids(wanted[len(done) :])[0] if len(done) < len(wanted) else EOS


@pytest.fixture(autouse=True)
def names(monkeypatch: pytest.MonkeyPatch) -> None:
    """Names that a patched `lmstate.load` gives models for: the program refuses others before it calls it."""
    for name in ("m", "tiny", "small", "missing", "no-model"):
        monkeypatch.setitem(ALIASES, name, ALIASES["smollm2"])


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch) -> FakeModel:
    fake = FakeModel(repeat)
    fake.tokenizer = ChatTokenizer()
    asked: list[tuple[str, str]] = []

    def load(name: str, weights: str = "auto", **_: object) -> FakeModel:
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
