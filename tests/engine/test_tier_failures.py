"""Tiers that fail once, hang for a while, or hold something hostile: what was computed is found again all the same."""

from __future__ import annotations

import errno
import os
import re
import sqlite3
from array import array
from collections.abc import Sequence
from pathlib import Path
from threading import Event, Lock, Thread

import pytest
import torch

import lmstate
from lmstate.engine import EngineClosed, reuse
from lmstate.engine.prefix import PrefixStore
from lmstate.engine.prefix.parts import Layers, Split
from lmstate.engine.tiers import Entry, SavedSession, TierError, folder, tier
from lmstate.engine.tiers.folder import FolderTier
from lmstate.engine.tiers.shared import SharedTier
from tests.engine.test_batching import KINDS, prompt
from tests.engine.test_prefixes import ask, check
from tests.engine.test_shared_tiers import Memory
from tests.waiting import impatient, patient, wait_until
from tests.zoo import ours


class Held(FolderTier):
    """A folder whose calls `holds` names wait until `goes_on` is set, and whose next `failing` writes fail."""

    def __init__(
        self, path: Path, namespace: str = "one", limit: int = 10**9, holds: str = "", failing: int = 0
    ) -> None:
        self.holds, self.failing, self.goes_on = holds, failing, Event()
        self.reached = Event()  # a call that waits
        self.records_go_on, self.reached_record = Event(), Event()
        self.records_go_on.set()
        self.at_once = self.most_at_once = 0
        self.counting = Lock()
        super().__init__(path, namespace, limit)

    def wait(self, call: str) -> None:
        if call == self.holds:
            with self.counting:
                self.at_once += 1
                self.most_at_once = max(self.at_once, self.most_at_once)
            self.reached.set()
            self.goes_on.wait()
            with self.counting:
                self.at_once -= 1

    def read(self, key: str) -> Layers:
        self.wait("read")
        return super().read(key)

    def write(self, entry: Entry, key: str, layers: Layers, above: Sequence[str]) -> None:
        self.wait("write")
        if self.failing:
            self.failing -= 1
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().write(entry, key, layers, above)

    def write_session(self, session: SavedSession) -> bool:
        if not self.records_go_on.is_set():
            self.reached_record.set()
            self.records_go_on.wait()
        return super().write_session(session)

    def find(self, tokens: Sequence[int], salt: str = "") -> list[tuple[str, Entry]]:
        found = super().find(tokens, salt)
        self.wait("find")
        return found


def entry(*tokens: int) -> Entry:
    return Entry("run", 0, 0, array("q", tokens))


def layers(numbers: int = 4) -> Layers:
    return ({"keys": torch.arange(numbers, dtype=torch.float32)},)


# ---- writing


@pytest.mark.parametrize("kind", ["attention", "hybrid"])
@pytest.mark.parametrize("how", ["not written", "let go"])
def test_what_a_tier_lacks_is_written_again_with_the_next_turn(how: str, kind: str, tmp_path: Path) -> None:
    model, text = ours(KINDS[kind]), prompt(60, 1)
    store = Held(tmp_path, failing=how == "not written")
    with lmstate.Engine(model, store=store) as engine:
        for turn in range(3):
            text = [*text, *ask(engine, text).tokens[0], *prompt(10, turn + 2)]
            assert store.flush(600)
            if how == "let go" and not turn:
                for key in list(store._keys):
                    store._forget(key)
        reused = engine.explain(text).reused
    with lmstate.Engine(model, store=FolderTier(tmp_path, "one", 10**9)) as engine:
        assert engine.explain(text).reused == reused > 60
        check(model, text, ask(engine, text))


def test_a_store_that_cannot_be_written_is_told_once_until_it_can_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = Held(tmp_path, failing=3)
    for number in range(5):
        store.put(entry(number), layers())
        assert store.flush(600)
    store.failing = 1
    store.put(entry(9), layers())
    assert store.flush(600)
    store.close()
    told = [record.getMessage() for record in caplog.records]
    assert len(told) == 2 and all("folder" in line and "No space left" in line for line in told), told
    assert all(isinstance(part, str) for record in caplog.records for part in record.args or ()), "no error, no blocks"
    assert (store.counts["failed"], store.counts["written"]) == (4, 2)


