"""The engine: many requests on one model, in one ragged batch that they join and leave at any step."""

from __future__ import annotations

import atexit
import os
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from pathlib import Path
from threading import Condition, Event, Thread, current_thread
from time import monotonic, sleep
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from torch import Tensor

from lmstate.engine.conversations import Conversations
from lmstate.engine.delivery import Delivery
from lmstate.engine.drafting import Drafting
from lmstate.engine.embedding import EmbeddedText
from lmstate.engine.job import Job, Reader, Terms
from lmstate.engine.memory import RowCost
from lmstate.engine.options import (
    answered_ids,
    as_bytes,
    check_length,
    check_salt,
    read_prompt,
    read_sourced,
    refuse_sourceless,
)
from lmstate.engine.pace import Pace
from lmstate.engine.prefix.picture import Prefix, picture, prefixes, resident
from lmstate.engine.queue import Queue
from lmstate.engine.request import Request
from lmstate.engine.results import Completion, EngineClosed, Load, Piece, ReplicaStatus, Reuse, Usage, hit_rate
from lmstate.engine.reuse import PrefixReuse
from lmstate.engine.rows import RowPool
from lmstate.engine.scheduler import Scheduler
from lmstate.engine.session import KeyedAnswer, Record, Session, check_name
from lmstate.engine.tiers import RecordStore, Store, Tier, open_tier
from lmstate.engine.tiers.fetch import PatientRecords
from lmstate.engine.workload import Workload
from lmstate.errors import RanksError, SnapshotError, UnsupportedError
from lmstate.generation.params import SamplingParams, sampling_params
from lmstate.generation.prompts import are_messages, refuse_no_messages
from lmstate.generation.row import AnswerRow
from lmstate.generation.thinking import ThinkingFormat
from lmstate.speculation import DraftChoice, DraftReport
from lmstate.state import BlockPool, Snapshot, SourceFeatures, State
from lmstate.state.kv.policies.base import Policy
from lmstate.state.kv.policies.per_layer import policies_of
from lmstate.state.media import PICTURED
from lmstate.state.validate import token_ids, whole_number
from lmstate.text.replay import Replay
from lmstate.threads import release_threads
from lmstate.vision.reader import PicturePrompt, named, pictures_of

if TYPE_CHECKING:
    from lmstate.models.model import Model

Result = TypeVar("Result")

CLOSED = "the engine was closed: make another one"
DRAIN_LOOK = 0.01  # seconds between two looks at whether all requests have ended
FLUSH_SECONDS = 30.0  # that draining waits for the store
IDLE = 0.05  # seconds between two looks at requests that cannot begin yet; what they wait for wakes the thread before


