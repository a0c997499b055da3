"""What is kept outside memory: found after a restart, and never able to change or hold up an answer."""

from __future__ import annotations

import random
import sqlite3
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

import lmstate
from lmstate.engine.prefix.parts import Layers
from lmstate.engine.tiers import Entry
from lmstate.engine.tiers.folder import FolderTier
from tests.engine.alone import alone
from tests.engine.chat import chatting
from tests.engine.test_batching import KINDS, prompt
from tests.engine.test_prefixes import ask, check
from tests.engine.test_sessions import HOT
from tests.zoo import ours


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_finds_what_was_computed_before(kind: str, tmp_path: Path) -> None:
    model = ours(KINDS[kind])
    system = prompt(90, 1)
    with lmstate.Engine(model, store=tmp_path) as engine:
        first = ask(engine, system)
        longer = [*system, *first.tokens[0], *prompt(9, 2)]
        ask(engine, longer)
    with lmstate.Engine(model, store=tmp_path) as engine:
        told = engine.explain([*longer, 5])
        assert (told.reused, told.tier) == (len(longer), "folder")
        got = ask(engine, [*longer, 5])
        check(model, [*longer, 5], got)
        assert got.usage.reused == len(longer)
        assert got.usage.reuse.tier == "folder"
        again = ask(engine, [*system, 7, 8])
        check(model, [*system, 7, 8], again)
        assert again.usage.reused == len(system)


@pytest.mark.parametrize("kind", ["hybrid", "window"])
def test_sessions_go_on_after_a_restart(kind: str, tmp_path: Path) -> None:
    model = chatting(KINDS[kind])
    with lmstate.Engine(model, store=tmp_path) as engine:
        session = engine.session("kept")
        session.send("hello there", seed=1, **HOT).result(60)
        session.send("and then", seed=2, **HOT).result(60)
        session.mark()
        engine.session("gone").send("x", seed=1, **HOT).result(60)
        engine.session("gone").close()
        tokens, messages = session.tokens, session.messages
    with lmstate.Engine(model, store=tmp_path) as engine:
        assert engine.sessions() == ["kept"]
        session = engine.session("kept")
        assert (session.tokens, session.messages) == (tokens, messages)
        got = session.send("and now", seed=3, **HOT).result(60)
        assert session.tokens[: len(tokens)] == tokens
        assert got.usage.reused >= len(tokens) - 1
        session.undo()
        session.undo()
        assert len(session.messages) == 2


