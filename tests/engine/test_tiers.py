"""What is kept outside memory: found after a restart, and never able to change or hold up an answer."""

from __future__ import annotations

import dataclasses
import os
import random
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from pathlib import Path
from threading import Event
from typing import TypeVar

import pytest

import lmstate
from lmstate.engine import StoreUnreachable
from lmstate.engine.memory import RowCost
from lmstate.engine.prefix.parts import Layers
from lmstate.engine.tiers import Entry, SavedSession, open_records
from lmstate.engine.tiers.folder import FolderTier
from lmstate.engine.tiers.sqlite_records import SqliteRecords
from lmstate.state.layers.block_store import BlockStore
from tests.engine.alone import alone
from tests.engine.chat import chatting
from tests.engine.test_batching import KINDS, prompt
from tests.engine.test_prefixes import ask, check
from tests.engine.test_sessions import HOT
from tests.waiting import impatient
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


def test_entries_of_another_version_are_computed_again_and_sessions_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = ours("llama"), prompt(90, 1)
    with lmstate.Engine(model, store=tmp_path) as engine:
        ask(engine, text)
        engine.session("one").send([5, 6], max_new_tokens=2).result(600)
    monkeypatch.setattr("lmstate.engine.tiers.tier.VERSION", 10**6)
    with lmstate.Engine(model, store=tmp_path) as engine:
        got = ask(engine, text)
        check(model, text, got)
        assert got.usage.reused == 0
        assert engine.sessions() == ["one"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_restart_finds_a_branch_that_ends_before_the_one_it_left(kind: str, tmp_path: Path) -> None:
    model = ours(KINDS[kind])
    long = prompt(90, 1)
    with lmstate.Engine(model, store=tmp_path) as engine:
        ask(engine, long)
        branch = [*long[:50], *prompt(9, 2)]
        branch += ask(engine, branch).tokens[0]
    with lmstate.Engine(model, store=tmp_path) as engine:
        got = ask(engine, [*branch, 5])
        check(model, [*branch, 5], got)
        assert got.usage.reused >= len(branch) - 1, "the last token of an answer was not computed"
        assert got.usage.reuse.tier == "folder"


@pytest.mark.parametrize("store", ["{}", "file://{}"])
def test_the_records_of_a_store_are_those_of_its_engines(store: str, tmp_path: Path) -> None:
    store = store.format(tmp_path)
    with closing(open_records(store)) as records, lmstate.Engine(ours("llama"), store=store) as engine:
        theirs = engine.stored_records()
        assert theirs is not None and theirs.commit("kind", "name", b"data", 1)
        found = records.read("kind", "name")
        assert found is not None and found.data == b"data"
        assert not records.commit("kind", "name", b"late", 1)


@pytest.mark.parametrize("kind", ["attention", "hybrid", "latent"])
def test_rows_share_the_blocks_of_what_was_read_again(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ours(KINDS[kind])
    system = prompt(90, 1)
    with lmstate.Engine(model, store=tmp_path) as engine:
        longer = [*system, *ask(engine, system).tokens[0], *prompt(9, 2)]
        ask(engine, longer)
    monkeypatch.setattr(BlockStore, "_written", None)  # copies tensors into a row's blocks
    with lmstate.Engine(model, store=tmp_path) as engine:
        for text in ([*longer[:-1], 5], [*longer, 6], [*longer, 7]):
            got = ask(engine, text)
            check(model, text, got)
            assert got.usage.reused >= (len(longer) if text[-1] > 5 else len(system))
        prefixes = engine._reuse.prefixes
        assert prefixes.nbytes == prefixes.counted()


class Changing(FolderTier):
    """A folder whose runs, or ends of texts, read as something else, of the right checksum."""

    change = ""

    def read(self, key: str) -> Layers:
        ((kind,),) = self._index.execute("select kind from entries where key = ?", (key,)).fetchall()
        layers = super().read(key)
        if kind != {"": None, "short run": "run", "no tensors": "run"}.get(self.change, "end"):
            return layers
        if self.change == "few layers":
            return layers[:-2]
        if self.change == "no tensors":
            return tuple(dict.fromkeys(layer) for layer in layers)  # type: ignore[arg-type]
        along = -2 if self.change == "short run" else -1
        return tuple({name: tensor.narrow(along, 1, 1) for name, tensor in layer.items()} for layer in layers)


@pytest.mark.parametrize("change", ["short run", "no tensors", "few layers", "narrow tensors"])
def test_an_entry_of_another_shape_is_computed_again_and_takes_nothing_with_it(change: str, tmp_path: Path) -> None:
    model = ours("qwen3_next-dense")
    system = prompt(90, 1)
    with lmstate.Engine(model, store=tmp_path) as engine:
        longer = [*system, *ask(engine, system).tokens[0], *prompt(9, 2)]
        ask(engine, longer)
        store = engine._tier
        assert isinstance(store, FolderTier)
        namespace = store.namespace
    tier = Changing(tmp_path, namespace, 10**9)
    with lmstate.Engine(model, store=tier) as engine:
        assert ask(engine, [*system, 7]).usage.reused == len(system), "now in memory"
        tier.change = change
        got = ask(engine, [*longer, 5], 1)
        check(model, [*longer, 5], got)
        assert got.usage.reused == len(system), "what is in memory stays"
        assert engine.stats()["folder_failed"] >= 1
        ask(engine, [*longer, 6], 1)
    with lmstate.Engine(model, store=tmp_path) as engine:
        got = ask(engine, [*longer, 7], 1)
        check(model, [*longer, 7], got)
        assert got.usage.reused == len(longer), "what was computed again was written again"


@pytest.mark.parametrize("kind", ["hybrid", "window"])
def test_sessions_go_on_after_a_restart(kind: str, tmp_path: Path) -> None:
    model = chatting(KINDS[kind])
    with lmstate.Engine(model, store=tmp_path) as engine:
        session = engine.session("kept")
        session.send("hello there", seed=1, **HOT).result(600)
        session.send("and then", seed=2, **HOT).result(600)
        session.mark()
        engine.session("gone").send("x", seed=1, **HOT).result(600)
        engine.session("gone").close()
        tokens, messages = session.tokens, session.messages
    with lmstate.Engine(model, store=tmp_path) as engine:
        assert engine.sessions() == ["kept"]
        session = engine.session("kept")
        assert (session.tokens, session.messages) == (tokens, messages)
        got = session.send("and now", seed=3, **HOT).result(600)
        assert session.tokens[: len(tokens)] == tokens
        assert got.usage.reused >= len(tokens) - 1
        session.undo()
        session.undo()
        assert len(session.messages) == 2


@pytest.mark.parametrize("kind", ["hybrid", "window"])
def test_a_session_is_saved_whole_before_its_prefix_was_read_again(kind: str, tmp_path: Path) -> None:
    model = ours(KINDS[kind])
    with lmstate.Engine(model, store=tmp_path / "store") as engine:
        engine.session("kept").send(prompt(70, 1), max_new_tokens=5).result(600)
        tokens = engine.session("kept").tokens
    with lmstate.Engine(model, store=tmp_path / "store") as engine:
        engine.session("kept").save(tmp_path / "file")
    with lmstate.Engine(model) as engine:
        assert engine.load_session("copy", tmp_path / "file").tokens == tokens


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


def change(file: Path, statement: str, *values: object) -> None:
    """Run a statement on an SQLite file."""
    with closing(sqlite3.connect(file)) as database, database:
        database.execute(statement, values)


def rewrite(folder: Path, name: str, record: str) -> None:
    """Have the record of a session say something else."""
    records = SqliteRecords(folder / "records.sqlite3", b"")
    ((kind,),) = records._connection.execute("select distinct kind from records").fetchall()
    there = records.read(kind, name)
    assert there is not None
    changed = dataclasses.replace(SavedSession.of(name, there), record=record)
    assert records.commit(kind, name, changed.to_bytes(), there.generation + 1)
    records.close()


def test_a_hostile_index_changes_no_answer(tmp_path: Path) -> None:
    model = ours("llama")
    ids = prompt(60, 1)
    with lmstate.Engine(model, store=tmp_path) as engine:
        ask(engine, ids)
        engine.session("s").send([1, 2, 3], max_new_tokens=2).result(600)
    change(tmp_path / "index.sqlite3", "update entries set start = 5, kind = 'carry' where start = 0")
    rewrite(tmp_path, "s", "[]")
    with lmstate.Engine(model, store=tmp_path) as engine:
        assert engine.find_session("s") is None and engine.sessions() == []
        got = ask(engine, ids)
        check(model, ids, got)
        assert got.usage.reused == 0


@pytest.mark.parametrize(
    "record",
    [
        '{"messages": [], "turns": [[Infinity, 0]], "marks": []}',
        '{"messages": [], "turns": [0], "marks": []}',
        '{"messages": [], "turns": [], "marks": [true]}',
        '{"messages": [{"role": "assistant", "content": {}}], "turns": [[2, 1]], "marks": []}',
        "[" * 100_000,
        '{"messages": [{"role": "user", "content": %s}], "turns": [], "marks": []}' % ("[" * 255 + "]" * 255),
    ],
)
def test_hostile_sessions_keep_no_engine_from_starting(record: str, tmp_path: Path) -> None:
    model = ours("llama")
    with lmstate.Engine(model, store=tmp_path) as engine:
        for name in ("a", "b", "c"):
            engine.session(name).send([1, 2, 3], max_new_tokens=2).result(600)
        file = tmp_path / "b.lmstate"
        engine.session("b").save(file)
        snapshot = dataclasses.replace(lmstate.Snapshot.load(file), notes=record)
        snapshot.save(file)
        if "assistant" not in record:
            with pytest.raises(lmstate.SnapshotError, match="no session"):
                engine.load_session("d", file)
    rewrite(tmp_path, "b", record)
    change(tmp_path / "index.sqlite3", "update entries set frequency_key = 9e999 where start = 0")
    with lmstate.Engine(model, store=tmp_path) as engine:
        assert {"a", "c"} <= set(engine.sessions())
        check(model, prompt(20, 1), ask(engine, prompt(20, 1)))


def test_a_file_of_records_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "records.sqlite3").write_bytes(b"no records at all" * 100)
    with pytest.raises(OSError, match=r"records\.sqlite3 is not usable as file of records"):
        lmstate.Engine(ours("llama"), store=tmp_path)


def test_an_index_that_cannot_be_opened_is_not_called_one_to_remove(tmp_path: Path) -> None:
    (tmp_path / "index.sqlite3").mkdir()  # SQLite says of it what it says where a disk is full, or nobody may write
    with pytest.raises(OSError, match=r"index\.sqlite3 cannot be opened") as raised:
        lmstate.Engine(ours("llama"), store=tmp_path)
    assert "remove" not in str(raised.value)


def test_an_index_that_would_compute_is_refused(tmp_path: Path) -> None:
    forever = "with recursive n(x) as (select 1 union all select x + 1 from n) select max(x) as namespace from n"
    with sqlite3.connect(tmp_path / "index.sqlite3") as index:
        index.execute(f"create view entries as {forever}")
    index.close()
    with pytest.raises(OSError, match="views or triggers"):
        lmstate.Engine(ours("llama"), store=tmp_path)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="there are no pipes")
