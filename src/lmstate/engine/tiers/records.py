"""Session records in a store: each has a generation, and a change commits the next one by compare-and-swap.

A record that cannot be written is retried with backoff, and at close. Records have a thread of their own, so that they
do not wait behind entries, which are large.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from threading import Condition, Thread, Timer
from time import monotonic, sleep
from typing import Protocol, TypeVar

from lmstate.engine.prefix.digests import packed, unpacked
from lmstate.engine.results import EngineClosed, SessionMoved, StoreUnreachable
from lmstate.engine.tiers.record_store import StoredRecord, joined, parted
from lmstate.errors import SnapshotError

LOG = logging.getLogger(__name__)
COMMIT_SECONDS = 5.0  # that an answer waits for its record to be stored
FIRST_RETRY, LAST_RETRY = 0.5, 30.0  # seconds between two attempts; they double
CHANGES = 32  # whose ids a record has
CLOSING_RETRY = 0.1  # seconds between two attempts at close

Result = TypeVar("Result")


@dataclass(frozen=True)
class SavedSession:
    """A conversation: its tokens, and its record as text. Without a record it was closed, if it is not damaged."""

    name: str
    tokens: list[int]
    record: str
    generation: int = 1  # of this record; the first one is 1
    changes: tuple[str, ...] = ()  # ids of the last changes, this one last: `writer.number`
    damaged: bool = False

    @property
    def change(self) -> str:
        """The id of this change: it tells whether a write of unknown outcome counts, also below newer ones."""
        return self.changes[-1] if self.changes else ""

    @property
    def writer(self) -> str:
        """The session object that committed it, by a random name."""
        return self.change.partition(".")[0]

    def after(self, there: SavedSession) -> SavedSession:
        """The same change as the one that follows another record."""
        return replace(self, generation=there.generation + 1, changes=(*there.changes, self.change)[-CHANGES:])

    @property
    def gone(self) -> bool:
        return not self.record and not self.damaged

    def to_bytes(self) -> bytes:
        """The data of its record; none of a closed one."""
        if self.gone:
            return b""
        return joined({"record": self.record, "changes": self.changes}, packed(self.tokens))

    @staticmethod
    def of(name: str, stored: StoredRecord) -> SavedSession:
        """Inverse of `to_bytes`; damaged for other bytes."""
        if stored.deleted:
            return SavedSession(name, [], "", stored.generation)
        try:
            told, tokens = parted(stored.data)
            changes = tuple(map(str, told["changes"]))
            return SavedSession(name, list(unpacked(tokens)), str(told["record"]), stored.generation, changes)
        except (SnapshotError, ValueError, TypeError, KeyError, RecursionError):
            return SavedSession(name, [], "", stored.generation, damaged=True)


class SessionRecords(Protocol):
    """The part of a tier that keeps records of sessions. Any call may raise anything: then the outcome is unknown."""

    name: str

    def read_session(self, name: str) -> SavedSession | None:
        """The record of a name, also of a closed session as far as it is known; None if there is none."""

    def write_session(self, session: SavedSession) -> bool:
        """Store a record if the one in the store is of the generation before, or there is none.

        Atomic between processes. False if there is another one: it counts if its id is among the changes of that one.
        """


class Commit:
    """A record on its way to the store."""

    def __init__(self, saved: SavedSession) -> None:
        self.saved = saved
        self.answer: Future[SavedSession | None] = Future()  # soon: as it is stored, None while it is not
        self.done: Future[SavedSession] = Future()  # at last. Both may hold SessionMoved
        self.wait = 0.0  # seconds before the next attempt
        self.due = 0.0
        self._timer = Timer(COMMIT_SECONDS, self.tell, (None,))
        self._timer.daemon = True
        self._timer.start()

    def waited_for(self) -> SavedSession | None:
        """Wait for it through failures, as long as for an answer that does not come. None if it is not stored."""
        with suppress(TimeoutError):
            return self.done.result(COMMIT_SECONDS)
        return None

    @property
    def late(self) -> bool:
        """Whether those who wait were told that it is not stored."""
        return self.answer.done() and not self.answer.exception() and self.answer.result() is None

    def tell(self, outcome: SavedSession | None) -> None:
        """Tell those who wait what is known now."""
        self._timer.cancel()
        with suppress(Exception):  # the timer was faster
            self.answer.set_result(outcome)

    def end(self, outcome: SavedSession | SessionMoved) -> None:
        self._timer.cancel()
        if isinstance(outcome, SessionMoved):
            self.done.set_exception(outcome)
            with suppress(Exception):
                self.answer.set_exception(outcome)
        else:
            self.done.set_result(outcome)
            self.tell(outcome)


class RecordWriter:
    """Commits records to a tier, one at a time, on a thread of its own."""

    def __init__(self, records: SessionRecords) -> None:
        self.failures = 0
        self._records = records
        self._changed = Condition()
        self._commits: dict[str, Commit] = {}  # that wait, by name
        self._now: Commit | None = None
        self._closing = self._closed = False
        self._thread: Thread | None = None

    def commit(self, saved: SavedSession) -> Commit:
        """Queue a record, in place of an older one of its name. Raises EngineClosed after `close`."""
        with self._changed:
            if self._closed:
                raise EngineClosed(f"session {saved.name!r} stays in the store as it is: the engine was closed")
            replaced = self._commits.pop(saved.name, None)
            commit = self._commits[saved.name] = Commit(saved)
            if self._thread is None:
                self._thread = Thread(target=self._run, name="lmstate-records", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        if replaced is not None:
            replaced.tell(None)
        return commit

    def withdraw(self, commit: Commit) -> None:
        """Attempt it no more. An attempt in progress may still succeed."""
        with self._changed:
            if self._commits.get(commit.saved.name) is commit:
                del self._commits[commit.saved.name]
            if self._now is commit:
                self._now = None

    @property
    def unstored(self) -> int:
        """Sessions whose last record could not be stored, or not in time, and is tried again."""
        with self._changed:
            commits = [*self._commits.values(), *([] if self._now is None else [self._now])]
        return len({commit.saved.name for commit in commits if commit.late})

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all is stored or refused. False if it is not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._commits and self._now is None, timeout)

    def close(self, timeout: float) -> None:
        """Attempt all records again until they are stored, or the time is over."""
        with self._changed:
            self._closing = True
            for commit in self._commits.values():
                commit.due = 0.0
            self._changed.notify_all()
        stored = self.flush(timeout)
        with self._changed:
            self._closed = True
            left, self._commits = list(self._commits.values()), {}
            self._changed.notify_all()
        if not stored:
            LOG.error("the store (%s) did not take the last changes of %d sessions", self._records.name, len(left))
        for commit in left:
            commit.tell(None)
        if self._thread is not None:
            self._thread.join(1.0)

    # ---- the thread

    def _run(self) -> None:
        while (commit := self._next()) is not None:
            try:
                outcome: SavedSession | SessionMoved = self._attempt(commit.saved)
            except SessionMoved as moved:
                outcome = moved
            except Exception as error:  # whatever a client raises: it is tried again
                self._failed(commit, error)
                continue
            commit.end(outcome)
            with self._changed:
                self._now = None
                self._changed.notify_all()

    def _next(self) -> Commit | None:
        """Wait for a commit that is due. None at the end."""
        with self._changed:
            while not self._closed:
                now = monotonic()
                first = min(self._commits.values(), key=lambda commit: commit.due, default=None)  # of equals the oldest
                if first is not None and first.due <= now:
                    self._now = self._commits.pop(first.saved.name)
                    return first
                self._changed.wait(None if first is None else first.due - now)
            return None

    def _failed(self, commit: Commit, error: Exception) -> None:
        self.failures += 1
        if not commit.wait:
            why = str(error).partition("\n")[0]
            LOG.warning(
                "session %r is not stored (%s), and is tried again: %s", commit.saved.name, self._records.name, why
            )
        commit.tell(None)
        with self._changed:
            commit.wait = CLOSING_RETRY if self._closing else _longer(commit.wait)
            commit.due = monotonic() + commit.wait
            if self._now is commit and not self._closed:  # else it was withdrawn
                self._commits.setdefault(commit.saved.name, commit)  # a newer one counts instead
            self._now = None
            self._changed.notify_all()

    def _attempt(self, saved: SavedSession) -> SavedSession:
        """Store a record. Returns it as it was stored; raises SessionMoved if another process committed one before."""
        for _ in range(3):
            if self._records.write_session(saved):
                return saved
            there = self._records.read_session(saved.name)
            if there is None:
                continue
            if saved.change in there.changes:
                return saved  # by an attempt whose answer was lost
            if saved.gone and there.gone:
                return there
            if there.change not in saved.changes and there.writer != saved.writer:
                raise moved(saved.name, there)
            # The stored record is older than the one that this one follows: of this writer, or of a store that went
            # back.
            saved = saved.after(there)
        raise OSError("the record in the store changes all the time")


def insist(action: Callable[[], Result]) -> Result:
    """Return `action()`, tried again with the pauses of a writer while it raises StoreUnreachable.

    Raises that once an answer would not wait longer for its record.
    """
    wait, until = 0.0, monotonic() + COMMIT_SECONDS
    while True:
        try:
            return action()
        except StoreUnreachable:
            wait = _longer(wait)
            if monotonic() + wait > until:
                raise
        sleep(wait)


def _longer(wait: float) -> float:
    return min(max(FIRST_RETRY, 2 * wait), LAST_RETRY)


def moved(name: str, there: SavedSession) -> SessionMoved:
    what = "was closed" if there.gone else "went on"
    return SessionMoved(
        f"session {name!r} {what} in another process (generation {there.generation}); nothing was changed here: "
        "read it again, then decide whether to send again",
        there.generation,
    )
