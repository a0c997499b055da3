"""Stores that machines share: a real Redis server, and obstore's stores in memory and in a folder."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

import lmstate
from lmstate.engine import SessionMoved
from lmstate.engine.tiers import Tier
from lmstate.engine.tiers.blobs import Blobs, ObjectBlobs, RedisBlobs
from lmstate.engine.tiers.folder import FolderTier
from lmstate.engine.tiers.shared import SharedTier
from tests.engine.test_batching import KINDS, prompt
from tests.engine.test_prefixes import ask, check
from tests.waiting import impatient
from tests.zoo import ours


def goes_on_elsewhere(blobs: Blobs) -> None:
    """One engine computes, another one, which knows only the store, goes on; and damage is told from what is whole."""
    model = ours("qwen3_next-dense")
    ids = prompt(60, 1)
    with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
        ask(engine, ids)
        session = engine.session("name")
        session.send(prompt(20, 2), max_new_tokens=3, ignore_eos=True).result(600)
        tokens = session.tokens
    with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
        got = ask(engine, [*ids, 4, 5])
        check(model, [*ids, 4, 5], got)
        assert got.usage.reused == len(ids)
        assert got.usage.reuse.tier == "shared"
        assert engine.session("name").tokens == tokens
        engine.session("name").close()
    with lmstate.Engine(model, store=SharedTier(blobs, "two")) as engine:
        assert ask(engine, [*ids, 4, 5]).usage.reused == 0
    for name in list(blobs.names("")):
        data = blobs.get(name, 2**30)
        assert data is not None and blobs.get(name, 3) == data[:3]
        if "/entries/" in name:
            blobs.put(name, data[:-1] + bytes([data[-1] ^ 1]))
    with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
        assert engine.sessions() == []
        got = ask(engine, [*ids, 6])
        check(model, [*ids, 6], got)
        assert got.usage.reused == 0


def test_redis_keeps_prefixes_and_sessions_for_others(redis_url: str) -> None:
    goes_on_elsewhere(RedisBlobs(redis_url))


def test_an_engine_opens_the_redis_server_that_a_url_names(redis_url: str) -> None:
    ids = prompt(50, 1)
    with lmstate.Engine(ours("llama"), store=redis_url) as engine:
        ask(engine, ids)
    with lmstate.Engine(ours("llama"), store=redis_url) as engine:
        assert ask(engine, [*ids, 3]).usage.reused == len(ids)


def test_object_stores_keep_prefixes_and_sessions_for_others(tmp_path: Path) -> None:
    store = pytest.importorskip("obstore.store")
    goes_on_elsewhere(ObjectBlobs(store.MemoryStore()))
    goes_on_elsewhere(ObjectBlobs(store.LocalStore(tmp_path)))


class Memory:
    """Blobs in a dictionary, which may hang."""

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.records: dict[str, tuple[int, bytes]] = {}  # (generation, data) by name
        self.lock = threading.Lock()
        self.asked: list[str] = []
        self.hang = threading.Event()
        self.hang.set()

    def get(self, name: str, most: int) -> bytes | None:
        self.asked.append(name)
        self.hang.wait(600)
        blob = self.blobs.get(name)
        return None if blob is None else blob[:most]

    def indices(self) -> int:
        return sum("/index/" in name for name in self.asked)

    def put(self, name: str, data: bytes) -> None:
        self.blobs[name] = data

    def delete(self, name: str) -> None:
        self.blobs.pop(name, None)

    def names(self, prefix: str) -> list[str]:
        return [name for name in list(self.blobs) if name.startswith(prefix)]

    def read_record(self, name: str, most: int) -> tuple[int, bytes] | None:
        self.asked.append(name)
        self.hang.wait(600)
        with self.lock:
            found = self.records.get(name)
        return None if found is None else (found[0], found[1][:most])

    def commit_record(self, name: str, data: bytes, generation: int) -> bool:
        self.hang.wait(600)
        with self.lock:
            if name in self.records and self.records[name][0] != generation - 1:
                return False
            self.records[name] = generation, data
            return True

    def record_names(self, prefix: str) -> list[str]:
        with self.lock:
            return [name for name, (_, data) in self.records.items() if data and name.startswith(prefix)]


def test_an_engine_takes_blobs_and_what_makes_a_tier() -> None:
    model, ids, blobs = ours("llama"), prompt(50, 1), Memory()
    with lmstate.Engine(model, store=blobs) as engine:
        ask(engine, ids)
        namespace = engine.namespace
    with lmstate.Engine(model, store=lambda name: SharedTier(blobs, name)) as engine:
        assert ask(engine, [*ids, 3]).usage.reused == len(ids) and namespace == engine.namespace
    with lmstate.Engine(ours("mistral"), store=blobs) as engine:
        assert ask(engine, [*ids, 3]).usage.reused == 0
    for store in (lambda name: blobs, object(), 3, ""):
        with pytest.raises(ValueError, match="store="):
            lmstate.Engine(model, store=store)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_what_another_engine_writes_while_this_one_runs_is_found_at_a_miss(kind: str) -> None:
    model, blobs = ours(KINDS[kind]), Memory()
    with (
        lmstate.Engine(model, store=SharedTier(blobs, "one")) as here,
        lmstate.Engine(model, store=SharedTier(blobs, "one")) as there,
    ):
        ids = prompt(128, 1) * 2
        first = ask(there, ids)
        longer = [*ids, *first.tokens[0], *prompt(100, 2)]
        ask(there, longer)
        assert there._tier.flush(600)
        got = ask(here, [*longer, 5, 6])
        check(model, [*longer, 5, 6], got)
        assert got.usage.reused == len(longer)
        assert got.usage.reuse.tier == "shared"
        assert 0 < blobs.indices() < 20
        other = ask(here, [*ids, 7, 8, 9])
        check(model, [*ids, 7, 8, 9], other)
        assert other.usage.reused >= len(ids) - 1
        hits = blobs.indices()
        ask(here, [*longer, 5, 6, 7])  # known here: nobody is asked
        assert blobs.indices() == hits


def test_a_session_of_another_machine_is_seen_when_it_is_asked_for() -> None:
    model, blobs = ours("qwen3_next-dense"), Memory()
    with (
        lmstate.Engine(model, store=SharedTier(blobs, "one")) as here,
        lmstate.Engine(model, store=SharedTier(blobs, "one")) as there,
    ):
        there.session("theirs").send(prompt(70, 1), max_new_tokens=5, ignore_eos=True).result(600)
        assert there._tier.flush(600)
        assert here.sessions() == ["theirs"]
        read = len(blobs.asked)
        assert here.sessions() == ["theirs"]
        assert len(blobs.asked) == read, "a name that is known is read once"
        session = here.session("theirs")
        assert session.tokens == there.session("theirs").tokens
        assert session.send([5], max_new_tokens=1, ignore_eos=True).result(600).usage.reused >= 70
        there.session("theirs").close()
        assert there.sessions() == []
        with pytest.raises(SessionMoved, match="was closed in another process"):
            session.send([6], max_new_tokens=1)
        assert here.find_session("theirs") is None


def test_a_store_that_hangs_at_a_lookup_is_left_alone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    impatient(monkeypatch)
    model, blobs = ours("llama"), Memory()
    tier = SharedTier(blobs, "one")
    engine = lmstate.Engine(model, store=tier)
    blobs.hang.clear()
    try:
        for seed in range(3):
            ids = prompt(100, seed)
            check(model, ids, ask(engine, ids))
        assert len(blobs.asked) <= 3  # the one lookup, and the thread that writes
    finally:
        blobs.hang.set()
        engine.close()


def test_hostile_pointers_and_indices_change_no_answer() -> None:
    model, blobs = ours("qwen3_next-dense"), Memory()
    ids = prompt(128, 1) * 2
    with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
        ask(engine, ids)
    for name in list(blobs.blobs):
        if "/prefix/" in name:
            blobs.blobs[name] = [b"[[1]]", b"{", b'["../x"]', b"7", b"\xff"][len(name) % 5]
        if "/index/" in name:
            blobs.blobs[name] = blobs.blobs[name][:-4] + b"abcd"
    with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
        check(model, ids, ask(engine, ids))


def test_of_what_is_larger_than_anything_that_is_written_only_so_much_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    store = pytest.importorskip("obstore.store")
    model, ids, read = ours("llama"), prompt(100, 1), []
    blobs = ObjectBlobs(store.LocalStore(tmp_path))
    with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
        ask(engine, ids)
    for path in tmp_path.rglob("*/*"):
        if path.is_file() and path.parent.name in ("entries", "prefix", "sessions"):
            with path.open("r+b") as file:
                file.truncate(2**40)  # without taking a disk
    get = ObjectBlobs.get
    monkeypatch.setattr("lmstate.engine.tiers.shared.MOST_TOLD", 2**20)
    monkeypatch.setattr(ObjectBlobs, "get", lambda *call: read.append(get(*call)) or read[-1])
    with lmstate.Engine(model, memory="64MiB", store=SharedTier(blobs, "one")) as engine:
        got = ask(engine, [*ids, 4])
        check(model, [*ids, 4], got)
        assert got.usage.reused == 0 and engine.stats()["shared_failed"] >= 1
    assert max(len(blob) for blob in read if blob) == 2**26 + 1


@pytest.mark.parametrize("kind", ["folder", "shared"])
def test_what_has_no_room_here_stays_for_others(kind: str, tmp_path: Path) -> None:
    model, ids, blobs = ours("llama"), prompt(100, 1), Memory()

    def tier() -> Tier:
        return FolderTier(tmp_path, "one", 10**9) if kind == "folder" else SharedTier(blobs, "one")

    with lmstate.Engine(model, store=tier()) as engine:
        ask(engine, ids, 1)
    small = tier()
    with lmstate.Engine(model, store=small) as engine:
        small.most_read = 1000
        small.put = lambda *_: None  # type: ignore[method-assign]
        got = ask(engine, [*ids, 4])
        check(model, [*ids, 4], got)
        assert got.usage.reused == 0 and small.counts["failed"] >= 1 and not small.counts["quarantined"]
    with lmstate.Engine(model, store=tier()) as engine:
        assert ask(engine, [*ids, 4]).usage.reused == len(ids)


def test_a_store_that_is_not_there_is_as_good_as_none() -> None:
    pytest.importorskip("redis")
    model = ours("llama")
    with lmstate.Engine(model, store="redis://127.0.0.1:1/0") as engine:
        got = ask(engine, prompt(20, 1))
        check(model, prompt(20, 1), got)
        assert engine.stats()["shared_failed"] > 0
