"""A front with all that the server asks of an engine: sessions of the shared store, and looks at the replicas."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from threading import Event
from time import monotonic
from typing import Any, TypeVar

from torch import Tensor

from lmstate.cluster.front import Front
from lmstate.cluster.handle import ReplicaLost
from lmstate.cluster.key import RouteKey, route_key
from lmstate.cluster.placement import RouteCosts
from lmstate.cluster.remote import LOOK, CallLoop, RemoteReplica
from lmstate.cluster.wire import WireFacts
from lmstate.engine.conversations import Conversations, taken
from lmstate.engine.options import check_length
from lmstate.engine.prefix.picture import Prefix
from lmstate.engine.request import Request
from lmstate.engine.results import EngineClosed, NoReplica, ReplicaStatus, Reuse
from lmstate.engine.session import Session, check_name
from lmstate.engine.session_record import Record
from lmstate.engine.tiers import RecordStore, open_tier
from lmstate.engine.tiers.fetch import PatientRecords
from lmstate.engine.tiers.records import insist
from lmstate.errors import RanksError, StateError, UnsupportedError
from lmstate.files.atomic import atomic_write
from lmstate.generation.params import SamplingParams
from lmstate.generation.transcript import WordsQuestion
from lmstate.models.config import ModelConfig
from lmstate.models.describe import WeightTotals
from lmstate.models.readers import CheckpointReaders
from lmstate.speculation import DraftReport
from lmstate.state import Snapshot
from lmstate.state.validate import token_ids
from lmstate.text.replay import Replay
from lmstate.text.tokenizer import Tokenizer
from lmstate.vision.mmproj import Mmproj
from lmstate.vision.reader import PicturePrompt

Found = TypeVar("Found")

NO_STORE = "the replicas share no store, so that there are no sessions: start the server with --store URL"
NO_WORD_TIMES = "a server with replicas does not tell when words are said: ask for segments"
PATIENCE = 120.0  # seconds that a request waits for Ray to replace the last replica


@dataclass(frozen=True)
class FrontFiles:
    """The part of a checkpoint that a front reads: its tokenizer, if it has one, and its folder, for pictures.

    `mmproj`: the vision tower of a GGUF model.
    """

    tokenizer: Tokenizer | None = None
    folder: Path | None = None
    mmproj: Mmproj | None = None

    @staticmethod
    def of(name: str, mmproj: str | None = None) -> FrontFiles:
        """Of the checkpoint of this name, as `lmstate.load` takes it. Raises as that does."""
        from lmstate.checkpoints.hub import resolve
        from lmstate.checkpoints.open import open_checkpoint

        opened, tokenizer, _ = open_checkpoint(name, progress=False)
        path = opened.source.path
        tower = None if mmproj is None else Mmproj.open(resolve(mmproj))
        return FrontFiles(tokenizer, path if path.is_dir() else None, tower)


@dataclass
class RemoteModel(CheckpointReaders):
    """The part of a model that a front has: its files beside the weights, and its limits as a replica tells them."""

    fingerprint: str
    config: ModelConfig
    blocks: range  # as many as there are layers
    max_positions: int | None
    context_size: int | None
    weight_totals: WeightTotals
    eos_ids: frozenset[int]
    start_id: int | None
    hears: bool
    defaults: dict[str, Any]
    _tokenizer: Tokenizer | None
    folder: Path | None = None
    mmproj: Mmproj | None = None
    name: str = ""
    no_pictures: str | None = None
    no_word_times: str | None = NO_WORD_TIMES

    @staticmethod
    def of(facts: WireFacts, files: FrontFiles) -> RemoteModel:
        return RemoteModel(
            facts.fingerprint,
            facts.config,
            range(facts.layers),
            facts.max_positions,
            facts.context_size,
            facts.weights,
            frozenset(facts.eos_ids),
            facts.start_id,
            facts.hears,
            facts.defaults,
            files.tokenizer,
            files.folder,
            files.mmproj,
            no_pictures=facts.no_pictures,
        )


class ServingFront(Front):
    """A front over remote replicas in the place of an engine.

    files  of the checkpoint that the replicas serve
    store  URL of the store that all replicas share; None: there is none, and no sessions
    loop   on which the replicas are called; it is closed with the front
    """

    def __init__(
        self,
        replicas: Sequence[RemoteReplica],
        files: FrontFiles,
        store: str | None,
        *,
        loop: CallLoop,
        costs: RouteCosts | None = None,
    ) -> None:
        model = RemoteModel.of(replicas[0].facts, files)
        costs = costs or RouteCosts(fetch=None if store is None else 0.01)
        super().__init__(replicas, model, costs=costs, patience=PATIENCE)
        self._tier = None if store is None else open_tier(store, self.namespace, 0)
        self._conversations = Conversations(model, None, Replay(), self._tier)
        self._loop = loop

    # ---- sessions: records are the store's, turns are made at replicas

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return self.model.has_tokenizer and self.model.tokenizer.has_chat_template

    def submit(self, prompt: Any = None, params: SamplingParams | None = None, **options: Any) -> Request:
        """`Front.submit`, that takes a `Session` too."""
        session, key = options.pop("session", None), options.get("idempotency_key")
        if session is None:
            return super().submit(prompt, params, **options)
        salt = options.pop("salt", "")
        conversation = session if isinstance(session, Session) else self.session(session, salt)
        conversation.refuse_other(self)
        if salt not in ("", conversation.salt):
            raise ValueError(f"session {conversation.name!r} has another salt: leave it out")
        options["salt"] = conversation.salt
        name, begun = conversation.name, Event()

        def settle() -> None:
            begun.wait()
            conversation.give_up()  # the replica has stored the turn, or there is none
            conversation.refresh()

        def begin() -> Request:
            return super(ServingFront, self).submit(prompt, params, session=name, settle=settle, **options)

        try:
            return conversation.begin(begin, key)
        finally:
            begun.set()

    def session(self, name: str, salt: str = "") -> Session:
        """The conversation of this name; a new one if there is none. Raises ValueError for an invalid name."""
        self._refuse_storeless()
        return self.find_session(name, salt) or self._conversations.add(Session(self, name, Record(), salt))

    def find_session(self, name: str, salt: str = "") -> Session | None:
        """The conversation of this name, if there is one in the store."""
        self.refuse_closed()
        check_name(name)
        return self._conversations.find(name, self, salt)

    def sessions(self) -> list[str]:
        return self._conversations.names()

    def new_session(self, name: str, record: Record, salt: str = "") -> Session:
        """A conversation that begins with what is recorded. Raises ValueError if there is one of this name."""
        self._refuse_storeless()
        if self.find_session(name, salt) is not None:
            raise taken(name)
        return self._conversations.create(Session(self, name, record, salt))

    def refresh(self, session: Session) -> None:
        self._conversations.refresh(session)

    def commit(self, session: Session, record: Record) -> None:
        self._conversations.commit(session, record)

    def changed(self, session: Session) -> None:
        """Nothing: replicas adopt the record when they are asked to go on from it."""

    def close_session(self, session: Session) -> None:
        self._conversations.drop(session)

    def save_session(self, record: Record, path: Path, salt: str = "", name: str | None = None) -> None:
        """As `Engine.save_session`, at the replica that has the state, or at the next one if that is lost."""
        lost: ReplicaLost | None = None
        for replica in self._remote_by_choice(route_key(record.prompt.identities, session=name, tenant=salt)):
            try:
                with atomic_write(path) as part:
                    replica.save_session(record, part, salt)
                return
            except ReplicaLost as error:
                lost = error
        raise lost or NoReplica()

    def load_session(self, name: str, path: str | os.PathLike[str], salt: str = "") -> Session:
        """As `Engine.load_session`, at the replica that the session's turns go to then, or at the next one if that is
        lost."""
        self._refuse_storeless()
        find = partial(self.find_session, name, salt)
        key, lost = route_key([], session=name, tenant=salt), list[ReplicaLost]()
        if insist(find) is not None:
            raise taken(name)
        for replica in self._remote_by_choice(key):
            try:
                replica.load_session(name, Path(path), salt)
            except ReplicaLost as error:
                lost.append(error)
                if (session := insist(find)) is None:
                    continue
                if session.record != Record.of(Snapshot.load(path, mmap=True)):  # of another sender
                    raise taken(name) from None
                return session  # the replica was lost after it had stored it
            if (session := insist(find)) is None:
                raise StateError(f"session {name!r} was closed while it was loaded")
            with self._lock:
                self._placement.sent(replace(key, tokens=len(session.tokens)), replica.id)
            return session
        raise lost[-1] if lost else NoReplica()

    def stored_records(self) -> RecordStore | None:
        """Records of others than sessions in the store, for callers that can wait; None without a store."""
        return None if self._tier is None else PatientRecords(self._tier.stored)

    @property
    def failure(self) -> RanksError | None:
        """None: a replica whose model was lost is replaced."""
        return None

    @property
    def unstored(self) -> int:
        """Sessions whose last turn the store did not take yet."""
        return sum(replica.unstored for replica in self.replicas)

    def _refuse_storeless(self) -> None:
        if self._tier is None:
            raise UnsupportedError(NO_STORE)

    # ---- looking in

    def explain(
        self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | PicturePrompt, salt: str = ""
    ) -> Reuse:
        """Tokens of a prompt that would be reused now where it would go, and why not more."""
        read = self._read(prompt, salt)
        return self._at_home("explain", Reuse, read, salt)

    def held(self, tokens: Sequence[int] | PicturePrompt, salt: str = "") -> dict[str, int]:
        """Bytes of a state that has these tokens, by layer kind, where it would go."""
        prompt = tokens if isinstance(tokens, PicturePrompt) else PicturePrompt(list(tokens))
        return self._at_home("held", dict[str, int], prompt, salt)

    def prefixes(self, tokens: Sequence[int] = (), salt: str | None = None) -> list[Prefix]:
        """The runs of tokens in the prefix store of the replica that a prompt of these tokens would go to."""
        return self._at_home("prefixes", list[Prefix], PicturePrompt(list(tokens)), salt)

    def rewind_window(self) -> int | None:
        return self._at_home("rewind_window", list[int | None], PicturePrompt([0]), None)[0]

    def tree(self, salt: str | None = None) -> str:
        """The prefix stores of all replicas as text."""
        return "\n".join(f"replica {rank}\n{tree}" for rank, tree in self._looks("tree", str, salt))

    def clear_prefixes(self, salt: str | None = None) -> None:
        self._looks("clear_prefixes", type(None), salt)

    def at_work(self) -> list[int]:
        """Requests that have the rows now, each by a number of its own."""
        found = self._looks("at_work", list[int])
        count = 1 + max((rank for rank, _ in found), default=0)
        return [number * count + rank for rank, numbers in found for number in numbers]

    def resident(self) -> list[str]:
        return [digest for _, digests in self._looks("resident", list[str]) for digest in digests]

    def draft_report(self) -> DraftReport:
        """Tokens drafted and accepted by all replicas."""
        reports = [report for _, report in self._looks("drafts", DraftReport)]
        deepest = max((len(report.verified) for report in reports), default=0)

        def added(lists: list[tuple[int, ...]]) -> tuple[int, ...]:
            return tuple(sum(one[at] for one in lists if at < len(one)) for at in range(deepest))

        return DraftReport(
            sum(report.drafted for report in reports),
            sum(report.accepted for report in reports),
            added([report.verified for report in reports]),
            added([report.held for report in reports]),
            sum(report.drafting_seconds for report in reports),
            sum(report.seconds_saved for report in reports),
        )

    def embed(self, tokens: Sequence[int], pooling: str = "mean") -> Future[Tensor]:
        """As `Engine.embed`, at the replica that is estimated to read it soonest. Waits for one as `submit` does."""
        ids = token_ids(tokens, "the text", self.model.config.ids)
        check_length(self.model, ids)
        return self._loop.start(self._embedded(ids, pooling))

    def word_ends(self, question: WordsQuestion) -> Future[list[int]]:
        raise UnsupportedError(NO_WORD_TIMES)

    async def _embedded(self, tokens: list[int], pooling: str) -> Tensor:
        until = monotonic() + self._patience
        waits = False
        try:
            while True:
                for replica in self._remote_by_choice(route_key(tokens)):
                    with suppress(ReplicaLost, EngineClosed):
                        return await replica.embed(tokens, pooling)
                with self._lock:
                    self._refuse_ending()
                    if monotonic() >= until or not (waits or self._may_wait()):
                        raise NoReplica()
                    self._texts_waiting += not waits
                    waits = True
                await asyncio.sleep(LOOK)
        finally:
            with self._lock:
                self._texts_waiting -= waits

    def replica_statuses(self) -> list[ReplicaStatus]:
        """The replicas that are not lost, by rank."""
        with self._lock:
            states = self._placement.states()
        found = []
        for one in sorted(self.remote(), key=lambda replica: replica.rank):
            takes = one.takes and one.id not in self._draining
            found.append(
                ReplicaStatus(one.rank, one.id, one.facts.pid, takes, states[one.id], one.hit_rate, one.load())
            )
        return found

    def session_rank(self, name: str, salt: str = "") -> int | None:
        """The rank of the replica that a session was last sent to by this front."""
        with self._lock:
            id = self._placement.home(route_key([], session=name, tenant=salt))
        return next((replica.rank for replica in self.replicas if replica.id == id), None)

    def drain_rank(self, rank: int, seconds: float = 0.0) -> bool:
        """Have the replica of a rank end its answers within `seconds`, or go on elsewhere; Ray replaces it then.

        Returns whether the store took all that was computed. Raises ValueError for a rank that is not there.
        """
        replicas = {replica.rank: replica for replica in self.replicas}
        if rank not in replicas:
            raise ValueError(f"there is no replica of rank {rank}; expected one of {sorted(replicas)}")
        return self.drain_replica(replicas[rank].id, seconds)

    def close(self) -> None:
        """Close it, the store, and the replicas if they are its own."""
        super().close()
        if self._tier is not None:
            self._tier.close()
        self._loop.close()

    def remote(self) -> list[RemoteReplica]:
        """The replicas that are not lost."""
        return [replica for replica in self.replicas if isinstance(replica, RemoteReplica) and not replica.lost]

    def _at_home(self, about: str, kind: type[Found], prompt: PicturePrompt, salt: str | None) -> Found:
        """The answer of the replica that a prompt would go to, or of the next one if that is lost."""
        for replica in self._remote_by_choice(route_key(prompt.identities, tenant=salt or "")):
            with suppress(ReplicaLost):
                return replica.look(about, kind, prompt, salt)
        raise NoReplica()

    def _looks(self, about: str, kind: type[Found], salt: str | None = None) -> list[tuple[int, Found]]:
        """The answer of each replica, with its rank; of those that are lost meanwhile there is none."""
        found = []
        for replica in self.remote():
            with suppress(ReplicaLost):
                found.append((replica.rank, replica.look(about, kind, None, salt)))
        return found

    def _remote_by_choice(self, key: RouteKey) -> Iterator[RemoteReplica]:
        return (replica for replica in self.by_choice(key) if isinstance(replica, RemoteReplica))
