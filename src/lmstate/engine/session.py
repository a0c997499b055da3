"""Conversations by name: their tokens to the letter, with a way back."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from threading import Lock
from typing import Any, Protocol
from uuid import uuid4

from lmstate.engine.request import Request
from lmstate.engine.results import EngineError, StoreUnreachable
from lmstate.engine.session_record import ANSWERS, MARKS, UNDOS, KeyedAnswer, Moment, Record
from lmstate.engine.tiers.records import CHANGES, SavedSession
from lmstate.errors import EmbeddingsGone, RewindError, StateError
from lmstate.generation.prompts import are_messages
from lmstate.state.validate import whole_number
from lmstate.vision.reader import PicturePrompt, SeeingModel

Message = Mapping[str, Any]


class SessionBusy(EngineError):
    """The session answers a request: wait for it, or cancel it."""


def check_name(name: object) -> None:
    """Raise ValueError for what a session cannot be called, and be found again by in a store."""
    try:
        known = isinstance(name, str) and name.encode() is not None
    except UnicodeEncodeError:
        known = False
    if not known:
        raise ValueError(f"a session was to be called {name!r:.80}; a name is a str that UTF-8 can write")


class SessionHost(Protocol):
    """The part of an engine that its sessions use."""

    @property
    def model(self) -> SeeingModel: ...

    @property
    def chats(self) -> bool: ...

    def submit(self, prompt: Any, *, session: Any, **options: Any) -> Request: ...

    def refresh(self, session: Session) -> None: ...

    def commit(self, session: Session, record: Record) -> None: ...

    def changed(self, session: Session) -> None: ...

    def new_session(self, name: str, record: Record, salt: str) -> Session: ...

    def save_session(self, record: Record, path: Path, salt: str, name: str | None = None) -> None:
        """Write a snapshot with a session's record in its notes. `name`: of the session, if it has one.

        Raises EmbeddingsGone where a picture would have to be read, and the record has only its name.
        """
        ...

    def close_session(self, session: Session) -> None: ...

    def refuse_closed(self) -> None: ...


class Session:
    """A conversation that the engine keeps. Made by `Engine.session`; one request at a time.

    The data that the model needs to go on from its end stays in memory, whatever else has to go.
    """

    def __init__(self, engine: SessionHost, name: str, record: Record, salt: str = "") -> None:
        self.name, self.salt = name, salt
        self._engine = engine
        self._record = record
        self._lock = Lock()
        self._running: Request | None = None
        self._running_key: str | None = None
        self._closed = False
        self._writer = uuid4().hex
        self._written = 0  # changes that were given ids
        self._generation = 0  # of the record in the store that this one builds on; 0: none that is known
        self._changes: tuple[str, ...] = ()  # of that record

    def __repr__(self) -> str:
        state = "closed" if self._closed else "answering" if self._running is not None else "idle"
        return (
            f"Session({self.name!r}, {state}: {len(self._record.tokens)} tokens, {len(self._record.messages)} messages)"
        )

    @property
    def generation(self) -> int:
        """Number of the session's changes that the store has confirmed, by all processes; 0 without a store."""
        return self._generation

    @property
    def tokens(self) -> list[int]:
        """The ids of the conversation: prompts, and the answers as they were sampled."""
        return list(self._record.tokens)

    @property
    def messages(self) -> list[dict[str, Any]]:
        """The conversation as chat messages, as far as it was held in them."""
        return [dict(message) for message in self._record.messages]

    @property
    def parent(self) -> str | None:
        """Name of the session that it was forked from, if it was: forks are the branches of a conversation."""
        return self._record.parent

    def send(self, prompt: str | Sequence[int] | Sequence[Message], **options: Any) -> Request:
        """Go on with a text, messages or token ids; the options are those of `Engine.submit`.

        text      the next message of the user, where the model has a chat template; else plain text
        messages  the next messages; or the whole conversation again, if it begins with the same message: then it goes
                  on from the first difference
        ids       are appended as they are

        Of several answers (`n`) the first is the conversation's. Raises `SessionBusy` while a request runs.
        """
        return self._engine.submit(prompt, session=self, **options)

    def rewind(self, to: int) -> None:
        """Go back to the first `to` tokens. Inside a turn, text that is sent then goes on as plain text."""
        with self._changing() as record:
            to = whole_number(to, "a position")
            if not 0 <= to <= len(record.tokens):
                raise RewindError(f"rewind to {to} was asked for; the session has positions 0 to {len(record.tokens)}")
            if inside := [span for span in record.media if span.at < to < span.end]:
                raise RewindError(
                    f"rewind to {to} was asked for, inside a picture: go back to {inside[0].at} or to {inside[0].end}"
                )
            if to < len(record.tokens):
                # Between two turns no messages stand for the tokens: text that is sent then goes on as plain text.
                held = [at.messages for at in (*record.turns, *record.marks) if at.tokens == to]
                record.back(Moment(to, max(held, default=0)))
        self._engine.changed(self)

    def mark(self) -> int:
        """Keep what going back to here needs. Returns the position, for `rewind`. A session keeps the last 64 marks."""
        with self._changing() as record:
            at = record.moment()
            record.marks = [*(mark for mark in record.marks if mark.tokens != at.tokens), at][-MARKS:]
        self._engine.changed(self)
        return at.tokens

    def undo(self) -> None:
        """Forget the last request and its answer. Raises StateError if there is none."""
        with self._changing() as record:
            if not record.turns:
                raise StateError("undo was asked for; the session has had no request that could be undone")
            record.back(record.turns.pop())
        self._engine.changed(self)

    def cut(self, to: int, text: str) -> None:
        """Have the last answer end at position `to`, where its text is `text`: for a reader who stopped there.

        The session does not know where in the last turn its answer begins. Raises RewindError for a position outside
        the turn, or where pictures of it are not over.
        """
        with self._changing() as record:
            begin = max([record.turns[-1].tokens if record.turns else 0, *(span.end for span in record.media)])
            to = whole_number(to, "a position")
            if not begin < to <= len(record.tokens):
                raise RewindError(
                    f"a cut at {to} was asked for; the last turn has positions {begin + 1} to {len(record.tokens)}"
                )
            said = record.messages
            record.back(Moment(to, len(said)))
            if said:
                said[-1] = {**said[-1], "content": text}
        self._engine.changed(self)

    def restore(self, record: Record) -> None:
        """Be as this `record` says, which is an earlier one of a session of this engine. Only `parent` stays.

        It takes the record as it is: `Engine.load_session` is for records of elsewhere.
        """
        with self._resting() as now:
            self._engine.commit(self, replace(record.copy(), parent=now.parent))
        self._engine.changed(self)

    def fork(self, name: str) -> Session:
        """A session of this name that begins as this one is now, and shares all that was computed."""
        with self._resting() as record:
            copy = replace(record, parent=self.name)
        return self._engine.new_session(name, copy, self.salt)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a snapshot file (see `Snapshot.save`) from which `Engine.load_session` goes on, here or elsewhere."""
        with self._resting() as record:
            copy = record
        try:
            self._engine.save_session(copy, Path(path), self.salt, self.name)
        except EmbeddingsGone:  # the record came from the store, and its state is not in memory
            self._engine.save_session(copy.seen_again(self._engine.model), Path(path), self.salt, self.name)

    def close(self) -> None:
        """Forget the session; what was computed for it may go. Ends a request that runs. It takes no others then."""
        self._closed = True
        if (running := self._running) is not None:
            running.cancel()
        try:
            self._engine.close_session(self)
        except EngineError:  # the store did not hear of it
            self._closed = False
            raise

    # ---- for the engine

    def continued(
        self, prompt: Any, encode: Callable[[Any], PicturePrompt]
    ) -> tuple[PicturePrompt, list[dict[str, Any]]]:
        """The conversation with a prompt after it, and its messages. No messages: it is plain text now.

        `encode(prompt)`: of a prompt by itself, text that follows a text given as `(text,)`.
        """
        record = self._record
        if isinstance(prompt, str):
            if not record.messages and (record.tokens or not self._engine.chats):
                return record.followed_by(encode((prompt,) if record.tokens else prompt)), []
            whole = [*record.messages, {"role": "user", "content": prompt}]
            return encode(whole), whole
        if are_messages(prompt):
            said, told = record.messages, [dict(message) for message in prompt]
            if record.tokens and not said:
                raise StateError("messages were sent, and the session holds plain text: send text or token ids")
            whole = told if said and told[0] == said[0] else [*said, *told]
            return encode(whole), whole
        return record.followed_by(encode(prompt)), []

    def begin(self, make: Callable[[], Request], key: str | None = None) -> Request:
        """Let `make` begin a request. Raises `SessionBusy` while another runs, unless it has the same key."""
        with self._lock:
            running = self._running
            same = key is not None and key == self._running_key
            if same and running is not None and not (running.done or running.cancelled):
                return running
            self._refuse_busy()
            self._refresh()
            self._running, self._running_key = (request := make()), key
            if request.done:  # the engine was faster than this line
                self._running = None
            return request

    @contextmanager
    def beginning(self) -> Iterator[None]:
        """Let no request begin before the block ends; none ever, if that fails."""
        with self._lock:
            try:
                yield
            except BaseException:
                self._closed = True
                raise

    def answered(self, key: str) -> KeyedAnswer | None:
        """The answer of a turn of this key, if the conversation has it."""
        return next((answer for answer in self._record.answers if answer.key == key), None)

    def continued_by(
        self, whole: PicturePrompt, messages: list[dict[str, Any]], answer: KeyedAnswer | None = None
    ) -> Record:
        """The record as it is after a turn that ended with these."""
        record, tokens = self._record.copy(), whole.tokens
        same = common(record.prompt.identities, whole.identities)
        # The whole conversation may have been sent again, and differ early: what stood after that is gone.
        record.turns = [turn for turn in record.turns if turn.tokens <= same and turn.messages <= len(messages)]
        if same == len(record.tokens):
            before = Moment(same, min(len(record.messages), len(messages)))
            record.turns = [*(turn for turn in record.turns if turn.tokens < same), before][-UNDOS:]
        record.marks = [mark for mark in record.marks if mark.tokens <= same and mark.messages <= len(messages)]
        answers = [known for known in record.answers if known.stop <= same]
        record.answers = [*answers, *([] if answer is None else [answer])][-ANSWERS:]
        record.tokens, record.messages, record.media = tokens, messages, list(whole.media)
        return record

    def adopt(self, record: Record, stored: SavedSession | None = None) -> None:
        """The conversation is this now; with `stored`, it is in the store."""
        self._record = record
        if stored is not None:
            self.confirm(stored)
        self._running = None

    def confirm(self, stored: SavedSession) -> None:
        """The next change follows this record of the store, or a newer one that is known already."""
        if stored.generation > self._generation:
            self._generation, self._changes = stored.generation, stored.changes

    def saved(self, record: Record | None) -> SavedSession:
        """The next generation for a store; None: it is closed."""
        tokens, text = ([], "") if record is None else (list(record.tokens), record.to_json())
        self._written += 1
        change = f"{self._writer}.{self._written}"
        return SavedSession(self.name, tokens, text, self._generation + 1, (*self._changes, change)[-CHANGES:])

    def wrote(self, saved: SavedSession) -> bool:
        """Whether a record in the store is this session's own, even if its write seemed to fail."""
        return saved.writer == self._writer

    def refresh(self) -> None:
        """Adopt a newer record of the store, unless a request or a change is under way."""
        if self._lock.acquire(blocking=False):
            try:
                if not self._closed and (self._running is None or self._running.done):
                    self._engine.refresh(self)
            finally:
                self._lock.release()

    @property
    def closed(self) -> bool:
        return self._closed

    def give_up(self) -> None:
        """The request failed: the conversation is as it was."""
        self._running = None

    @property
    def record(self) -> Record:
        return self._record

    def refuse_other(self, engine: SessionHost) -> None:
        """Raise StateError if it is a session of another engine."""
        if self._engine is not engine:
            raise StateError(f"session {self.name!r} is of another engine: give its name, or save it and load it here")

    def _refuse_busy(self) -> None:
        if self._closed:
            raise StateError(f"session {self.name!r} was closed: `Engine.session` begins another one of this name")
        if self._running is not None and not self._running.done:
            raise SessionBusy(f"session {self.name!r} is answering: wait for the request, or cancel it")

    def _refresh(self) -> None:
        with suppress(StoreUnreachable):  # the commit finds out
            self._engine.refresh(self)

    @contextmanager
    def _resting(self) -> Iterator[Record]:
        """A copy of the newest record, for as long as no request runs."""
        self._engine.refuse_closed()
        with self._lock:
            self._refuse_busy()
            self._refresh()
            yield self._record.copy()

    @contextmanager
    def _changing(self) -> Iterator[Record]:
        """A copy of the record that is stored, then counts, once the block ends."""
        with self._resting() as record:
            yield record
            self._engine.commit(self, record)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the common prefix of two texts."""
    most = min(len(one), len(other))
    return next((at for at in range(most) if one[at] != other[at]), most)
