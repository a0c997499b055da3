"""The sessions of an engine: by name, with what going on from them needs, and kept where there is a tier."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock

from lmstate.engine.job import Job
from lmstate.engine.prefix import PrefixStore
from lmstate.engine.prefix.tree import Node
from lmstate.engine.replay import Replay
from lmstate.engine.session import Record, Session, SessionHost
from lmstate.engine.tiers import SavedSession, Tier


class Conversations:
    """`get`, `add`, `drop` and `names` are for any thread, the rest is for the engine's."""

    def __init__(self, prefixes: PrefixStore, replay: Replay, tier: Tier | None) -> None:
        self._prefixes, self._replay, self._tier = prefixes, replay, tier
        self._sessions: dict[str, Session] = {}
        self._pins: dict[Session, list[Node]] = {}  # what live sessions need
        self._lock = Lock()

    def get(self, name: str) -> Session | None:
        return self._sessions.get(name)

    def names(self) -> list[str]:
        with self._lock:
            return sorted(self._sessions)

    def add(self, session: Session, *, new: bool = False) -> Session:
        """The session of this name: this one, if there is none yet. With `new`, ValueError if there is."""
        with self._lock:
            if new and session.name in self._sessions:
                raise ValueError(f"there is a session {session.name!r} already: close it, or take another name")
            return self._sessions.setdefault(session.name, session)

    def drop(self, session: Session) -> None:
        with self._lock:
            if self._sessions.get(session.name) is session:
                del self._sessions[session.name]
        if self._tier is not None:
            self._tier.drop_session(session.name)

    # ---- for the engine's thread

    def hold(self, session: Session) -> None:
        """Keep what going on from a session's end and its marks needs, and the session itself where there is a tier."""
        self.release(session)
        if self._sessions.get(session.name) is not session:
            return  # it was closed
        record = session.record
        pinned = [self._prefixes.pin(record.tokens[:at]) for at in (*record.marks, len(record.tokens)) if at]
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
        if choice is None or not (choice.answer.tokens or choice.finished in ("eos", "stop", "length")):
            if session is not None:
                session.give_up()
            return
        tokens = [*job.prompt, *choice.answer.tokens[: choice.kept()]]
        messages = [dict(message) for message in job.messages]
        if messages:
            messages.append({"role": "assistant", "content": choice.answer.text})
            self._replay.remember(messages, tokens)
        if session is not None:
            session.adopt(tokens, messages)
            self.hold(session)

    def recall(self, tier: Tier, vocab: int, engine: SessionHost) -> None:
        """Take the sessions that a tier has."""
        for saved in tier.sessions():
            with suppress(ValueError, TypeError, RecursionError):  # not one of ours
                if all(token < vocab for token in saved.tokens):
                    record = Record.from_json(saved.tokens, saved.record)
                    self._sessions[saved.name] = Session(engine, saved.name, record)
                    self.remember(record)

    def remember(self, record: Record) -> None:
        """Have its messages found again as the tokens that they were."""
        for moment in (*record.turns, record.moment()):
            if moment.messages and record.messages[moment.messages - 1].get("role") == "assistant":
                self._replay.remember(record.messages[: moment.messages], record.tokens[: moment.tokens])
