"""Stores that are slow, away or full: nothing that was confirmed is lost, and what is unknown is said to be unknown."""

from __future__ import annotations

import json
import os
import sqlite3
import zlib
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from threading import Event

import pytest

import lmstate
from lmstate.engine import Completion, SessionBusy, SessionMoved, StoreUnreachable
from lmstate.engine.prefix.digests import packed
from lmstate.engine.session_record import KeyedAnswer, Record
from lmstate.engine.tiers import Tier, fetch, records
from lmstate.engine.tiers.blobs import RedisBlobs
from lmstate.engine.tiers.folder import OLD_SESSIONS, FolderTier
from lmstate.engine.tiers.shared import SharedTier
from tests.engine.faults import READS, WRITES, Fault, fail_once, retry_at_once
from tests.engine.test_shared_tiers import Memory
from tests.waiting import GUARD, wait_until
from tests.zoo import ours

Tiers = Callable[[], Tier]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    retry_at_once(monkeypatch)


def turn(engine: lmstate.Engine, name: str, *tokens: int) -> Completion:
    return engine.session(name).send(list(tokens), max_new_tokens=2, ignore_eos=True).result(GUARD)


def stored(tier: Tiers, name: str) -> list[int]:
    """The tokens of a session as another process finds them."""
    with lmstate.Engine(ours("llama"), store=tier()) as other:
        return other.session(name).tokens


