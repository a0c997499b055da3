"""Stores that others can look into, write to or damage: nothing of them is believed, and little of them is seen."""

from __future__ import annotations

import hashlib
import os
import sqlite3
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

import lmstate
from lmstate.engine.tiers import Tier
from lmstate.engine.tiers.folder import FolderTier
from lmstate.engine.tiers.seal import KEY, SEAL_BYTES, SealBroken, SealedBlobs, seal
from lmstate.engine.tiers.shared import SharedTier
from lmstate.files.atomic import STALE_SECONDS
from tests.engine.test_batching import prompt
from tests.engine.test_prefixes import ask, check
from tests.engine.test_shared_tiers import Memory
from tests.waiting import wait_until
from tests.zoo import ours

Tiers = Callable[[], Tier]


@pytest.fixture
def umask() -> Iterator[None]:
    before = os.umask(0)
    yield
    os.umask(before)


@pytest.mark.skipif(os.name != "posix", reason="there are no modes")
def test_only_its_owner_reads_a_folder(tmp_path: Path, umask: None) -> None:
    store = tmp_path / "store"
    with lmstate.Engine(ours("llama"), store=store) as engine:
        ask(engine, prompt(60, 1))
        engine.session("one").send([5, 6], max_new_tokens=2).result(600)
    found = [store, *store.rglob("*")]
    assert len([path for path in found if path.is_file()]) > 3
    for path in found:
        mode = stat.S_IMODE(path.stat().st_mode)
        assert mode == (0o700 if path.is_dir() else 0o600), (path, oct(mode))
    for path in store.glob("*.sqlite3"):
        path.chmod(0o644)  # of an older version
    with lmstate.Engine(ours("llama"), store=store):
        assert {stat.S_IMODE(path.stat().st_mode) for path in store.glob("*.sqlite3")} == {0o600}


def test_what_killed_writers_left_is_removed_at_the_start(tmp_path: Path) -> None:
    with lmstate.Engine(ours("llama"), store=tmp_path) as engine:
        ask(engine, prompt(60, 1))
        assert engine._tier.flush(600)
    kept = {path for path in (tmp_path / "entries").rglob("*") if path.is_file()}
    folder = next(iter(kept)).parent
    ended = 2**22 + 1  # no process has this number
    left = [folder / ("a" * 64), folder / f".{'b' * 64}.{ended}-0123abcd.part"]
    young = [folder / ("c" * 64), folder / f".{'d' * 64}.{ended}-0123abcd.part"]
    for file in (*left, *young):
        file.write_bytes(b"x")
    for file in (*left, *kept):
        os.utime(file, (time.time() - 2 * STALE_SECONDS,) * 2)
    with lmstate.Engine(ours("llama"), store=tmp_path) as engine:
        wait_until(lambda: not any(file.exists() for file in left))
        assert engine.explain([*prompt(60, 1), 5]).reused > 0
    assert all(file.exists() for file in (*kept, *young))