@pytest.mark.parametrize("call", ["get", "put", "delete", "names"])
def test_a_shared_store_that_cannot_be_used_is_told_at_the_start(call: str, caplog: pytest.LogCaptureFixture) -> None:
    def refused(*_: object) -> None:
        raise OSError("no such door\nand what its makers say")

    blobs = Memory()
    setattr(blobs, call, refused)
    with lmstate.Engine(ours("llama"), store=SharedTier(blobs, "one")):
        wait_until(lambda: caplog.records)
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert re.fullmatch(r"the store \(shared\) cannot be (used|read) for now, .*: no such door", record.getMessage())


def test_the_folder_of_a_url_is_made(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with lmstate.Engine(ours("llama"), store=f"file://{tmp_path}/a/b") as engine:
        ask(engine, prompt(20, 1))
        assert engine._tier is not None and engine._tier.flush(600)
    assert any(path.is_file() for path in (tmp_path / "a" / "b").rglob("*")) and not caplog.records
    assert not list((tmp_path / "a" / "b").rglob("access"))


def test_a_carry_that_was_not_written_is_written_again_with_what_is_kept_at_its_place(tmp_path: Path) -> None:
    model = ours(KINDS["hybrid"])
    state = model.new_state(rows=1)
    model([prompt(60, 1)], state)
    store = Held(tmp_path, failing=2)  # the run, and the carry
    prefixes = PrefixStore(Split.of(state), model.fingerprint, 10**9, store)
    for written in (0, 2):
        assert prefixes.put(state.snapshot(0))
        assert store.flush(600)
        assert len(store._keys) == written
    store.close()


def test_what_waits_to_be_written_is_not_queued_again(tmp_path: Path) -> None:
    store = Held(tmp_path, holds="write")
    keys = {store.put(entry(1, 2), layers()) for _ in range(3)}
    store.goes_on.set()
    store.close()
    assert len(keys) == 1
    assert store.counts["written"] == 1


def test_an_entry_larger_than_all_that_may_wait_is_written_where_nothing_else_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tier, "WAITING_BYTES", 1000)
    store = Held(tmp_path, holds="write")
    large = store.put(entry(1), layers(1000))
    assert large is not None
    assert store.put(entry(2), layers(1000)) is None, "one waits"
    store.goes_on.set()
    assert store.flush(600)
    assert store.has(large)
    store.close()


def test_a_session_waits_once_and_is_written_as_it_was_last_and_before_entries(tmp_path: Path) -> None:
    store = Held(tmp_path, holds="write")
    store.put(entry(1, 2), layers())
    assert store.reached.wait(600)
    store.records.commit(SavedSession("before", [1], "{}", changes=("here.1",)))
    assert store.records.flush(600), "an entry that hangs holds up no record"
    store.records_go_on.clear()
    store.records.commit(SavedSession("first", [1], "{}", changes=("here.1",)))
    assert store.reached_record.wait(600)
    for end in range(5):
        commits = [
            store.records.commit(SavedSession(name, [1, end], "{}", changes=("here.1",))) for name in ("one", "other")
        ]
    assert list(store.records._commits) == ["one", "other"]
    commits.append(store.records.commit(SavedSession("one", [], "", changes=("here.1",))))
    commits.append(store.records.commit(SavedSession("one", [7], "{}", changes=("here.1",))))
    store.records_go_on.set()
    store.goes_on.set()
    assert store.flush(600)
    assert [commit.answer.result() is None for commit in commits] == [True, False, True, False]
    assert {name: store.read_session(name).tokens for name in ("one", "other")} == {"one": [7], "other": [1, 4]}
    store.close()
    with pytest.raises(EngineClosed):
        store.records.commit(SavedSession("late", [1], "{}"))


