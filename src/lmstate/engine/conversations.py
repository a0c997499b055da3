"""The sessions of an engine: by name, with what going on from them needs, and kept where there is a tier."""

from __future__ import annotations

from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from lmstate.engine.job import Job
from lmstate.engine.prefix import PrefixStore
from lmstate.engine.prefix.tree import Node
from lmstate.engine.session import Record, Session, SessionHost
from lmstate.engine.tiers import SavedSession, Tier
from lmstate.engine.tiers.fetch import Patience
from lmstate.text.replay import Replay

if TYPE_CHECKING:
    from lmstate.models.model import Model


class Conversations:
    """`find`, `add`, `drop` and `names` are for any thread, the rest is for the engine's."""

    def __init__(self, model: Model, prefixes: PrefixStore, replay: Replay, tier: Tier | None) -> None:
        self._prefixes, self._replay, self._tier = prefixes, replay, tier
        self._vocab_size, self._most = model.config.vocab_size, model.max_positions
        self._patience = Patience()
        self._foreign: set[str] = set()  # names under which a tier has what is no session
        self._sessions: dict[str, Session] = {}
        self._pins: dict[Session, list[Node]] = {}  # what live sessions need
        self._lock = Lock()

    def find(self, name: str, engine: SessionHost) -> Session | None:
        """The session of a name: one of this engine, else one that another process has left in the tier."""
        if (session := self._sessions.get(name)) is not None or self._tier is None:
            return session
        saved = self._patience.ask(partial(self._tier.saved_session, name), None)
        if saved is None or (session := self._opened(saved, engine)) is None:
            return None
        return self.add(session)

    def names(self) -> list[str]:
        """Of this engine, and of the tier."""
        stored: set[str] = set()
        if self._tier is not None:
            stored = self._patience.ask(self._tier.all_session_names, stored)
        with self._lock:
            return sorted((stored - self._foreign).union(self._sessions))

    def add(self, session: Session, *, new: bool = False) -> Session:
        """The session of this name: this one, if there is none yet. With `new`, ValueError if there is."""
        with self._lock:
            if new and session.name in self._sessions:
                raise ValueError(f"there is a session {session.name!r} already: close it, or take another name")
            return self._sessions.setdefault(session.name, session)

    def drop(self, session: Session) -> None:
        with self._lock:
            if self._sessions.get(session.name) is not session:
                return  # it was closed before; another one may have its name now
            if self._tier is not None:
                self._tier.drop_session(session.name)
            del self._sessions[session.name]

    # ---- for the engine's thread

    def hold(self, session: Session) -> None:
        """Keep what going on from a session's end and its marks needs, and the session itself where there is a tier."""
        self.release(session)
        with self._lock:  # else it could be closed in between, and be written after that
            if self._sessions.get(session.name) is not session:
                return  # it was closed
            record = session.record
            needed = [*(mark.tokens for mark in record.marks), len(record.tokens)]
            pinned = [self._prefixes.pin(record.tokens[:at]) for at in needed if at]
            self._pins[session] = [node for node in pinned if node is not None]
            if self._tier is not None:
                self._tier.put_session(SavedSession(session.name, list(record.tokens), record.to_json()))

    def release(self, session: Session) -> None:
        for node in self._pins.pop(session, []):
            self._prefixes.unpin(node)

    def ended(self, job: Job) -> None:
        """A request ended: its session has the first of its answers now, or is as before if there is none."""
        session = job.session
        choice = job.choices[0] if job.choices and job.error is None else None
        if choice is None or not (choice.tokens or choice.finished in ("eos", "stop", "length")):
            if session is not None:
                session.give_up()
            return
        tokens = [*job.prompt, *choice.tokens[: choice.kept()]][: self._most]
        messages = [dict(message) for message in job.messages]
        if messages:
            messages.append({"role": "assistant", "content": choice.text})
            self._replay.remember(messages, tokens)
        if session is not None:
            session.adopt(tokens, messages)
            self.hold(session)

    def recall(self, tier: Tier, engine: SessionHost) -> None:
        """Take the sessions that a tier has."""
        for saved in tier.all_sessions():
            if (session := self._opened(saved, engine)) is not None:
                self._sessions[saved.name] = session

    def _opened(self, saved: SavedSession, engine: SessionHost) -> Session | None:
        """None for what is not one of ours."""
        try:
            if all(token < self._vocab_size for token in saved.tokens):
                record = Record.from_json(saved.tokens, saved.record)
                self.remember(record)
                self._foreign.discard(saved.name)
                return Session(engine, saved.name, record)
        except (ValueError, TypeError, RecursionError):
            pass
        self._foreign.add(saved.name)
        return None

    def remember(self, record: Record) -> None:
        """Have its messages found again as the tokens that they were."""
        for moment in (*record.turns, record.moment()):
            if moment.messages and record.messages[moment.messages - 1].get("role") == "assistant":
                self._replay.remember(record.messages[: moment.messages], record.tokens[: moment.tokens])
