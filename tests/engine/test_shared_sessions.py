"""One session in several engines: each turn that was confirmed is in the record exactly once, others were refused."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from threading import Condition, Thread
from types import SimpleNamespace
from typing import Any

import pytest

import lmstate
from lmstate.engine import Session, SessionMoved
from lmstate.engine.session_record import Record
from lmstate.engine.tiers import SavedSession, Tier, records
from lmstate.engine.tiers.blobs import ObjectBlobs
from lmstate.engine.tiers.shared import SharedTier
from tests.engine.alone import alone
from tests.waiting import GUARD
from tests.zoo import ours

CALLS = ("session_generation", "read_session", "write_session")  # of a turn on a store


@pytest.fixture(autouse=True)
def unhurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(records, "COMMIT_SECONDS", GUARD)


class Schedule:
    """Lets the store's calls of two senders happen in a given order, one at a time."""

    def __init__(self) -> None:
        self._changed = Condition()
        self._waiting, self._running, self._ended = [0, 0], [0, 0], [True, True]
        self._free = True

    def gate(self, store: object, sender: int, *calls: str) -> None:
        """Have these calls of a sender's store wait for their turns."""
        for name in calls:
            setattr(store, name, self._gated(getattr(store, name), sender))

    def _gated(self, call: Callable[..., Any], sender: int) -> Callable[..., Any]:
        def run(*arguments: Any, **named: Any) -> Any:
            with self._changed:
                self._waiting[sender] += 1
                self._changed.notify_all()
                assert self._changed.wait_for(lambda: self._free or self._running[sender], GUARD)
                self._waiting[sender] -= 1
            try:
                return call(*arguments, **named)
            finally:
                with self._changed:
                    self._running[sender] = 0
                    self._changed.notify_all()

        return run

    def run(self, order: tuple[int, ...], senders: list[Callable[[], None]]) -> None:
        """Run both senders; `order` tells whose call is next. The calls after it come as they like."""

        def start(number: int, send: Callable[[], None]) -> None:
            try:
                send()
            finally:
                with self._changed:
                    self._ended[number] = True
                    self._changed.notify_all()

        self._free, self._ended = False, [False, False]
        threads = [Thread(target=start, args=pair, daemon=True) for pair in enumerate(senders)]
        for thread in threads:
            thread.start()
        with self._changed:
            for sender in order:
                assert self._changed.wait_for(lambda n=sender: self._waiting[n] or self._ended[n], GUARD)
                if self._waiting[sender]:
                    self._running[sender] = 1
                    self._changed.notify_all()
                    assert self._changed.wait_for(lambda n=sender: not self._running[n], GUARD)
            self._free = True
            self._changed.notify_all()
        for thread in threads:
            thread.join(GUARD)
            assert not thread.is_alive()


class Sender:
    """Sends one token a turn to a session of an engine, and gets one back."""

    def __init__(self, session: Session, tokens: list[int]) -> None:
        self.session, self.tokens = session, tokens
        self.confirmed: list[int] = []
        self.refused: list[int] = []
        self.failed: list[BaseException] = []

    def run(self) -> None:
        for token in self.tokens:
            try:
                told = self.session.send([token], max_new_tokens=1, ignore_eos=True).result(GUARD)
                assert told.stored is True
                self.confirmed.append(token)
            except SessionMoved as moved:
                assert moved.generation > 0
                self.refused.append(token)
            except BaseException as error:
                self.failed.append(error)

    def insist(self) -> None:
        """Send each token until it is taken."""
        left = self.tokens
        while left and not self.failed:
            self.tokens, self.refused = left, []
            self.run()
            left = self.refused


def check(model: lmstate.Model, record: Session, senders: list[Sender]) -> None:
    assert not any(sender.failed for sender in senders)
    sent = record.tokens[::2]
    assert sorted(sent) == sorted(token for sender in senders for token in sender.confirmed), "each once"
    for sender in senders:
        assert [token for token in sent if token in sender.confirmed] == sender.confirmed, "in their order"
    assert record.generation == 1 + len(sent)
    for at in range(1, len(record.tokens), 2):
        assert record.tokens[at : at + 1] == alone(model, record.tokens[:at], 1, ends=frozenset())[0]