def test_a_pipe_in_the_place_of_an_entry_holds_up_nothing(tmp_path: Path) -> None:
    model, ids = ours("llama"), prompt(60, 1)
    with lmstate.Engine(model, store=tmp_path) as engine:
        ask(engine, ids)
    for file in [file for file in (tmp_path / "entries").rglob("*") if file.is_file()]:
        file.unlink()
        os.mkfifo(file)
    with lmstate.Engine(model, store=tmp_path) as engine:
        check(model, ids, ask(engine, ids))
        assert engine.stats()["folder_quarantined"] >= 1


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
        assert engine._tier.flush(600)
        held = sum(file.stat().st_size for file in (tmp_path / "entries").rglob("*") if file.is_file())
        assert 0 < held <= limit
        assert engine._tier.nbytes() == held
    with lmstate.Engine(model, store=tmp_path, store_bytes=limit) as engine:
        assert ask(engine, [*prompt(40, 29), 3]).usage.reused > 0


@pytest.mark.parametrize("kind", ["hybrid", "attention"])
def test_a_session_of_another_process_is_seen_when_it_is_asked_for(kind: str, tmp_path: Path) -> None:
    model = ours(KINDS[kind])
    with lmstate.Engine(model, store=tmp_path) as here, lmstate.Engine(model, store=tmp_path) as there:
        there.session("theirs").send(prompt(100, 1), max_new_tokens=5, ignore_eos=True).result(600)
        tokens = there.session("theirs").tokens
        assert there._tier.flush(600)
        assert here.sessions() == ["theirs"] == there.sessions()
        assert here.find_session("nobody's") is None
        with pytest.raises(ValueError, match="theirs"):
            here.session("mine").fork("theirs")
        session = here.find_session("theirs")
        assert session is here.session("theirs")
        assert session.tokens == tokens
        got = session.send(prompt(3, 2), max_new_tokens=4, ignore_eos=True, logprobs=0).result(600)
        check(model, [*tokens, *prompt(3, 2)], got)
        assert got.usage.reused >= len(tokens) - 1, "what the other one computed is not computed again"
        session.close()
        assert here.sessions() == ["mine"]
        assert here.find_session("theirs") is None


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

    def entries(self) -> Iterator[tuple[str, Entry]]:
        for pair in super().entries():
            if self.dice.random() < 0.02:
                raise OSError("the disk is on fire")
            yield pair

    def session_names(self) -> Iterable[str]:
        self._maybe()
        return super().session_names()

    def read_session(self, name: str) -> SavedSession | None:
        self._maybe()
        return super().read_session(name)

    def find(self, tokens: Sequence[int], salt: str = "") -> list[tuple[str, Entry]]:
        self._maybe()
        return super().find(tokens, salt)

    def session_generation(self, name: str) -> int | None:
        self._maybe()
        return super().session_generation(name)

    def write_session(self, session: SavedSession) -> bool:
        self._maybe()
        return super().write_session(session)


