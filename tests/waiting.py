"""Waiting for what is to come, however slow and crowded the machine is: the guards are there for what never comes."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

import pytest

from lmstate.engine import reuse
from lmstate.engine.tiers import fetch

GUARD = 600.0  # seconds


def wait_until(condition: Callable[[], object], seconds: float = GUARD) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)


@contextmanager
def ctrl_c() -> Iterator[Callable[[], None]]:
    """A Ctrl-C for any thread to press: it returns when the main thread has been interrupted."""
    heard, before = threading.Event(), signal.getsignal(signal.SIGINT)

    def interrupt(number: int, frame: FrameType | None) -> None:
        heard.set()
        signal.default_int_handler(number, frame)

    def press() -> None:
        signal.raise_signal(signal.SIGINT)
        assert heard.wait(GUARD)

    signal.signal(signal.SIGINT, interrupt)
    try:
        yield press
    finally:
        signal.signal(signal.SIGINT, before)


def patient(monkeypatch: pytest.MonkeyPatch, seconds: float = GUARD) -> None:
    """Have engines wait so long for what a tier has: what is reused is not to depend on the machine's load."""
    monkeypatch.setattr(fetch, "ASKING_SECONDS", seconds)
    monkeypatch.setattr(reuse, "LEAST_PATIENCE", seconds)
    monkeypatch.setattr(reuse, "ASKING", (seconds, seconds))


def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have engines wait for no tier that hangs, and not ask it again in the same test."""
    patient(monkeypatch, 0.05)
    monkeypatch.setattr(reuse, "UNMEASURED", 0.0)
    for module in (fetch, reuse):
        monkeypatch.setattr(module, "SILENCE", float("inf"))
