"""Stores whose calls fail or hang for a while."""

from __future__ import annotations

from collections.abc import Callable
from threading import Event
from typing import Any

import pytest

from lmstate.engine.tiers import RecordStore, Tier, fetch, records
from tests.waiting import GUARD

READS, WRITES = ("session_names", "read_session", "session_generation"), ("write_session",)


class Fault:
    """Makes some calls of a store fail, or hang, until the block ends."""

    def __init__(self, store: Tier | RecordStore, *calls: str, hangs: bool = False) -> None:
        self.on = True
        self.over = Event()
        for name in calls:
            setattr(store, name, self._faulty(getattr(store, name), hangs))

    def _faulty(self, call: Callable[..., Any], hangs: bool) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if self.on and not hangs:
                raise OSError("the store is away")
            if self.on:
                assert self.over.wait(GUARD)
            return call(*arguments)

        return run

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self.on = False
        self.over.set()


def fail_once(store: Tier | RecordStore, *calls: str, late: bool = False) -> set[str]:
    """Have the first call of each name fail: before it does anything, or `late`, after it did all. Returns the calls
    that did not fail yet."""
    left = set(calls)

    def faulty(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any) -> Any:
            if name not in left:
                return call(*arguments)
            left.remove(name)
            if late:
                call(*arguments)
            raise OSError("no answer came")

        return run

    for name in calls:
        setattr(store, name, faulty(name, getattr(store, name)))
    return left


def retry_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have stores that failed, or did not answer in time, asked again at once."""
    monkeypatch.setattr(records, "FIRST_RETRY", 0.01)
    monkeypatch.setattr(records, "LAST_RETRY", 0.02)
    monkeypatch.setattr(fetch, "ASKING_SILENCE", 0.0)
