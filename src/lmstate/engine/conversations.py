"""The sessions of an engine: by name, with what going on from them needs, and kept where there is a tier."""

from __future__ import annotations

import logging
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import Lock
from typing import TYPE_CHECKING

from lmstate.engine.delivery import Delivery
from lmstate.engine.job import Job
from lmstate.engine.prefix import PrefixStore
from lmstate.engine.prefix.tree import Node
from lmstate.engine.results import Completion, SessionMoved, StoreUnreachable
from lmstate.engine.session import Session, SessionHost
from lmstate.engine.session_record import KeyedAnswer, Moment, Record
from lmstate.engine.tiers import SavedSession, Tier
from lmstate.engine.tiers.fetch import Patience
from lmstate.engine.tiers.records import Commit, insist, moved
from lmstate.text.replay import Replay
from lmstate.vision.reader import named

if TYPE_CHECKING:
    from lmstate.engine.serving import ServingModel

LOG = logging.getLogger(__name__)


class Conversations:
    """Sessions by name. The methods before `hold` are for any thread, the others for the engine's."""

    def __init__(
        self,
        model: ServingModel,
        prefixes: PrefixStore | None,
        replay: Replay,
        tier: Tier | None,
        *,
        durable: bool = True,
    ) -> None:
        """`prefixes`: where sessions hold what they need; None where turns are computed elsewhere. `durable`: whether a
        turn ends once its record is stored."""
        self._durable = durable
        self._prefixes, self._replay, self._tier = prefixes, replay, tier
        self._ids, self._most = model.config.ids, model.max_positions
        self._patience = Patience()
        self._foreign: set[str] = set()  # names under which a tier has something other than a session
        self._sessions: dict[str, Session] = {}
        self._pins: dict[Session, list[Node]] = {}  # what live sessions need
        self._unstored: set[Session] = set()  # whose last turn is not in the tier yet
        self._lock = Lock()

    @property
    def opened(self) -> int:
        """Sessions that are in memory."""
        return len(self._sessions)

    def find(self, name: str, engine: SessionHost, salt: str) -> Session | None:
        """The session of a name: one of this engine, else one that another process has left in the tier.

        Raises StoreUnreachable if that is unknown.
        """
        if (session := self._sessions.get(name)) is not None:
            try:
                session.refresh()
            except StoreUnreachable:
                return session  # it is here; what others did to it shows later
            except SessionMoved:
                return None  # it was closed elsewhere
            return session
        if self._tier is None or (saved := self._read(name)) is None or saved.gone:
            return None
        opened = self._opened(saved, engine, salt)
        return None if opened is None else self.add(opened)

    def names(self) -> list[str]:
        """Of this engine, and of the tier. Raises StoreUnreachable if that is unknown."""
        stored: set[str] = set()
        if self._tier is not None:
            stored = self._patience.ask(lambda: set(self._tier.session_names() if self._tier else ()))
        with self._lock:
            return sorted((stored - self._foreign).union(self._sessions))

    def add(self, session: Session, *, new: bool = False) -> Session:
        """The session of this name: this one, if there is none yet. With `new`, ValueError if there is."""
        with self._lock:
            if new and session.name in self._sessions:
                raise taken(session.name)
            return self._sessions.setdefault(session.name, session)

    def create(self, session: Session, *, patient: bool = False) -> Session:
        """Store and add a new session. Raises ValueError if there is one of its name.

        `patient`: a store that fails is asked again for a few seconds.
        """
        with session.beginning():
            self.add(session, new=True)
            try:
                if self._tier is not None:
                    read = partial(self._read, session.name)
                    if (saved := insist(read) if patient else read()) is not None:
                        if not saved.gone and self._record(saved, session.salt) is not None:
                            raise taken(session.name)
                        self._follow(session, saved)
                    self.commit(session, session.record, patient=patient)
            except BaseException as error:
                with self._lock:
                    del self._sessions[session.name]
                if isinstance(error, SessionMoved):
                    raise taken(session.name) from None
                raise
        return session

    def refresh(self, session: Session) -> None:
        """Adopt a newer record of a session that rests. Raises SessionMoved if it was closed elsewhere."""
        tier = self._tier
        if tier is None:
            return
        there = self._patience.ask(partial(tier.session_generation, session.name))
        if there is None or there <= session.generation or (saved := self._read(session.name)) is None:
            return
        if session.wrote(saved):  # our own, which seemed to fail: what is here now is stored over it
            session.confirm(saved)
            if not saved.gone and saved.record != session.record.to_json():
                self._commit_later(session, session.record)
        elif saved.gone and session.generation:
            with self._lock:
                if self._sessions.get(session.name) is session:
                    del self._sessions[session.name]
            raise moved(session.name, saved)
        elif (record := self._record(saved, session.salt)) is not None:
            session.adopt(record, saved)
        else:
            self._follow(session, saved)

    def _follow(self, session: Session, saved: SavedSession) -> None:
        """Have a session's next record replace this one, which was closed, or is damaged and is kept elsewhere."""
        if not saved.gone:
            assert self._tier is not None
            LOG.warning("the record of session %r is damaged: it is set aside and written again", session.name)
            self._patience.ask(partial(self._tier.set_aside_session, session.name))
        session.confirm(saved)

    def commit(self, session: Session, record: Record, *, patient: bool = False) -> None:
        """Store a session's next record; then it counts. Raises SessionMoved or StoreUnreachable."""
        session.adopt(record, None if self._tier is None else self._stored(session, session.saved(record), patient))

    def _stored(self, session: Session, saved: SavedSession, patient: bool = False) -> SavedSession:
        assert self._tier is not None
        commit = self._tier.records.commit(saved)
        if (stored := commit.waited_for() if patient else commit.answer.result()) is None:
            self._tier.records.withdraw(commit)
            if session in self._unstored:
                self._commit_later(session, session.record)
            raise StoreUnreachable(f"session {session.name!r} cannot be stored now; nothing was changed: try again")
        self._unstored.discard(session)
        return stored

    def _commit_later(self, session: Session, record: Record) -> Commit:
        """Have a record stored, and stored later if it cannot be now."""
        assert self._tier is not None
        self._unstored.add(session)
        commit = self._tier.records.commit(session.saved(record))

        def done(future: Future[SavedSession]) -> None:
            self._unstored.discard(session)
            if (moved := future.exception()) is None:
                session.confirm(future.result())
            elif commit.late or not self._durable:  # no request waits for it
                LOG.warning("the last change of session %r is lost: %s", session.name, moved)

        commit.done.add_done_callback(done)
        return commit

    def drop(self, session: Session) -> None:
        if self._sessions.get(session.name) is not session:
            return  # it was closed before; another one may have its name now
        if self._tier is not None:
            if session.generation or session in self._unstored:
                self._stored(session, session.saved(None))
            self._unstored.discard(session)
        with self._lock:
            self._sessions.pop(session.name, None)

    def _read(self, name: str) -> SavedSession | None:
        assert self._tier is not None
        return self._patience.ask(partial(self._tier.read_session, name))

    # ---- for the engine's thread

    def hold(self, session: Session, record: Record) -> None:
        """Keep what going on from a session's end and its marks needs."""
        self.release(session)
        if (prefixes := self._prefixes) is None:
            return
        with self._lock:
            if self._sessions.get(session.name) is not session:
                return  # it was closed
        needed = [*(mark.tokens for mark in record.marks), len(record.tokens)]
        text = record.prompt.identities
        pinned = [prefixes.pin(text[:at], session.salt) for at in needed if at]
        self._pins[session] = [node for node in pinned if node is not None]

    def release(self, session: Session) -> None:
        for node in self._pins.pop(session, []):
            if self._prefixes is not None:
                self._prefixes.unpin(node)

    def ended(self, job: Job, outcome: Completion | BaseException) -> None:
        """A request ended: its session has the first of its answers now, or is as before if there is none.

        With a tier, the sender hears of it once the session's record is stored, or was tried to be.
        """
        session, request = job.session, job.request
        choice = job.choices[0] if job.choices and job.error is None else None
        if choice is not None and choice.finished == "cancelled" and job.key is not None:
            choice = None  # the sender asks again, and gets a whole answer then
        if choice is None or not (choice.tokens or choice.finished in ("eos", "stop", "length")):
            if session is not None:
                session.give_up()
            request.finish(outcome)
            return
        tokens = [*job.prompt, *choice.tokens[: choice.kept()]][: self._most]
        messages = [dict(message) for message in job.messages]
        if messages:
            messages.append({"role": "assistant", "content": choice.text})
            self._replay.remember(named(messages), tokens, job.salt)
        if session is None:
            request.finish(outcome)
            return
        answer = None
        if job.key is not None and choice.finished is not None:
            prompt, sampled = len(job.prompt), list(choice.tokens)
            answer = KeyedAnswer(job.key, len(tokens), prompt, sampled, choice.text, choice.finished)
        record = session.continued_by(replace(job.pictured, tokens=tokens), messages, answer)
        self.hold(session, record)
        if self._tier is None or session.closed:
            session.adopt(record)
            request.finish(outcome)
            return
        commit = self._commit_later(session, record)
        if not self._durable:
            session.adopt(record)
            request.finish(outcome)
            return

        def told(answer: Future[SavedSession | None]) -> None:
            if (refused := answer.exception()) is not None:
                session.give_up()
                request.finish(refused, Delivery())
            else:
                session.adopt(record, answer.result())
                stored = answer.result() is not None
                told = replace(outcome, stored=stored) if isinstance(outcome, Completion) else outcome
                request.finish(told, Delivery())

        commit.answer.add_done_callback(told)

    def _opened(self, saved: SavedSession, engine: SessionHost, salt: str) -> Session | None:
        """None for what is not one of ours."""
        if (record := self._record(saved, salt)) is None:
            return None
        session = Session(engine, saved.name, record, salt)
        session.confirm(saved)
        return session

    def _record(self, saved: SavedSession, salt: str) -> Record | None:
        try:
            if all(token < self._ids for token in saved.tokens):
                record = Record.from_json(saved.tokens, saved.record)
                self.remember(record, salt)
                self._foreign.discard(saved.name)
                return record
        except (ValueError, TypeError, RecursionError):
            pass
        self._foreign.add(saved.name)
        return None

    def remember(self, record: Record, salt: str) -> None:
        """Have its messages found again as the tokens that they were."""
        for moment in (*record.turns, record.moment()):
            self.remember_at(record, moment, salt)

    def remember_at(self, record: Record, moment: Moment, salt: str) -> None:
        """The same for its messages up to there, where they end in an answer whose tokens it has."""
        if moment.tokens and moment.messages and record.messages[moment.messages - 1].get("role") == "assistant":
            messages = named(record.messages[: moment.messages])
            self._replay.remember(messages, record.tokens[: moment.tokens], salt)


def taken(name: str) -> ValueError:
    return ValueError(f"there is a session {name!r} already: close it, or take another name")