class Engine:
    """Runs requests on a model, many at a time, on a thread of its own. Close it, or use `with` or `async with`.

    rows    sequences that are worked on at a time
    memory  bytes for the rows and for what is kept of them for reuse, together: a number, or "4GiB"; where rows have
            no room, those of the lowest priority that came last give theirs back, and go on later
    store   where prefixes and sessions are kept beside memory, and found after a restart: a folder, "redis://host",
            "s3://bucket/path" and what else obstore knows, or one of your own (`lmstate.engine.Blobs` and `Tier`); a
            folder holds at most `store_bytes`
    queue   requests that may wait beside them; more raise `QueueFull`
    max_itl  milliseconds between two tokens of an answer, at most, while other prompts are read
    stall   the same as a multiple of the usual gap. With both, the larger is the bound; by default they are 80 and 3
    draft   who proposes tokens that the model verifies several at a step: "text" (the request's own text, and earlier
            answers), "heads" (the model's own, of one loaded with heads=True), a smaller model, a
            `lmstate.speculation.Drafter`, or None. "auto" is the text, and the heads where there are some. No answer
            changes
    kv      how keys and values are stored, as in `model.new_state`
    durable with a store: "turn" ends a session's turn once its record is stored (or `Completion.stored` is False, and
            it is tried again), "none" does not wait for that
    """

    def __init__(
        self,
        model: Model,
        rows: int = 8,
        memory: int | str = "4GiB",
        store: Store | Tier | None = None,
        *,
        store_bytes: int | str = "64GiB",
        kv: Any = None,
        draft: DraftChoice = "auto",
        queue: int = 256,
        max_itl: float | None = None,
        stall: float | None = None,
        durable: Literal["turn", "none"] = "turn",
    ) -> None:
        if isinstance(model, str | os.PathLike):
            raise ValueError(f"an Engine takes a model; lmstate.load({os.fspath(model)!r}) gives it")
        if not hasattr(model, "new_state"):
            raise ValueError(f"an Engine takes a model, which lmstate.load gives; {model!r:.80} was given")
        rows, queue = whole_number(rows, "rows"), whole_number(queue, "queue")
        if rows < 1 or queue < 1:
            raise ValueError(f"rows={rows}, queue={queue} were asked for; both are at least 1")
        if durable not in ("turn", "none"):
            raise ValueError(f"unknown durable={durable!r}; expected 'turn' or 'none'")
        state = model.new_state(kv=kv)
        if state.conditioned and not isinstance(draft, str | None):
            raise UnsupportedError(
                f"a drafter was given for a {model.config.family} model, whose tokens read a source that the drafter "
                "does not: leave it out, or give 'text'"
            )
        pace = Pace.bounded(max_itl, stall)
        memory, store_bytes = as_bytes(memory), as_bytes(store_bytes)
        self._cost = RowCost.of(model, lambda: model.new_state(kv=kv))
        self._cost.refuse_too_little(memory)
        drafting = Drafting(draft, model, rows, memory, state)
        self.model = model
        self.rows = rows
        self._kv = kv
        # A function has no name that holds in another process; what it gives for each layer has.
        policies = policies_of(kv, len(model.blocks)) if callable(kv) and not isinstance(kv, Policy) else kv
        self.namespace = f"{model.fingerprint} dtype={model.dtype} kv={policies!r}"  # of what can be gone on from
        if store is not None and not isinstance(store, Tier):
            store = open_tier(store, self.namespace, store_bytes)
        if store is not None:
            store.most_read = memory
        self._tier: Tier | None = store
        self._queue, self._replay = Queue(queue), Replay()
        self._delivery = Delivery()
        self._blocks = BlockPool()  # of all rows, and of what is kept
        self._reuse = PrefixReuse(model, self._new_state, memory, self._tier, pace, self._wake)
        self._conversations = Conversations(
            model, self._reuse.prefixes, self._replay, self._tier, durable=durable == "turn"
        )
        pool: RowPool[AnswerRow | Reader] = RowPool(model, self._new_state, rows)
        self._work = Workload(
            model, pool, self._queue, self._reuse, self._blocks, drafting, self._conversations.ended, self._delivery
        )
        self._scheduler = Scheduler(self._work, self._cost, pace, drafting)
        self._drafting = drafting
        self._commands: deque[tuple[Callable[[Model], Any], Future[Any]]] = deque()
        self._changed = Condition()
        self._closed = self._forked = self._draining = False
        self._order = 0
        ready = Event()
        arguments = (weakref.ref(self), self._changed, ready, self._tier)
        release_threads()  # the engine's thread has its own from here on
        self._thread = Thread(target=_serve, args=arguments, name="lmstate-engine", daemon=True)
        self._thread.start()
        ready.wait()
        # A daemon thread inside native code while the interpreter goes away can crash it.
        self._at_exit = _closer(weakref.ref(self))
        atexit.register(self._at_exit)
        _engines.add(self)

    # ---- for any thread

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | PicturePrompt | None = None,
        params: SamplingParams | None = None,
        *,
        source: str | Sequence[int] | SourceFeatures | None = None,
        priority: int = 0,
        deadline: float | None = None,
        session: str | Session | None = None,
        itl: float | None = None,
        idempotency_key: str | None = None,
        answered: Sequence[Sequence[int]] = (),
        salt: str = "",
        sender: str = "",
        **changes: Any,
    ) -> Request:
        """Queue a request: a text, token ids, chat messages, or what `Model.encode` made of them. Returns at once.

        Pictures in messages go through the model's tower first, on the thread that calls: the engine goes on meanwhile.

        params    a `lmstate.SamplingParams`. Its fields can be given by name too, and count before it:
                  `submit(prompt, max_new_tokens=20, temperature=0.7)`
        source    what the tokens of a model with an encoder read: a text, ids or a sound. The prompt is then what the
                  answer begins with, or None, as in `model.generate(prompt, source=source)`. The encoder reads it as
                  one piece when the request is begun, and not again while the prefix store keeps what it made of it
        priority  larger ones first among those of a sender; one step is worth ten seconds of waiting
        deadline  seconds from now, after which it ends as it is
        session   a conversation, or its name, that the prompt goes on with: see `Session.send`
        itl       milliseconds between two tokens of its answers, at most, while other prompts are read; None: as the
                  engine's. Smaller ones make others wait longer for their first token
        idempotency_key  of a session's turn: if the session has a turn of this key, its answer is returned and no turn
                  is added; if one is being answered, that request. A turn of a key that is cancelled is not kept
        answered  for each of the `n` answers the tokens that it began with elsewhere, as they were sent: it goes on
                  after them as if it had not been interrupted. Its pieces are those that follow; its completion is
                  whole. The prompt and the parameters are to be the same, with a seed if tokens are drawn
        salt      only texts of the same salt share what was computed, and earlier answers to draft from, so that the
                  times of one sender tell nothing of another's texts. It is written to a store as it is. A session has
                  its own
        sender    the name of the sender: senders share the rows evenly, one request of each in turn. By default all
                  requests are of one sender

        `Request.end_thinking` ends a thinking section at any moment, as `max_thinking_tokens` does.

        Raises ValueError for what is out of range, TypeError for an unknown option, UnsupportedError for a limit on the
        thinking of a model that does not think aloud, CapacityError for a prompt that `memory` has no room for,
        `QueueFull`, `EngineClosed`.
        """
        params = sampling_params(params, changes)
        params.check(self.model)
        terms = Terms(params, priority, deadline, itl, idempotency_key, salt, sender)
        told = answered_ids(answered, params, self.model)
        if source is not None:
            if session is not None:
                raise ValueError("a session and a source were given, and sessions have no sources: leave one out")
            prompt = read_sourced(self.model, source, prompt)
        if session is None:
            if idempotency_key is not None:
                raise ValueError("an idempotency_key was given; it is for turns of a session")
            messages = [dict(message) for message in prompt] if are_messages(prompt) else []  # the list is the caller's
            encoded = self._encoded(prompt, salt)
            return self._queued(encoded, self._constrained(terms, messages, encoded), messages, None, told)
        conversation = session if isinstance(session, Session) else self.session(session, salt)
        conversation.refuse_other(self)
        if salt not in ("", conversation.salt):
            raise ValueError(f"session {conversation.name!r} has another salt: leave it out")
        terms = replace(terms, salt=conversation.salt)

        def begin() -> Request:
            if idempotency_key is not None and (known := conversation.answered(idempotency_key)) is not None:
                return self._told_again(known, conversation)
            whole, messages = conversation.continued(prompt, partial(self._encoded, salt=conversation.salt))
            return self._queued(whole, self._constrained(terms, messages, whole), messages, conversation, told)

        return conversation.begin(begin, idempotency_key)

    def _constrained(self, terms: Terms, messages: list[dict[str, Any]], prompt: PicturePrompt) -> Terms:
        """The terms with what constrains the answer compiled; the answer to messages may think first."""
        return replace(terms, params=terms.params.compiled(self.model, prompt.tokens if messages else None))

    def _told_again(self, answer: KeyedAnswer, session: Session) -> Request:
        """A request that ended with this answer of a session."""
        request = Request(session.tokens[: answer.prompt], self._wake, delivery := Delivery())
        request.begin(answer.prompt)
        request.push(Piece(answer.text, 0, answer.tokens, None, answer.finished))
        usage = Usage(answer.prompt, answer.prompt, 0, reuse=Reuse(answer.prompt, 0))
        completion = Completion(
            texts=[answer.text],
            tokens=[answer.tokens],
            certain=[len(answer.tokens)],
            logprobs=None,
            prompt_logprobs=None,
            finished=[answer.finished],
            stopped_by=[None],
            usage=usage,
            stored=None if self._tier is None else session.generation > 0 and not self.unstored,
        )
        request.finish(completion, delivery)
        return request

    def _encoded(self, prompt: Any, salt: str) -> PicturePrompt:
        read = read_prompt(self.model, prompt, self._replay, salt)
        if read.media and (why := self._new_state(1).refuses_media(read.tokens, read.media)) is not None:
            raise ValueError(f"the prompt has pictures that do not fit: {why}")
        return read

    def _thinking_format(self) -> ThinkingFormat:
        return ThinkingFormat.of(self.model.tokenizer)

    def _queued(
        self, prompt: PicturePrompt, terms: Terms, messages: Any, session: Session | None, told: list[list[int]]
    ) -> Request:
        refuse_sourceless(self.model, prompt)
        check_length(self.model, prompt.tokens)
        length = len(prompt.tokens) + max(map(len, told), default=0)
        self._cost.refuse_too_long(length, self._reuse.memory, self._cost.beside(prompt))
        request = Request(prompt.tokens, self._wake, self._delivery, self._thinking_format)
        with self._changed:
            self.refuse_closed()
            if self._draining:
                raise EngineClosed("the engine is being drained: it takes no more requests")
            self._queue.add(Job(request, terms, self._order, prompt, messages, session, told))
            self._order += 1
            self._work.counts["requests"] += 1
            self._work.counts["pictures"] += len(prompt.media)
            self._work.counts["picture_seconds"] += prompt.seconds
            self._changed.notify_all()
        return request

    # ---- conversations

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
        tokens = token_ids(tokens, "the answer", self.model.config.vocab_size)
        self._replay.remember(named(messages), tokens, **variables)

    def new_session(self, name: str, record: Record, salt: str = "") -> Session:
        """A conversation that begins with what is recorded. Raises ValueError if there is one of this name."""
        if self.find_session(name, salt) is not None:
            raise ValueError(f"there is a session {name!r} already: close it, or take another name")
        session = self._conversations.create(Session(self, name, record, salt))
        self._conversations.remember(record, salt)
        self.changed(session)
        return session

    def load_session(self, name: str, path: str | os.PathLike[str], salt: str = "") -> Session:
        """A conversation from what `Session.save` wrote. Raises SnapshotError for a damaged file, or one of another
        kind."""
        snapshot = Snapshot.load(path)
        try:
            record = Record.from_json(list(snapshot.tokens), snapshot.notes)
            record.media = list(snapshot.media)
        except ValueError as error:
            raise SnapshotError(f"{path} holds no session of lmstate: {error}") from None

        def take(_: Model) -> None:
            state = self._new_state(1)
            state.restore(0, snapshot)  # checks all of it
            self._reuse.keep(state.snapshot(0), self._work.row_bytes(), salt)

        check_salt(salt)
        self._called(take)
        return self.new_session(name, record, salt)

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
        """A session stands elsewhere now: what going on from there needs is to stay."""
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

    # ---- looking in

    def call(self, function: Callable[[Model], Result]) -> Future[Result]:
        """Run `function(model)` between two steps, on the thread that owns the model."""
        future: Future[Result] = Future()
        with self._changed:
            self.refuse_closed()
            self._commands.append((function, future))
            self._changed.notify_all()
        return future

    def embed(self, tokens: Sequence[int], pooling: str = "mean") -> Future[Tensor]:
        """Read a text, and pool its hidden states after the last norm: float32 `[E]`.

        pooling  "mean" of all tokens, the "last" one's, or the first one's: "cls"

        Cancelling it ends the reading. Raises ValueError for an unknown pooling and for a text that the model cannot
        read.
        """
        ids = token_ids(tokens, "the text", self.model.config.vocab_size)
        check_length(self.model, ids)
        work = self._work
        text = EmbeddedText(self.model, ids, pooling, self.call, lambda: bool(work.reading or work.answering))
        text.go_on()
        return text.vector

    def explain(
        self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | PicturePrompt, salt: str = ""
    ) -> Reuse:
        """Tokens of a prompt that would be reused now, and why not more."""
        read = self._encoded(prompt, salt)

        return self._called(lambda _: self._reuse.explain(read, salt))

    def _called(self, function: Callable[[Model], Result]) -> Result:
        return function(self.model) if current_thread() is self._thread else self.call(function).result()

    def stats(self) -> dict[str, float]:
        """Counters since the start, and what is going on now."""
        work, prefixes = self._work, self._reuse.prefixes
        now: dict[str, float] = {
            **work.counts,
            **self._drafting.counts,
            "waiting": len(self._queue),
            "reading": len(work.reading),
            "decoding": len(work.jobs),
            "set_aside": len(work.preempted),
            "row_bytes": work.row_bytes(),
            "row_bytes_peak": work.peak,
            "prefix_bytes": prefixes.nbytes,
            **{f"prefixes_{name}": number for name, number in prefixes.counts.items()},
        }
        if self._tier is not None:
            now |= {f"{self._tier.name}_{name}": number for name, number in self._tier.counts.items()}
            now["sessions_unstored"] = self.unstored
            now["session_failures"] = self._tier.records.failures
        return now

    @property
    def unstored(self) -> int:
        """Sessions whose last turn the store did not take yet."""
        return 0 if self._tier is None else self._tier.records.unstored

    def at_work(self) -> list[int]:
        """Requests that have the rows now, at most `rows`, each by how many were submitted before it."""
        return self._called(lambda _: [job.order for job in self._work.at_work()][: self.rows])

    def draft_report(self) -> DraftReport:
        """Tokens drafted and accepted since the start, by place in a draft, and the seconds saved."""
        return self._drafting.report()

    def tree(self, salt: str | None = None) -> str:
        """The prefix store as text, a line for each run of tokens; see `lmstate.engine.prefix.picture`.

        `salt`: of the runs to show; None: all.
        """
        return self._called(lambda _: picture(self._reuse.prefixes, self._decoded, salt))

    def prefixes(self, tokens: Sequence[int] = (), salt: str | None = None) -> list[Prefix]:
        """The runs of tokens in the prefix store, those above first; each says whether `tokens` run through it.

        `tokens`: ids, or where pictures stand among them `PicturePrompt.identities`. `salt`: of the runs to tell of;
        None: all.
        """
        return self._called(lambda _: list(prefixes(self._reuse.prefixes, self._decoded, tokens, salt)))

    def clear_prefixes(self, salt: str | None = None) -> None:
        """Forget what was computed and no session needs, so that the next requests compute it again.

        With `salt`, only what was computed under it. A store is not changed; another process, and this one after a
        restart, finds there what it has.
        """
        self._called(lambda _: self._reuse.prefixes.clear(salt))

    def rewind_window(self) -> int | None:
        """Number of positions that a row goes back without computing anything again; None for all of them."""
        return self._new_state(1).layout.rewind if self._reuse.prefixes.split.needs_carry else None

    def _decoded(self, ids: Sequence[int]) -> str:
        """The text of ids, and of numbers of pictures and sources among them."""
        decode = partial(self.model.tokenizer.decode, skip_special_tokens=False) if self.model.has_tokenizer else None
        shown = []
        for pictured, part in groupby(ids, key=lambda id: id >= PICTURED):
            own = list(part)
            if not pictured:
                shown.append(" ".join(map(str, own)) if decode is None else decode(own))
            elif self.model.start_id is not None:
                shown.append("[a source]")
            else:
                shown.append(f"[{len(own)} positions of a picture]")
        return "".join(shown)

    def drain(self, seconds: float = 0.0) -> bool:
        """Take no more requests, and let those that run go on for so long; the others raise `Drained` then.

        Waits until all that was computed is in the store, if there is one; False if it does not take it in time.
        """
        with self._changed:
            self.refuse_closed()
            self._draining = True
        until = monotonic() + seconds
        while monotonic() < until and self._busy():
            sleep(DRAIN_LOOK)
        self._called(lambda _: self._work.drain())
        return self._tier is None or self._tier.flush(FLUSH_SECONDS)

    def replica_statuses(self) -> list[ReplicaStatus]:
        """This engine as the only replica of a server."""
        rate = hit_rate(self.stats())
        takes = not (self._draining or self._closed)
        return [ReplicaStatus(0, "", os.getpid(), takes, self._conversations.opened, rate, self.load())]

    def session_rank(self, name: str, salt: str = "") -> int | None:
        """0, the rank of the only replica, for a session that there is."""
        return None if self.find_session(name, salt) is None else 0

    def drain_rank(self, rank: int, seconds: float = 0.0) -> bool:
        """Raises UnsupportedError: nothing would take its place."""
        raise UnsupportedError("this server has one engine, which nothing would replace: stop the server instead")

    def load(self) -> Load:
        """The requests that it has, and the room for more. Cheap, and no step waits for it."""
        return self._scheduler.load()

    def resident(self, limit: int = 1000) -> list[str]:
        """Digests of the prefixes in memory, the last used first, at most so many.

        SHA-256 of the salt, then of token ids as int32, little-endian, of the first 64, 128, ... 1,024, 2,048, ...
        tokens of a text.
        """
        return self._called(lambda _: resident(self._reuse.prefixes, limit))

    def close(self) -> None:
        """End all requests as they are, and the thread. Harmless if it was closed."""
        if self._forked:  # the threads, and what they hold, are the parent's
            return
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if current_thread() is not self._thread:
            self._thread.join()
            if self._tier is not None:
                self._tier.close()
        atexit.unregister(self._at_exit)

    def __repr__(self) -> str:
        load = self._scheduler.load()
        work = (
            "closed" if self._closed else f"{load.waiting} waiting, {load.reading} reading, {load.answering} answering"
        )
        return f"Engine({self.model.name or self.model.config.family!r}, rows={self.rows}: {work})"

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    async def __aenter__(self) -> Engine:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        import asyncio

        await asyncio.to_thread(self.close)

    def _wake(self) -> None:
        with self._changed:
            self._changed.notify_all()

    def refuse_closed(self) -> None:
        """Raise EngineClosed if it was closed, or belongs to another process."""
        if self._forked:
            raise EngineClosed(
                "the engine belongs to the process that made it, and its threads are not in this one, which was forked "
                "from that: make an engine in each process"
            )
        if self._closed:
            raise EngineClosed(self._why_closed())

    def _why_closed(self) -> str:
        lost = self._work.lost
        return CLOSED if lost is None else f"the engine was closed, for {lost}, and make another engine on it"

    def orphan(self) -> None:
        """In a forked child: refuse what would wait for the engine's thread for ever."""
        self._forked = self._closed = True
        self._changed = Condition()  # a thread of the parent may have held the other one

    def _new_state(self, rows: int) -> State:
        return self.model.new_state(rows=rows, kv=self._kv, pool=self._blocks)

    # ---- the engine's thread

    def _warm_up(self) -> None:
        """Read the weights once, and make the thread's OpenMP workers: the first request would wait for both."""
        with suppress(Exception), torch.no_grad():  # what fails here fails the first request, which tells of it
            self.model([[0]], self._new_state(1))

    def _busy(self) -> bool:
        return bool(self._commands or self._work.reading or self._work.answering or len(self._queue))

    def _turn(self) -> bool:
        """Do what others asked for until now, and a step. Whether anything could be done."""
        asked = len(self._commands)
        for _ in range(asked):
            function, future = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self.model))
                except BaseException as error:
                    if isinstance(error, RanksError):
                        self._work.lost = error
                    future.set_exception(error)
        done = self._scheduler.step()
        self._close_if_lost()
        return done or asked > 0

    def _look(self) -> None:
        """See whether the model is still there, while there is nothing to do."""
        try:
            self.model.check()
        except RanksError as error:
            self._work.lost = error
        self._close_if_lost()

    def _close_if_lost(self) -> None:
        if self._work.lost is not None:
            with self._changed:
                self._closed = True

    def _shut(self) -> None:
        try:
            self._work.end_all()
        finally:
            while self._commands:
                future = self._commands.popleft()[1]
                if future.set_running_or_notify_cancel():
                    future.set_exception(EngineClosed(self._why_closed()))


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    for engine in list(_engines):
        engine.orphan()


if hasattr(os, "register_at_fork"):  # where there is a fork
    os.register_at_fork(after_in_child=_after_fork)


def _serve(reference: weakref.ref[Engine], changed: Condition, ready: Event, tier: Tier | None) -> None:
    """The engine's thread. It holds the engine only while there is work, so that a forgotten engine can go, and closes
    the tier of one."""
    if (engine := reference()) is not None:
        engine._warm_up()
    del engine
    ready.set()
    with torch.no_grad():
        while True:
            engine = reference()
            if engine is None:
                if tier is not None:
                    tier.close()
                return
            if engine._closed:
                engine._shut()
                return
            if engine._busy():
                if not engine._turn():
                    del engine
                    with changed:
                        changed.wait(IDLE)
            else:
                engine._look()
                del engine
                with changed:
                    engine = reference()
                    if engine is not None and not engine._closed and not engine._busy():
                        del engine
                        changed.wait(1.0)


def _closer(reference: weakref.ref[Engine]) -> Callable[[], None]:
    def close() -> None:
        engine = reference()
        if engine is not None:
            with suppress(Exception):
                engine.close()

    return close