# ---- reading


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENOMEM, errno.EACCES])
def test_an_error_that_passes_takes_no_file_away(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FolderTier(tmp_path, "one", 10**9)
    key = store.put(entry(1, 2), layers())
    assert key is not None
    assert store.flush(600)

    def fail(path: Path) -> None:
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(folder, "open_regular", fail)
        with pytest.raises(TierError):
            store.get(key)
    assert store.counts["quarantined"] == 0
    store.close()
    again = FolderTier(tmp_path, "one", 10**9)
    assert [found for found, _ in again.all_entries()] == [key]
    assert torch.equal(again.get(key)[0]["keys"], layers()[0]["keys"])
    again.close()


@pytest.mark.parametrize("what", ["size", "layers"])
def test_a_file_is_checked_before_memory_is_taken_for_it(
    what: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FolderTier(tmp_path, "one", 10**9)
    key = store.put(entry(1, 2), layers())
    assert key is not None
    assert store.flush(600)
    if what == "size":
        os.truncate(store._file(key), 2**20)
    else:
        with sqlite3.connect(tmp_path / "index.sqlite3") as index:
            index.execute("update entries set layers = ?", (tier.MOST_LAYERS + 1,))
        index.close()
    taken: list[int] = []
    monkeypatch.setattr(folder, "bytearray", lambda size: taken.append(size) or bytearray(size), raising=False)
    with pytest.raises(TierError):
        store.get(key)
    assert taken == []
    assert store.counts["quarantined"] == 1
    store.close()


@pytest.mark.parametrize("restarts", [False, True])
def test_a_full_folder_keeps_what_was_read_last(restarts: bool, tmp_path: Path) -> None:
    tier = FolderTier(tmp_path, "one", 2**20)
    keys = [tier.put(entry(number), layers()) for number in range(3)]
    assert tier.flush(30.0)
    assert keys[0] is not None
    tier.get(keys[0])
    if restarts:
        tier.close()
        tier = FolderTier(tmp_path, "one", 2**20)
        assert len(tier.all_entries()) == 3
    tier.limit = tier.nbytes()
    new = tier.put(entry(3), layers())
    assert tier.flush(30.0)
    assert [key is not None and tier.has(key) for key in (*keys, new)] == [True, False, True, True]
    tier.close()


def test_an_entry_is_found_that_came_after_another_one_went(tmp_path: Path) -> None:
    here, there = FolderTier(tmp_path, "one", 10**9), FolderTier(tmp_path, "one", 10**9)
    first = there.put(entry(1), layers())
    assert first is not None
    assert there.flush(600)
    with there._lock, there._index:
        there._index.execute("update entries set rowid = 1")  # as earlier versions wrote
    assert [key for key, _ in here.lookup([1])] == [first]
    there._forget(first)
    second = there.put(entry(2), layers())
    assert there.flush(600)
    assert [key for key, _ in here.lookup([2])] == [second]
    here.close()
    there.close()


@pytest.mark.parametrize("why", ["late", "cancelled"])
def test_what_a_lookup_found_is_known_though_nobody_waited_for_it(
    why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, text = ours("llama"), prompt(100, 1)
    store = Held(tmp_path, holds="find")
    try:
        with lmstate.Engine(model, store=store) as engine:
            with lmstate.Engine(model, store=FolderTier(tmp_path, "one", 10**9)) as other:
                ask(other, text)
            if why == "late":
                impatient(monkeypatch)
                assert ask(engine, prompt(70, 2)).usage.reused == 0
            else:
                request = engine.submit(prompt(70, 2))
                assert store.reached.wait(600)
                request.cancel()
                request.result(600)
            store.goes_on.set()
            wait_until(lambda: all(lookup.ended for lookup in engine._reuse._lookups))
            monkeypatch.setattr(reuse, "LEAST_PATIENCE", 600.0)
            got = ask(engine, [*text, 5])
            assert got.usage.reused == len(text)
            check(model, [*text, 5], got)
    finally:
        store.goes_on.set()


def stored(model: lmstate.Model, path: Path, count: int) -> list[list[int]]:
    """So many texts, which a folder has."""
    texts = [prompt(40, seed) for seed in range(count)]
    with lmstate.Engine(model, store=FolderTier(path, "one", 10**9)) as engine:
        for text in texts:
            ask(engine, text, 1)
    return texts


def test_requests_that_wait_read_few_texts_at_a_time(tmp_path: Path) -> None:
    model = ours("llama")
    texts = stored(model, tmp_path, 3 * reuse.MOST_FETCHES)
    store = Held(tmp_path, holds="read")
    try:
        with lmstate.Engine(model, store=store) as engine:
            requests = [engine.submit([*text, 5], max_new_tokens=1) for text in texts]
            engine.call(lambda _: None).result(600)  # all are queued, and a step follows
            jobs = engine.call(lambda _: engine._queue.jobs()).result(600)  # held: a slot is not free for want of them
            assert sum(job.fetch is not None for job in jobs) == reuse.MOST_FETCHES
            for request in requests[: reuse.MOST_FETCHES]:
                request.cancel()
                request.result(600)
            store.goes_on.set()
            for request in requests[reuse.MOST_FETCHES :]:
                assert request.result(600).usage.reused == len(texts[0])
    finally:
        store.goes_on.set()


def test_a_tier_that_hangs_holds_few_threads_and_nobody_waits_for_a_turn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    impatient(monkeypatch)
    model = ours("llama")
    texts = stored(model, tmp_path, 3 * reuse.MOST_FETCHES)
    store = Held(tmp_path, holds="read")
    try:
        with lmstate.Engine(model, store=store) as engine:
            requests = [engine.submit([*text, 5], max_new_tokens=1) for text in texts]
            assert [request.result(600).usage.reused for request in requests] == [0] * len(texts)
            assert not store.goes_on.is_set()
            assert 0 < store.most_at_once <= 2 * reuse.MOST_FETCHES
            store.goes_on.set()
    finally:
        store.goes_on.set()


def test_a_long_text_is_waited_for_before_anything_was_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in a replica that has just replaced another one."""
    patient(monkeypatch)
    monkeypatch.setattr(reuse, "LEAST_PATIENCE", 0.05)
    monkeypatch.setattr(reuse, "UNMEASURED", 60.0)
    model = ours("llama")
    (text,) = stored(model, tmp_path, 1)
    store = Held(tmp_path, holds="read")
    try:
        with lmstate.Engine(model, store=store) as engine:
            request = engine.submit([*text, 5], max_new_tokens=1)
            assert store.reached.wait(600)
            with pytest.raises(TimeoutError):
                request.result(0.5)
            store.goes_on.set()
            assert request.result(600).usage.reused > 0
    finally:
        store.goes_on.set()


# ---- the end


def test_a_statement_that_hangs_keeps_no_tier_from_closing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder, "ENDING", 0.01)
    store = FolderTier(tmp_path, "one", 10**9)
    with store._lock:
        closing = Thread(target=store.close, daemon=True)
        closing.start()
        closing.join(10.0)
        assert not closing.is_alive()


def test_a_session_that_is_closed_while_it_is_kept_stays_closed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, real, closing = ours("llama"), PrefixStore.pin, list[Thread]()
    with lmstate.Engine(model, store=tmp_path) as engine:
        session = engine.session("one")
        session.send(prompt(20, 1), max_new_tokens=2).result(600)

        def pin(self: PrefixStore, tokens: Sequence[int], salt: str = "") -> object:
            if not closing:
                closing.append(Thread(target=session.close, daemon=True))
                closing[0].start()
                closing[0].join(0.2)  # as far as it comes
            return real(self, tokens, salt)

        monkeypatch.setattr(PrefixStore, "pin", pin)
        session.mark()
        closing[0].join(600)
        assert engine._tier.flush(600)
        assert engine.sessions() == []
    with lmstate.Engine(model, store=tmp_path) as engine:
        assert engine.sessions() == []


def test_a_session_that_can_be_closed_no_more_says_so(tmp_path: Path) -> None:
    model = ours("llama")
    with lmstate.Engine(model, store=tmp_path) as engine:
        kept, gone = engine.session("kept"), engine.session("gone")
        for session in (kept, gone):
            session.send(prompt(20, 1), max_new_tokens=2).result(600)
        gone.close()
    gone.close()  # harmless: it was
    with pytest.raises(EngineClosed, match="'kept' stays in the store"):
        kept.close()
    with lmstate.Engine(model, store=tmp_path) as engine:
        assert engine.sessions() == ["kept"]


def test_closing_a_session_twice_takes_none_that_has_its_name_since(tmp_path: Path) -> None:
    with lmstate.Engine(ours("llama"), store=tmp_path) as engine:
        first = engine.session("one")
        first.close()
        engine.session("one").send(prompt(20, 1), max_new_tokens=2).result(600)
        first.close()
        assert engine._tier.flush(600)
        assert engine._tier.session_names() == ["one"]


def test_a_folder_stays_where_it_was_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ours("llama")
    for place in ("one", "other"):
        (tmp_path / place).mkdir()
    reused = []
    for _ in range(2):
        monkeypatch.chdir(tmp_path / "one")
        with lmstate.Engine(model, store="store") as engine:
            monkeypatch.chdir(tmp_path / "other")
            reused.append(engine.submit(prompt(200, 1), max_new_tokens=2).result(60).usage.reused)
    assert reused[0] == 0 and reused[1] > 100
    assert not list((tmp_path / "other").iterdir())
    for name in ("", __file__, 5):
        with pytest.raises(ValueError, match="name a folder"):
            lmstate.Engine(model, store=name)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="store='bogus://x' was asked for, and obstore says"):
        lmstate.Engine(model, store="bogus://x")