@pytest.mark.parametrize("how", ["cut short", "cut at its beginning", "overwritten", "no database", "empty"])
def test_a_damaged_index_is_set_aside_and_sessions_stay(how: str, tmp_path: Path) -> None:
    model = ours("llama")
    with lmstate.Engine(model, store=tmp_path) as engine:
        for number in range(30):
            ask(engine, prompt(40, number), 1)
        engine.session("one").send([5, 6], max_new_tokens=2, ignore_eos=True).result(600)
        tokens = engine.session("one").tokens
    index = tmp_path / "index.sqlite3"
    data = index.read_bytes()
    assert len(data) > 20_000
    changed = {
        "cut short": data[: len(data) * 2 // 3],
        "cut at its beginning": data[:1000],
        "overwritten": data[:8192] + b"x" * 8192 + data[16384:],
        "no database": b"no database" * 1000,
        "empty": b"",
    }
    index.write_bytes(changed[how])
    for restart in range(2):
        with lmstate.Engine(model, store=tmp_path) as engine:
            assert engine.session("one").tokens == tokens
            got = ask(engine, prompt(40, 3))
            check(model, prompt(40, 3), got)
            assert (got.usage.reused > 30) == (restart == 1)
            assert engine.stats()["folder_failed"] == 0
    aside = list((tmp_path / "damaged").glob("*-index.sqlite3"))
    assert [path.read_bytes() for path in aside] == ([] if how == "empty" else [changed[how]])


def test_an_index_of_something_else_is_not_touched(tmp_path: Path) -> None:
    with closing(sqlite3.connect(tmp_path / "index.sqlite3")) as other, other:
        other.execute("create table recipes (name text)")
    with pytest.raises(OSError, match="other tables"):
        lmstate.Engine(ours("llama"), store=tmp_path)
    assert not (tmp_path / "damaged").exists()


# ---- sealed stores


def test_a_seal_is_over_each_part() -> None:
    seals = [seal(b"k", b"ab", b"c"), seal(b"k", b"a", b"bc"), seal(b"k", b"abc"), seal(b"l", b"ab", b"c")]
    assert len(set(seals)) == 4 and seal(b"k", b"ab", bytearray(b"c")) == seals[0]


def test_a_sealed_store_keeps_what_processes_of_its_key_wrote(tier: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = ours("llama"), prompt(100, 1)

    def look() -> tuple[int, list[int]]:
        with lmstate.Engine(model, store=tier()) as engine:
            session = engine.find_session("one")
            return engine.explain([*ids, 5]).reused, [] if session is None else session.tokens

    monkeypatch.setenv(KEY, "secret")
    with lmstate.Engine(model, store=tier()) as engine:
        ask(engine, ids)
        engine.session("one").send([5, 6], max_new_tokens=2, ignore_eos=True).result(600)
        tokens = engine.session("one").tokens
    reused, kept = look()
    assert reused > 90 and kept == tokens
    for other in ("another", None):
        if other is None:
            monkeypatch.delenv(KEY)
        else:
            monkeypatch.setenv(KEY, other)
        assert look() == (0, [])
        with lmstate.Engine(model, store=tier()) as engine:
            assert engine.sessions() == []
    monkeypatch.setenv(KEY, "secret")
    assert look() == (reused, tokens)


def changed(data: bytes, at: int) -> bytes:
    return bytes([*data[:at], data[at] ^ 1, *data[at + 1 :]])


@pytest.mark.parametrize("kind", ["entries", "index", "prefix", "records"])
def test_of_a_sealed_store_nothing_that_was_changed_is_parsed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    model, ids, blobs = ours("llama"), prompt(100, 1), Memory()
    with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
        ask(engine, ids)
        engine.session("one").send([5, 6], max_new_tokens=2).result(600)
        engine.session("two").send([7], max_new_tokens=2).result(600)
    before = dict(blobs.blobs), dict(blobs.records)
    others = list(before[0].values())
    changes: list[Callable[[bytes], bytes]] = [
        *(lambda data, at=at: changed(data, at % len(data)) for at in (0, 31, 32, -1)),  # type: ignore[misc]
        lambda data: data[:40],
        lambda data: b"x",
        lambda data: next(other for other in others if other != data),  # sealed, under another name
    ]
    for change in changes:
        blobs.blobs, blobs.records = dict(before[0]), dict(before[1])
        sealed = SealedBlobs(blobs, b"secret")
        for name in [name for name in blobs.blobs if f"/{kind}/" in name]:
            assert sealed.get(name, 10**9) == before[0][name][SEAL_BYTES:]
            blobs.blobs[name] = change(blobs.blobs[name])
            assert sealed.get(name, 10**9) is None
        for name in blobs.records if kind == "records" else ():
            blobs.records[name] = (blobs.records[name][0], change(blobs.records[name][1]))
            with pytest.raises(SealBroken):
                sealed.read_record(name, 10**9)
        with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
            got = ask(engine, ids)
            check(model, ids, got)
            assert (got.usage.reused > 90) == (kind in ("prefix", "records")), "prefixes are looked up at a miss alone"
            assert (engine.find_session("one") is None) == (kind == "records")
            assert engine.sessions() == ([] if kind == "records" else ["one", "two"])


def test_a_sealed_folder_refuses_what_was_changed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(KEY, "secret")
    model, ids = ours("llama"), prompt(60, 1)
    with lmstate.Engine(model, store=FolderTier(tmp_path, "one", 10**9)) as engine:
        ask(engine, ids)
        for name in ("one", "two"):
            engine.session(name).send([5, 6], max_new_tokens=2).result(600)
    with closing(sqlite3.connect(tmp_path / "records.sqlite3")) as records, records:
        records.execute("update records set data = data || x'20' where name = 'one'")
    with closing(sqlite3.connect(tmp_path / "index.sqlite3")) as index, index:  # the checksum that anybody can make
        for key, namespace in index.execute("select key, namespace from entries").fetchall():
            name = hashlib.sha256(f"{namespace}|{key}".encode()).hexdigest()
            data = (tmp_path / "entries" / name[:2] / name).read_bytes()
            index.execute("update entries set checksum = ? where key = ?", (hashlib.sha256(data).hexdigest(), key))
    with lmstate.Engine(model, store=FolderTier(tmp_path, "one", 10**9)) as engine:
        assert engine.find_session("one") is None and engine.find_session("two") is not None
        got = ask(engine, ids)
        check(model, ids, got)
        assert got.usage.reused == 0 and engine.stats()["folder_quarantined"] > 1
