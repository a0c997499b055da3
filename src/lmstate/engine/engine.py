"""The engine: many requests on one model, in one ragged batch that they join and leave at any step."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import groupby
from time import monotonic, sleep
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from lmstate.engine.conversations import Conversations
from lmstate.engine.delivery import Delivery
from lmstate.engine.drafting import Drafting
from lmstate.engine.embedding import EmbeddedText
from lmstate.engine.hosting import SessionEngine
from lmstate.engine.job import Job, Reader, Terms
from lmstate.engine.memory import RowCost
from lmstate.engine.options import (
    answered_ids,
    as_bytes,
    check_length,
    read_prompt,
    read_sourced,
    refuse_sourceless,
    with_frames,
)
from lmstate.engine.pace import Pace
from lmstate.engine.prefix.picture import Prefix, picture, prefixes, resident
from lmstate.engine.queue import Queue
from lmstate.engine.request import Request
from lmstate.engine.results import (
    Completion,
    EngineClosed,
    Load,
    Piece,
    ReplicaStatus,
    Reuse,
    SessionMoved,
    Usage,
    hit_rate,
)
from lmstate.engine.reuse import PrefixReuse
from lmstate.engine.rows import RowPool
from lmstate.engine.scheduler import Scheduler
from lmstate.engine.session import Session
from lmstate.engine.session_record import KeyedAnswer
from lmstate.engine.tiers import Store, Tier, open_tier
from lmstate.engine.workload import Workload
from lmstate.errors import UnsupportedError
from lmstate.generation.params import SamplingParams, sampling_params
from lmstate.generation.prompts import are_messages
from lmstate.generation.row import AnswerRow
from lmstate.generation.thinking import ThinkingFormat
from lmstate.generation.transcript import WordsQuestion
from lmstate.generation.transcription import ends_of
from lmstate.speculation import DraftChoice, DraftReport
from lmstate.state import BlockPool, RecurrentState, SourceFeatures, State
from lmstate.state.kv.policies.base import Policy
from lmstate.state.kv.policies.per_layer import policies_of
from lmstate.state.media import PICTURED
from lmstate.state.validate import token_ids, whole_number
from lmstate.text.replay import Replay
from lmstate.vision.reader import PicturePrompt

if TYPE_CHECKING:
    from lmstate.models.model import Model

DRAIN_LOOK = 0.01  # seconds between two looks at whether all requests have ended
FLUSH_SECONDS = 30.0  # that draining waits for the store


class Engine(SessionEngine):
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
    carries  bits in which recurrences store what they sum, as in `model.new_state`. With 16 or 8 the store keeps
            carries inside of prompts at multiples of 64 tokens.
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
        carries: int = 32,
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
        state = model.new_state(kv=kv, carries=carries)
        if state.conditioned and not isinstance(draft, str | None):
            raise UnsupportedError(
                f"a drafter was given for a {model.config.family} model, whose tokens read a source that the drafter "
                "does not: leave it out, or give 'text'"
            )
        pace = Pace.bounded(max_itl, stall)
        memory, store_bytes = as_bytes(memory), as_bytes(store_bytes)
        self._cost = RowCost.of(model, lambda: model.new_state(kv=kv, carries=carries))
        self._cost.refuse_too_little(memory)
        drafting = Drafting(draft, model, rows, memory, state)
        self.rows = rows
        self._kv, self._carries = kv, carries
        # A function has no name that holds in another process; what it gives for each layer has.
        policies = policies_of(kv, len(model.blocks)) if callable(kv) and not isinstance(kv, Policy) else kv
        self.namespace = f"{model.fingerprint} dtype={model.dtype} kv={policies!r}"  # of what can be gone on from
        leaves = (leaf for layer in state.layers for leaf in layer.leaves())
        if any(isinstance(leaf, RecurrentState) and leaf.rounding is not None for leaf in leaves):
            self.namespace += f" carries={carries}"
        if store is not None and not isinstance(store, Tier):
            store = open_tier(store, self.namespace, store_bytes)
        if store is not None:
            store.most_read = memory
        super().__init__(model, store)
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
        self._draining = False
        self._order = 0
        self.start_thread()

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
        answered_to: Sequence[int] | None = None,
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
                  whole. The prompt and the parameters are to be the same, with a seed if tokens are drawn. Such a
                  request is taken even if `queue` others wait, and goes before them as if it had waited 100 seconds
        answered_to  ids of the prompt that `answered` followed: raises `SessionMoved` where a session has others now
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
            prompt = with_frames(prompt)
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
            if any(told) and answered_to is not None and whole.tokens != list(answered_to):
                raise SessionMoved(
                    f"session {conversation.name!r} was changed by another sender before this answer could go on",
                    conversation.generation,
                )
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
            job = Job(request, terms, self._order, prompt, messages, session, told)
            if any(told):
                self._queue.put_back(job)
            else:
                self._queue.add(job)
            self._order += 1
            self._work.counts["requests"] += 1
            self._work.counts["pictures"] += len(prompt.media)
            self._work.counts["picture_seconds"] += prompt.seconds
            self._changed.notify_all()
        return request

    # ---- looking in

    def embed(self, tokens: Sequence[int], pooling: str = "mean") -> Future[Tensor]:
        """Read a text, and pool its hidden states after the last norm: float32 `[E]`.

        pooling  "mean" of all tokens, the "last" one's, or the first one's: "cls"

        Cancelling it ends the reading. Raises ValueError for an unknown pooling and for a text that the model cannot
        read.
        """
        ids = token_ids(tokens, "the text", self.model.config.ids)
        check_length(self.model, ids)
        work = self._work
        text = EmbeddedText(self.model, ids, pooling, self.call, lambda: bool(work.reading or work.answering))
        text.go_on()
        return text.vector

    def word_ends(self, question: WordsQuestion) -> Future[list[int]]:
        """The position of a sound where each token of an answer ends, see `generation.transcription.ends_of`."""

        def read(model: Model) -> list[int]:
            begin = replace(question.prompt, tokens=question.prompt.tokens[:-1])
            return ends_of(model, self._reuse.resume(begin, ""), question)

        return self.call(read)

    def explain(
        self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | PicturePrompt, salt: str = ""
    ) -> Reuse:
        """Tokens of a prompt that would be reused now, and why not more."""
        read = self._encoded(prompt, salt)

        return self._called(lambda _: self._reuse.explain(read, salt))

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

        `tokens`: ids, or where pictures are among them `PicturePrompt.identities`. `salt`: of the runs to tell of;
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
        """The text of ids, and of numbers of pictures, sources and learned positions among them."""
        decode = partial(self.model.tokenizer.decode, skip_special_tokens=False) if self.model.has_tokenizer else None
        shown, learned = [], frozenset(self.model.opening_numbers)
        for (pictured, opens), part in groupby(ids, key=lambda id: (id >= PICTURED, id in learned)):
            own = list(part)
            if opens:
                shown.append(f"[{len(own)} learned positions]")
            elif not pictured:
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
        """Digests of the prefixes in memory, the last used first, at most `limit`.

        SHA-256 of the salt, then of token ids as int32, little-endian, of the first 64, 128, ... 1,024, 2,048, ...
        tokens of a text.
        """
        return self._called(lambda _: resident(self._reuse.prefixes, limit))

    def __repr__(self) -> str:
        load = self._scheduler.load()
        work = (
            "closed" if self._closed else f"{load.waiting} waiting, {load.reading} reading, {load.answering} answering"
        )
        return f"Engine({self.model.name or self.model.config.family!r}, rows={self.rows}: {work})"

    # ---- the engine's thread

    def _new_state(self, rows: int) -> State:
        return self.model.new_state(rows=rows, kv=self._kv, pool=self._blocks, carries=self._carries)

    def _warm_up(self) -> None:
        """Read the weights once, and make the thread's OpenMP workers: the first request would wait for both."""
        with suppress(Exception), torch.no_grad():  # what fails here fails the first request, which tells of it
            self.model([[0]], self._new_state(1))

    def _busy(self) -> bool:
        return bool(self._commands or self._work.reading or self._work.answering or len(self._queue))

    def _step(self) -> bool:
        return self._scheduler.step()