@pytest.mark.parametrize("hangs", [False, True])
def test_a_session_that_cannot_be_looked_up_is_unknown_and_stays_what_it_is(
    hangs: bool, tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lmstate.Engine(ours("llama"), store=tier()) as engine:
        turn(engine, "one", 5, 6)
        kept = engine.session("one").tokens
    store = tier()
    with lmstate.Engine(ours("llama"), store=store) as engine:
        with monkeypatch.context() as patch, Fault(store, *READS, hangs=hangs):
            patch.setattr(fetch, "ASKING_SECONDS", 0.02 if hangs else GUARD)
            for ask in (
                lambda: engine.find_session("one"),
                lambda: engine.session("one"),
                lambda: engine.submit([1, 2], session="one"),
                lambda: engine.new_session("one", Record()),
                engine.sessions,
            ):
                with pytest.raises(StoreUnreachable):
                    ask()
        with pytest.raises(ValueError, match="already"):
            engine.new_session("one", Record())
        assert engine.sessions() == ["one"]
        assert engine.session("one").tokens == kept
    assert stored(tier, "one") == kept


@pytest.mark.parametrize("how", ["fails", "hangs"])
def test_a_turn_that_is_not_stored_is_said_to_be_and_is_stored_later(
    how: str, tier: Tiers, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = tier()
    with lmstate.Engine(ours("llama"), store=store) as engine:
        assert turn(engine, "one", 5).stored is True
        with monkeypatch.context() as patch, Fault(store, *WRITES, hangs=how == "hangs"):
            patch.setattr(records, "COMMIT_SECONDS", 0.02 if how == "hangs" else GUARD)
            for token in (6, 7):
                assert turn(engine, "one", token).stored is False
            assert (engine.unstored, engine.stats()["sessions_unstored"]) == (1, 1)
            kept = engine.session("one").tokens
            assert len(kept) == 9, "the conversation goes on meanwhile"
        wait_until(lambda: not engine.unstored)
        assert stored(tier, "one") == kept
        assert turn(engine, "one", 8).stored is True
        kept = engine.session("one").tokens
    assert stored(tier, "one") == kept


def test_a_turn_that_was_not_stored_is_stored_at_close(tier: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "FIRST_RETRY", GUARD)
    store = tier()
    with lmstate.Engine(ours("llama"), store=store) as engine:
        turn(engine, "one", 5)
        with Fault(store, *WRITES):
            assert turn(engine, "one", 6).stored is False
            kept = engine.session("one").tokens
    assert stored(tier, "one") == kept


def test_no_turn_waits_for_its_record_where_that_was_asked_for(tier: Tiers) -> None:
    store = tier()
    with lmstate.Engine(ours("llama"), store=store, durable="none") as engine, Fault(store, *WRITES, hangs=True):
        assert [turn(engine, "one", token).stored for token in (5, 6)] == [None, None]
        kept = engine.session("one").tokens
    assert stored(tier, "one") == kept


def test_a_change_that_cannot_be_stored_changes_nothing(tier: Tiers) -> None:
    store = tier()
    with lmstate.Engine(ours("llama"), store=store) as engine:
        turn(engine, "one", 5)
        session = engine.session("one")
        kept = session.tokens
        changes = (session.undo, session.mark, lambda: session.rewind(1), lambda: session.fork("two"), session.close)
        with Fault(store, *WRITES):
            for change in changes:
                with pytest.raises(StoreUnreachable, match="nothing was changed"):
                    change()
            assert (session.tokens, engine.sessions()) == (kept, ["one"])
        assert engine.find_session("two") is None
        session.undo()
    assert stored(tier, "one") == []


@pytest.mark.parametrize("late", [False, True])
def test_a_file_is_loaded_although_each_call_of_the_store_fails_once(late: bool, tier: Tiers, tmp_path: Path) -> None:
    with lmstate.Engine(ours("llama")) as engine:
        turn(engine, "one", 5)
        engine.session("one").save(path := tmp_path / "file")
        kept = engine.session("one").tokens
    store = tier()
    with lmstate.Engine(ours("llama"), store=store) as engine:
        unfailed = fail_once(store, "read_session", "write_session", late=late)
        session = engine.load_session("one", path)
        assert not unfailed and (session.tokens, session.generation, engine.unstored) == (kept, 1, 0)
        with pytest.raises(ValueError, match="already"):
            engine.load_session("one", path)
        session.undo()
    assert stored(tier, "one") == []


def test_a_file_that_cannot_be_loaded_for_longer_leaves_nothing(
    tier: Tiers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with lmstate.Engine(ours("llama")) as engine:
        turn(engine, "one", 5)
        engine.session("one").save(path := tmp_path / "file")
        kept = engine.session("one").tokens
    store = tier()
    with lmstate.Engine(ours("llama"), store=store) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(records, "COMMIT_SECONDS", 0.1)
            for calls in (READS, WRITES):
                with Fault(store, *calls), pytest.raises(StoreUnreachable):
                    engine.load_session("one", path)
        assert engine.sessions() == []
        assert engine.load_session("one", path).tokens == kept
    assert stored(tier, "one") == kept


def test_of_two_changes_the_first_counts_and_the_other_is_refused(tier: Tiers, monkeypatch: pytest.MonkeyPatch) -> None:
    with lmstate.Engine(ours("llama"), store=tier()) as here, lmstate.Engine(ours("llama"), store=tier()) as there:
        turn(here, "one", 5)
        session = here.session("one")
        turn(there, "one", 6)
        with monkeypatch.context() as patch:
            patch.setattr(lmstate.Engine, "refresh", lambda *_: None)  # as if the other came after it had looked
            before = session.tokens
            for change in (session.undo, session.mark, lambda: session.rewind(1), session.close):
                with pytest.raises(SessionMoved, match="generation 2") as moved:
                    change()
                assert (moved.value.generation, session.tokens) == (2, before)
            with pytest.raises(SessionMoved, match="generation 2"):
                session.send([7], max_new_tokens=2).result(GUARD)
            assert session.tokens == before
        session.undo()
        assert session.tokens == before, "the turn of the other was adopted, then undone"
        assert here.sessions() == ["one"]
        there.session("one").close()
        assert here.find_session("one") is None
        here.new_session("two", Record())
        with pytest.raises(ValueError, match="already"):
            there.new_session("two", Record())
        with pytest.raises(ValueError, match="already"):
            there.session("three").fork("two")


def test_a_store_that_went_back_is_brought_forward() -> None:
    blobs = Memory()
    stores = [SharedTier(blobs, "one") for _ in range(2)]
    with (
        lmstate.Engine(ours("llama"), store=stores[0]) as here,
        lmstate.Engine(ours("llama"), store=stores[1]) as there,
    ):
        turn(here, "one", 5)
        before = dict(blobs.records)
        turn(there, "one", 6)
        blobs.records.update(before)  # a replica that has not heard of the last turn takes over
        assert turn(there, "one", 7).stored is True
        kept = there.session("one").tokens
        assert kept[::3] == [5, 6, 7]
    assert stored(lambda: SharedTier(blobs, "one"), "one") == kept


# ---- full stores


def test_a_full_folder_takes_the_rest_once_there_is_room(tmp_path: Path) -> None:
    store = FolderTier(tmp_path, "one", 10**9)
    with lmstate.Engine(ours("llama"), store=store) as engine:
        assert turn(engine, "one", 5).stored is True
        connection = store._records._connection
        (pages,) = connection.execute("pragma page_count").fetchone()
        connection.execute(f"pragma max_page_count = {pages}")
        long = Record(messages=[{"role": "user", "content": os.urandom(20_000).hex()}])
        with pytest.raises(StoreUnreachable):
            engine.new_session("two", long)
        assert engine.sessions() == ["one"]
        connection.execute(f"pragma max_page_count = {2**30}")
        engine.new_session("two", long)
        assert engine.sessions() == ["one", "two"]


def test_a_full_and_a_paused_redis_lose_no_turn(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    server = pytest.importorskip("redis").Redis.from_url(redis_url)

    def tier() -> Tier:
        return SharedTier(RedisBlobs(redis_url), "one")

    with lmstate.Engine(ours("llama"), store=tier()) as engine:
        assert turn(engine, "one", 5).stored is True
        server.config_set("maxmemory", 1)
        assert turn(engine, "one", 6).stored is False
        server.config_set("maxmemory", 0)
        wait_until(lambda: not engine.unstored)
        kept = engine.session("one").tokens
    with lmstate.Engine(ours("llama"), store=tier()) as engine, monkeypatch.context() as patch:
        patch.setattr(fetch, "ASKING_SECONDS", 0.05)
        server.execute_command("CLIENT", "PAUSE", 300, "ALL")
        with pytest.raises(StoreUnreachable, match="in time"):
            engine.session("one")
        patch.setattr(fetch, "ASKING_SECONDS", GUARD)
        assert engine.session("one").tokens == kept


# ---- folders of older versions, and damaged ones


def test_the_sessions_of_an_older_folder_are_taken(tmp_path: Path) -> None:
    record = Record([5, 6, 7])
    with closing(sqlite3.connect(tmp_path / "index.sqlite3")) as index, index:
        index.execute(f"create table {OLD_SESSIONS}")
        row = ("one", "old", zlib.compress(packed(record.tokens)), record.to_json())
        index.execute("insert into sessions values (?, ?, ?, ?)", row)
    for _ in range(2):
        with lmstate.Engine(ours("llama"), store=FolderTier(tmp_path, "one", 10**9)) as engine:
            assert engine.sessions() == ["old"]
            assert engine.session("old").tokens[:3] == record.tokens
            assert turn(engine, "old", 8).stored is True


@pytest.mark.parametrize("data", [b"no such thing", zlib.compress(b"no such thing"), zlib.compress(b"\0" * 9)])
def test_a_damaged_record_is_set_aside_before_another_is_written(data: bytes, tmp_path: Path) -> None:
    with lmstate.Engine(ours("llama"), store=FolderTier(tmp_path, "one", 10**9)) as engine:
        turn(engine, "one", 5)
    with closing(sqlite3.connect(tmp_path / "records.sqlite3")) as records, records:
        records.execute("update records set data = ?", (data,))
    with lmstate.Engine(ours("llama"), store=FolderTier(tmp_path, "one", 10**9)) as engine:
        assert engine.find_session("one") is None
        assert turn(engine, "one", 6).stored is True
        assert engine.session("one").generation == 2
    (file,) = (tmp_path / "damaged").glob("record-*.json")
    told = json.loads(file.read_text())
    assert (told["name"], bytes.fromhex(told["data"])) == ("one", data)
    assert stored(lambda: FolderTier(tmp_path, "one", 10**9), "one")[0] == 6


# ---- turns that are asked for again


def test_a_turn_of_a_known_key_is_told_again_and_not_added(tier: Tiers) -> None:
    def send(engine: lmstate.Engine, key: str | None, *tokens: int) -> Completion:
        session = engine.session("one")
        return session.send(list(tokens), max_new_tokens=3, ignore_eos=True, idempotency_key=key).result(GUARD)

    with lmstate.Engine(ours("llama"), store=tier()) as engine:
        first = send(engine, "a", 5, 6)
        kept = engine.session("one").tokens
        assert kept == [5, 6, *first.tokens[0]]
        for repeat in range(2):
            again = send(engine, "a", 5, 6)
            assert (again.tokens, again.finished, again.stored) == (first.tokens, first.finished, True), repeat
        asked = engine.session("one").send([5, 6], idempotency_key="a")
        assert asked.prompt == [5, 6] and [piece.tokens for piece in asked] == first.tokens
        assert engine.session("one").tokens == kept
    with lmstate.Engine(ours("llama"), store=tier()) as engine, lmstate.Engine(ours("llama"), store=tier()) as other:
        assert send(engine, "a", 5, 6).tokens == first.tokens
        second = send(other, "b", 7)
        assert send(engine, "b", 7).tokens == second.tokens, "another engine answered it"
        assert engine.session("one").tokens == [*kept, 7, *second.tokens[0]]
        engine.session("one").undo()
        assert send(engine, "b", 7).tokens == second.tokens, "an undone turn is made again"
        assert engine.session("one").generation == 4
        send(engine, None, 8)
        assert len(other.session("one").tokens) == len(kept) + 4 + 4
    with lmstate.Engine(ours("llama")) as engine, pytest.raises(ValueError, match="turns of a session"):
        engine.submit([5], idempotency_key="a")


def test_a_request_of_the_key_that_is_being_answered_is_that_request_and_a_cancelled_one_is_none() -> None:
    with lmstate.Engine(ours("llama")) as engine:
        session, holding = engine.session("one"), Event()
        engine.call(lambda _: holding.wait(GUARD))
        try:
            first = session.send([5], max_new_tokens=3, ignore_eos=True, idempotency_key="a")
            assert session.send([5], max_new_tokens=3, ignore_eos=True, idempotency_key="a") is first
            with pytest.raises(SessionBusy):
                session.send([5], idempotency_key="b")
        finally:
            holding.set()
        kept = [5, *first.result(GUARD).tokens[0]]
        assert session.tokens == kept
        cut = session.send([6], max_new_tokens=50, ignore_eos=True, idempotency_key="c")
        next(iter(cut))
        cut.cancel()
        if cut.result(GUARD).finished == ["cancelled"]:
            assert session.tokens == kept
            whole = session.send([6], max_new_tokens=50, ignore_eos=True, idempotency_key="c").result(GUARD)
            assert whole.finished == ["length"]


def test_a_hostile_answer_makes_a_record_no_session() -> None:
    record = Record([5, 6, 7], answers=[KeyedAnswer("a", 3, 1, [6, 7], "x", "length")])
    told = json.loads(record.to_json())
    assert Record.from_json([5, 6, 7], record.to_json()) == record
    for change in ({"stop": 4}, {"tokens": [-1]}, {"tokens": 5}, {"finished": "so"}, {"key": None}, {"more": 1}):
        told["answers"] = [{**vars(record.answers[0]), **change}]
        with pytest.raises(ValueError, match="answers are told by"):
            Record.from_json([5, 6, 7], json.dumps(told))