Answer = TypeVar("Answer")


def insisting(question: Callable[[], Answer]) -> Answer:
    """Ask until the store can be reached."""
    while True:
        try:
            return question()
        except StoreUnreachable:
            continue


def test_a_session_that_a_store_fails_to_close_says_so_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lmstate.Engine(ours("llama"), store=tmp_path) as engine:
        session = engine.session("one")
        session.send(prompt(20, 1), max_new_tokens=2).result(600)
        with monkeypatch.context() as patch:
            patch.setattr(FolderTier, "write_session", lambda *_: 1 / 0)
            with pytest.raises(StoreUnreachable, match="nothing was changed"):
                session.close()
            assert engine.sessions() == ["one"] and engine.find_session("one") is session
        session.send([5], max_new_tokens=2).result(600)
        session.close()
        assert engine.sessions() == []
        assert engine.find_session("one") is None
        assert engine.session("one").tokens == []
        engine.session("one").send([5, 6], max_new_tokens=2).result(600)
        assert engine.sessions() == ["one"]


@pytest.mark.parametrize("kind", KINDS)
def test_a_tier_that_fails_at_any_call_changes_no_answer(kind: str, tmp_path: Path) -> None:
    model = ours(KINDS[kind])
    dice = random.Random(kind)
    texts, names = [prompt(30, 1)], list[str]()
    for _ in range(4):
        tier = Failing(tmp_path, f"{kind}", 10**9)
        memory = max(150_000, RowCost.of(model, model.new_state)(94))  # of the longest request
        with lmstate.Engine(model, rows=2, memory=memory, store=tier) as engine:
            for _ in range(6):
                base = dice.choice(texts)
                ids = [*base[: dice.randint(1, len(base))], *prompt(dice.randint(1, 9), dice.randint(0, 10**6))][:90]
                got = ask(engine, ids, 4)
                check(model, ids, got)
                texts.append([*ids, *got.tokens[0]])
                assert engine.call(lambda _: engine._reuse.prefixes.nbytes == engine._reuse.prefixes.counted()).result()
            name = f"session {len(texts)}"
            names.append(name)
            insisting(lambda name=name: engine.session(name)).send([5, 6], max_new_tokens=2).result(600)
            assert set(insisting(engine.sessions)) == set(names), "also those of the engines before"
            assert insisting(lambda: engine.find_session(f"{name}?")) is None  # noqa: B023