def test_in_all_interleavings_of_two_senders_a_turn_is_stored_once_or_refused(tier: Callable[[], Tier]) -> None:
    model, schedule = ours("llama"), Schedule()
    tiers = [tier(), tier()]
    runs: dict[str, list[Sender]] = {}
    with lmstate.Engine(model, store=tiers[0]) as here, lmstate.Engine(model, store=tiers[1]) as there:
        for number, each in enumerate(tiers):
            schedule.gate(each, number, *CALLS)
        for order in itertools.product((0, 1), repeat=5):
            name = "".join(map(str, order))
            here.new_session(name, Record())
            senders = [Sender(here.session(name), [15, 16]), Sender(there.session(name), [25, 26])]
            schedule.run(order, [sender.run for sender in senders])
            assert senders[0].confirmed or senders[1].confirmed, "one of two goes on"
            runs[name] = senders
    assert any(sender.refused for senders in runs.values() for sender in senders)
    with lmstate.Engine(model, store=tier()) as other:
        assert other.sessions() == sorted(runs)
        for name, senders in runs.items():
            check(model, other.session(name), senders)


def test_two_engines_that_send_at_once_lose_no_turn(tier: Callable[[], Tier]) -> None:
    model = ours("qwen3_next-dense")
    with lmstate.Engine(model, store=tier()) as here, lmstate.Engine(model, store=tier()) as there:
        here.new_session("one", Record())
        senders = [
            Sender(engine.session("one"), list(range(start, start + 8))) for start, engine in ((10, here), (30, there))
        ]
        threads = [Thread(target=sender.insist) for sender in senders]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(GUARD)
        with lmstate.Engine(model, store=tier()) as other:
            check(model, other.session("one"), senders)


class Committer:
    """Commits changes of records to an object store, each after the newest record."""

    def __init__(self, store: Any, number: int, schedule: Schedule) -> None:
        blobs = ObjectBlobs(store)
        real = blobs._obstore
        blobs._obstore = SimpleNamespace(
            list=lambda *call, **named: list(real.list(*call, **named)),  # at once
            put=real.put,
            delete=real.delete,
            get=real.get,
        )
        schedule.gate(blobs._obstore, number, "list", "put", "delete")
        self.tier, self.number = SharedTier(blobs, "one"), number
        self.taken: list[str] = []

    def run(self, name: str) -> None:
        for change in range(3):
            there = self.tier.read_session(name)
            assert there is not None
            text = f"{self.number}.{change}"
            saved = SavedSession(name, [1], f"{there.record} {text}", changes=(text,)).after(there)
            with suppress(SessionMoved):
                self.tier.records.commit(saved).done.result(GUARD)
                self.taken.append(text)


def orders() -> list[tuple[int, ...]]:
    """All beginnings of two commits, and some whole ones; first that of one who writes long after it has looked."""
    dice = random.Random(1)
    late = (*(0,) * 3, *(1,) * 20, *(0,) * 4)
    return [late, *itertools.product((0, 1), repeat=7), *(tuple(dice.choices((0, 1), k=24)) for _ in range(200))]


def test_two_that_commit_to_an_object_store_know_what_of_it_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    store, schedule = pytest.importorskip("obstore.store").MemoryStore(), Schedule()
    monkeypatch.setattr(SharedTier, "check_access", lambda _: None)
    committers, other = [Committer(store, number, schedule) for number in (0, 1)], SharedTier(ObjectBlobs(store), "one")
    refused = 0
    for order in orders():
        name = "".join(map(str, order))
        assert other.write_session(SavedSession(name, [1], "first"))
        for committer in committers:
            committer.taken = []
        schedule.run(order, [partial(committer.run, name) for committer in committers])
        newest = other.read_session(name)
        assert newest is not None
        taken = [change for committer in committers for change in committer.taken]
        assert sorted(newest.record.split()) == sorted(["first", *taken]), order
        assert newest.generation == 1 + len(taken), order
        refused += 6 - len(taken)
    assert refused > 0
    for tier in (*(committer.tier for committer in committers), other):
        tier.close()
