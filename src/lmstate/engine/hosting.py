"""The conversations of an engine, for any thread."""

from __future__ import annotations

import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmstate.engine.conversations import Conversations, taken
from lmstate.engine.options import check_salt
from lmstate.engine.request import Request
from lmstate.engine.results import EngineClosed
from lmstate.engine.reuse import PrefixReuse
from lmstate.engine.session import Session, check_name
from lmstate.engine.session_record import Record
from lmstate.engine.thread import EngineThread
from lmstate.engine.tiers import RecordStore
from lmstate.engine.tiers.fetch import PatientRecords
from lmstate.engine.tiers.records import insist
from lmstate.errors import SnapshotError
from lmstate.generation.prompts import refuse_no_messages
from lmstate.state import Snapshot, State
from lmstate.state.validate import token_ids
from lmstate.text.replay import Replay
from lmstate.vision.reader import PicturePrompt, named, pictures_of

if TYPE_CHECKING:
    from lmstate.models.model import Model


class SessionEngine(EngineThread):
    """An engine's sessions, and the tokens of chat messages as its answers were sampled."""

    _conversations: Conversations
    _reuse: PrefixReuse
    _replay: Replay

    @abstractmethod
    def submit(self, prompt: Any, *, session: Any, **options: Any) -> Request: ...

    @abstractmethod
    def _new_state(self, rows: int) -> State: ...

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.model.has_tokenizer and self.model.tokenizer.has_chat_template

    def session(self, name: str, salt: str = "") -> Session:
        """The conversation of this name; a new one if there is none. Raises ValueError for an invalid name.

        `salt`: of its prefixes, as in `submit`; a session that is open keeps the one that it was opened with.
        """
        return self.find_session(name, salt) or self._conversations.add(Session(self, name, Record(), salt))

    def find_session(self, name: str, salt: str = "") -> Session | None:
        """The conversation of this name, if there is one: here, or left in the store by another process since."""
        self.refuse_closed()
        check_name(name)
        check_salt(salt)
        return self._conversations.find(name, self, salt)

    def sessions(self) -> list[str]:
        """The names of the conversations that are kept, those in the store included, which is asked."""
        return self._conversations.names()

    def encode(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The ids of chat messages, this engine's answers as they were sampled; `variables` as in `Tokenizer.chat`.

        Raises ValueError for anything but messages, and for pictures in them, which `Model.encode` reads.
        """
        refuse_no_messages(messages)
        if pictures_of(messages):
            raise ValueError("messages with pictures cannot become ids alone: submit them, or use Model.encode")
        return self._replay.encode(self.model.tokenizer, messages, **variables)

    def remember(self, messages: Sequence[Mapping[str, Any]], tokens: Sequence[int], **variables: Any) -> None:
        """Have `encode` find these tokens for a conversation that ends with an answer in another form, see `Replay`.

        Raises ValueError for anything but messages or token ids.
        """
        refuse_no_messages(messages)
        tokens = token_ids(tokens, "the answer", self.model.config.ids)
        self._replay.remember(named(messages), tokens, **variables)

    def new_session(self, name: str, record: Record, salt: str = "") -> Session:
        """A conversation that begins with what is recorded. Raises ValueError if there is one of this name."""
        return self._new_session(name, record, salt)

    def _new_session(self, name: str, record: Record, salt: str, *, patient: bool = False) -> Session:
        find = partial(self.find_session, name, salt)
        if (insist(find) if patient else find()) is not None:
            raise taken(name)
        session = self._conversations.create(Session(self, name, record, salt), patient=patient)
        self._conversations.remember(record, salt)
        self.changed(session)
        return session

    def load_session(self, name: str, path: str | os.PathLike[str] | Snapshot, salt: str = "") -> Session:
        """A conversation from a file that `Session.save` wrote, or from the snapshot in it. Raises SnapshotError for a
        damaged file, or one of another kind, ValueError if there is a session of this name, and StoreUnreachable if the
        store fails for longer than a few seconds."""
        snapshot = path if isinstance(path, Snapshot) else Snapshot.load(path)
        try:
            record = Record.of(snapshot)
        except ValueError as error:
            raise SnapshotError(f"{'it' if path is snapshot else path} holds no session of lmstate: {error}") from None

        def take(_: Model) -> None:
            state = self._new_state(1)
            state.restore(0, snapshot)  # checks all of it
            self._reuse.keep(state.snapshot(0), self._work.row_bytes(), salt)

        check_salt(salt)
        self._called(take)
        return self._new_session(name, record, salt, patient=True)

    def save_session(self, record: Record, path: Path, salt: str = "", name: str | None = None) -> None:
        """See `SessionHost.save_session`."""
        snapshot = self._called(lambda _: self._held(record.prompt, salt).snapshot(0))
        replace(snapshot, notes=record.to_json()).save(path)

    def held(self, tokens: Sequence[int] | PicturePrompt, salt: str = "") -> dict[str, int]:
        """Bytes of a state that has these tokens, by layer kind, as far as they are in memory: see `State.memory`."""
        prompt = tokens if isinstance(tokens, PicturePrompt) else PicturePrompt(list(tokens))
        return self._called(lambda _: self._held(prompt, salt).memory())

    def _held(self, prompt: PicturePrompt, salt: str) -> State:
        """A state of what memory keeps of some tokens, the others queued. For the engine's thread."""
        state = self._reuse.resume(prompt, salt)
        state.queue(0, prompt.tokens[state.lengths[0] :])
        return state

    def close_session(self, session: Session) -> None:
        """Forget a conversation."""
        self._conversations.drop(session)
        with suppress(EngineClosed):
            self.call(lambda _: self._conversations.release(session))

    def changed(self, session: Session) -> None:
        """A session is elsewhere now: what going on from there needs is to stay, and its last answer to be known."""
        self._conversations.remember_at(session.record, session.record.moment(), session.salt)
        self._called(lambda _: self._conversations.hold(session, session.record))

    def refresh(self, session: Session) -> None:
        """Adopt a newer record of a session, which rests, from the store."""
        self._conversations.refresh(session)

    def commit(self, session: Session, record: Record) -> None:
        """Store a session's next record, which counts then."""
        self._conversations.commit(session, record)

    def stored_records(self) -> RecordStore | None:
        """Records of others than sessions in the store, for callers that can wait; None without a store."""
        return None if self._tier is None else PatientRecords(self._tier.stored)