class Hanging(FolderTier):
    """A folder that answers when `goes_on` is set."""

    name = "hanging"

    def __init__(self, path: Path, namespace: str, limit: int) -> None:
        self.goes_on = Event()
        super().__init__(path, namespace, limit)

    def read(self, key: str) -> Layers:
        self.goes_on.wait()
        raise OSError("too late")

    def write(self, entry: Entry, key: str, layers: Layers, above: Sequence[str]) -> None:
        if self.hangs:
            self.goes_on.wait()
        super().write(entry, key, layers, above)

    def session_names(self) -> Iterable[str]:
        self.asked += 1
        self.goes_on.wait()
        raise OSError("too late")

    asked = 0
    hangs = False


def test_a_tier_that_hangs_holds_up_nobody_for_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    model = ours("llama")
    ids = prompt(40, 1)
    with lmstate.Engine(model, store=FolderTier(tmp_path, "one", 10**9)) as engine:
        ask(engine, ids)
    tier = Hanging(tmp_path, "one", 10**9)
    try:
        with lmstate.Engine(model, store=tier) as engine:
            slow = engine.submit([*ids, 5], max_new_tokens=3)
            other = engine.submit([7, 8, 9], max_new_tokens=3)
            assert len(other.result(600).tokens[0]) == 3
            assert slow.result(600).tokens == [alone(model, [*ids, 5], 3)[0]]
            for _ in range(3):
                with pytest.raises(StoreUnreachable, match="in time"):
                    engine.sessions()
            assert tier.asked == 1, "a tier that hangs is not asked again at once"
            tier.hangs = True
            assert ask(engine, prompt(30, 3)).usage.generated == 6
            assert not tier.goes_on.is_set()
            tier.goes_on.set()
    finally:
        tier.goes_on.set()


def test_what_is_no_size_of_a_store_is_refused_with_and_without_one(tmp_path: Path) -> None:
    for store in (None, tmp_path):
        with pytest.raises(ValueError, match="'x' is not a size"):
            lmstate.Engine(ours("llama"), store=store, store_bytes="x")