def damaged(path: Path, how: str) -> None:
    """Spoil every file of a folder."""
    files = [file for file in (path / "entries").rglob("*") if file.is_file()]
    assert files
    for file in files:
        data = file.read_bytes()
        if how == "cut":
            file.write_bytes(data[: len(data) // 2])
        elif how == "flipped":
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        else:
            file.unlink()


@pytest.mark.parametrize("how", ["cut", "flipped", "gone"])
def test_damaged_files_are_computed_again_and_put_aside(how: str, tmp_path: Path) -> None:
    model = ours("qwen3_next-dense")
    ids = prompt(60, 1)
    with lmstate.Engine(model, store=tmp_path) as engine:
        ask(engine, ids)
    damaged(tmp_path, how)
    with lmstate.Engine(model, store=tmp_path) as engine:
        got = ask(engine, [*ids, 4])
        check(model, [*ids, 4], got)
        assert got.usage.reused == 0
        assert engine.stats()["folder_quarantined"] >= 1
    assert (tmp_path / "damaged").exists() == (how != "gone")
    with lmstate.Engine(model, store=tmp_path) as engine:
        assert ask(engine, [*ids, 4]).usage.reused > 0, "what was computed again is kept again"


def test_a_hostile_index_changes_no_answer(tmp_path: Path) -> None:
    model = ours("llama")
    ids = prompt(60, 1)
    with lmstate.Engine(model, store=tmp_path) as engine:
        ask(engine, ids)
        engine.session("s").send([1, 2, 3], max_new_tokens=2).result(60)
    index = sqlite3.connect(tmp_path / "index.sqlite3")
    with index:
        index.execute("update entries set start = 5, kind = 'carry' where start = 0")
        index.execute("update sessions set record = '[]'")
    index.close()
    with lmstate.Engine(model, store=tmp_path) as engine:
        assert engine.sessions() == []
        got = ask(engine, ids)
        check(model, ids, got)
        assert got.usage.reused == 0


def test_entries_of_another_model_are_not_seen(tmp_path: Path) -> None:
    ids = prompt(60, 1)
    with lmstate.Engine(ours("llama"), store=tmp_path) as engine:
        ask(engine, ids)
    with lmstate.Engine(ours("mistral"), store=tmp_path) as engine:
        assert ask(engine, ids).usage.reused == 0
    with lmstate.Engine(ours("llama"), store=tmp_path) as engine:
        assert ask(engine, ids).usage.reused >= len(ids) - 1


def test_a_folder_holds_its_budget(tmp_path: Path) -> None:
    model = ours("qwen3_next-dense")
    limit = 400_000
    with lmstate.Engine(model, store=tmp_path, store_bytes=limit) as engine:
        for seed in range(30):
            ask(engine, prompt(40, seed), 2)
        engine._tier.flush(30)
        held = sum(file.stat().st_size for file in (tmp_path / "entries").rglob("*") if file.is_file())
        assert 0 < held <= limit
        assert engine._tier.nbytes() == held
    with lmstate.Engine(model, store=tmp_path, store_bytes=limit) as engine:
        assert ask(engine, [*prompt(40, 29), 3]).usage.reused > 0


class Failing(FolderTier):
    """A folder any of whose calls may fail."""

    name = "failing"
    chance = 0.3

    def _maybe(self) -> None:
        if self.dice.random() < self.chance:
            raise OSError("the disk is on fire")

    dice = random.Random(1)

    def read(self, key: str) -> Layers:
        self._maybe()
        return super().read(key)

    def write(self, entry: Entry, key: str, layers: Layers, above: Sequence[str]) -> None:
        self._maybe()
        super().write(entry, key, layers, above)


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_that_fails_at_any_call_changes_no_answer(kind: str, tmp_path: Path) -> None:
    model = ours(KINDS[kind])
    dice = random.Random(kind)
    texts: list[list[int]] = [prompt(30, 1)]
    for _ in range(4):
        tier = Failing(tmp_path, f"{kind}", 10**9)
        with lmstate.Engine(model, rows=2, memory=60_000, store=tier) as engine:
            for _ in range(6):
                base = dice.choice(texts)
                ids = [*base[: dice.randint(1, len(base))], *prompt(dice.randint(1, 9), dice.randint(0, 10**6))][:90]
                got = ask(engine, ids, 4)
                check(model, ids, got)
                texts.append([*ids, *got.tokens[0]])
                assert engine.call(lambda _: engine._reuse.prefixes.nbytes == engine._reuse.prefixes.counted()).result()


class Hanging(FolderTier):
    name = "hanging"

    def read(self, key: str) -> Layers:
        time.sleep(60)
        raise AssertionError

    def write(self, entry: Entry, key: str, layers: Layers, above: Sequence[str]) -> None:
        if self.hangs:
            time.sleep(60)
        super().write(entry, key, layers, above)

    hangs = False


def test_a_tier_that_hangs_holds_up_nobody_for_long(tmp_path: Path) -> None:
    model = ours("llama")
    ids = prompt(40, 1)
    with lmstate.Engine(model, store=FolderTier(tmp_path, "one", 10**9)) as engine:
        ask(engine, ids)
    tier = Hanging(tmp_path, "one", 10**9)
    engine = lmstate.Engine(model, store=tier)
    slow = engine.submit([*ids, 5], max_new_tokens=3)
    other = engine.submit([7, 8, 9], max_new_tokens=3)
    assert len(other.result(20).tokens[0]) == 3
    assert slow.result(20).tokens == [alone(model, [*ids, 5], 3)[0]]
    tier.hangs = True
    assert ask(engine, prompt(30, 3)).usage.generated == 6
    tier.close = lambda timeout=0.0: None  # type: ignore[method-assign]
    engine.close()
