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
from pathlib import Path
from threading import Condition, Thread, current_thread
from time import perf_counter
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from lmstate import ops
from lmstate.engine.choice import Choice, logprob
from lmstate.engine.job import Job
from lmstate.engine.options import Grammar, Options, are_messages, as_bytes, check_length, has_text, options, prompt_ids
from lmstate.engine.pace import Pace
from lmstate.engine.prefix import Match, PrefixStore
from lmstate.engine.prefix.parts import Split
from lmstate.engine.prefix.tree import Node, shared
from lmstate.engine.queue import Queue
from lmstate.engine.replay import Replay
from lmstate.engine.request import Request
from lmstate.engine.results import EngineClosed, Finished, Piece, Reuse
from lmstate.engine.rows import RowPool
from lmstate.engine.session import Record, Session
from lmstate.engine.tiers import SavedSession, Tier, open_tier
from lmstate.engine.tiers.fetch import Fetch
from lmstate.errors import SnapshotError, StateError
from lmstate.state import Snapshot, State
from lmstate.state.integers import whole_number

if TYPE_CHECKING:
    from lmstate.models.decoder import Model

Result = TypeVar("Result")

COUNTERS = ("requests", "finished", "failed", "prompt_tokens", "reused_tokens", "computed_tokens", "generated_tokens")
IDLE = 0.05  # seconds between two looks at requests that cannot begin yet; what they wait for wakes the thread before
LEAST_PATIENCE = 1.0  # seconds that a tier may take for what would be computed faster than that
WORTH_WAITING = 16  # tokens that another request is about to compute, for which one waits
LADDER = 2048  # tokens of a prompt between two carries, where nothing else asks for one
TURNS = 2  # ends of turns in a prompt that get a carry: before and after the last message of its user
ECHO_CHUNK = 64  # tokens of a prompt read at once where the logits of all of them are wanted


class Engine:
    """Runs requests on a model, many at a time, on a thread of its own. Close it, or use `with` or `async with`.

    rows    sequences that are worked on at a time
    memory  bytes for the rows and for what is kept of them for reuse, together: a number, or "4GiB"
    store   where prefixes and sessions are kept beside memory, and found after a restart: a folder, "redis://host",
            "s3://bucket/path" and what else obstore knows; a folder holds at most `store_bytes`
    queue   requests that may wait beside them; more raise `QueueFull`
    stall   while a prompt is read, a token of another answer may come this many times later than it else would
    kv      how keys and values are stored, as in `model.new_state`
    """

    def __init__(
        self,
        model: Model,
        rows: int = 8,
        memory: int | str = "4GiB",
        store: str | os.PathLike[str] | Tier | None = None,
        *,
        store_bytes: int | str = "64GiB",
        kv: Any = None,
        queue: int = 256,
        stall: float = 3.0,
    ) -> None:
        rows, queue = whole_number(rows, "rows"), whole_number(queue, "queue")
        if rows < 1 or queue < 1 or not stall > 1.0:
            raise ValueError(f"rows={rows}, queue={queue}, stall={stall} were asked for; the least are 1, 1, above 1.0")
        self.model = model
        self.rows = rows
        self._kv = kv
        self._pool: RowPool[Choice] = RowPool(model, self._new_state, rows)
        self._pace = Pace(stall)
        self._memory = as_bytes(memory)
        namespace = f"{model.fingerprint} dtype={model.dtype} kv={kv!r}"
        if store is not None and not isinstance(store, Tier):
            store = open_tier(store, namespace, as_bytes(store_bytes))
        self._tier: Tier | None = store
        self._prefixes = PrefixStore(Split.of(self._new_state(1)), model.fingerprint, self._memory, self._tier)
        self._queue = Queue(queue)
        self._reading: list[Job] = []  # whose prompts are being read
        self._answering: list[Job] = []
        self._jobs: dict[Choice, Job] = {}  # of the choices that have a row
        self._replay = Replay()
        self._sessions: dict[str, Session] = {}
        self._pins: dict[Session, list[Node]] = {}  # what live sessions need
        self._commands: deque[tuple[Callable[[Model], Any], Future[Any]]] = deque()
        self._counts: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self._changed = Condition()
        self._closed = False
        self._order = 0
        if self._tier is not None:
            self._recall(self._tier)
        arguments = (weakref.ref(self), self._changed)
        self._thread = Thread(target=_serve, args=arguments, name="lmstate-engine", daemon=True)
        self._thread.start()
        # A daemon thread inside native code while the interpreter goes away can crash it.
        self._at_exit = _closer(weakref.ref(self))
        atexit.register(self._at_exit)

    # ---- for any thread

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]],
        *,
        max_new_tokens: int = 256,
        n: int = 1,
        logprobs: int | None = None,
        prompt_logprobs: int | None = None,
        grammar: Grammar | None = None,
        priority: int = 0,
        session: str | Session | None = None,
        deadline: float | None = None,
        temperature: float = 0.0,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float = 1.0,
        presence_penalty: float = 0.0,
        frequency_penalty: float = 0.0,
        logit_bias: Mapping[int, float] | None = None,
        seed: int | None = None,
        stop: str | Sequence[str] = (),
        stop_token_ids: Sequence[int] = (),
        min_tokens: int = 0,
        ignore_eos: bool = False,
    ) -> Request:
        """Queue a request: a text, token ids, or chat messages. Returns at once.

        n                 answers to the one prompt, which is read once; with a seed, answer i draws as row i of
                          `model.generate` does
        logprobs          log probabilities of the tokens of the answers, with this many of the most likely ones beside
                          them; prompt_logprobs the same for the prompt, all of which is then computed
        grammar           what may come next, see `Grammar`
        priority          larger ones first; one step is worth ten seconds of waiting
        session           a conversation, or its name, that the prompt goes on with: see `Session.send`
        deadline          seconds from now, after which it ends as it is
        stop_token_ids    end the answer like an end-of-sequence token; ignore_eos: those do not
        min_tokens        no end-of-sequence or stop token before so many

        Raises ValueError for what is out of range, `QueueFull`, `EngineClosed`.
        """
        chosen = options(
            self.model,
            max_new_tokens=max_new_tokens,
            n=n,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            grammar=grammar,
            priority=priority,
            deadline=deadline,
            temperature=temperature,
            top_k=top_k,
            top_p=top_p,
            min_p=min_p,
            repetition_penalty=repetition_penalty,
            presence_penalty=presence_penalty,
            frequency_penalty=frequency_penalty,
            logit_bias=logit_bias,
            seed=seed,
            stop=stop,
            stop_token_ids=stop_token_ids,
            min_tokens=min_tokens,
            ignore_eos=ignore_eos,
        )
        if session is None:
            return self._queued(self._encoded(prompt), chosen, prompt if are_messages(prompt) else [], None)
        conversation = self.session(session) if isinstance(session, str) else session

        def begin() -> Request:
            ids, messages = conversation.continued(prompt, self._encoded)
            return self._queued(ids, chosen, messages, conversation)

        return conversation.begin(begin)

    def _encoded(self, prompt: Any) -> list[int]:
        return prompt_ids(self.model, prompt, self._replay)

    def _queued(self, ids: list[int], chosen: Options, messages: Any, session: Session | None) -> Request:
        check_length(self.model, ids)
        request = Request(ids, self._wake)
        with self._changed:
            self._refuse_closed()
            self._queue.add(Job(request, chosen, self._order, messages, session))
            self._order += 1
            self._counts["requests"] += 1
            self._changed.notify_all()
        return request

    # ---- conversations

    @property
    def chats(self) -> bool:
        """Whether the model has a chat template."""
        return has_text(self.model) and self.model.tokenizer.has_chat_template

    def session(self, name: str) -> Session:
        """The conversation of this name; a new one if there is none."""
        with self._changed:
            self._refuse_closed()
            if name not in self._sessions:
                self._sessions[name] = Session(self, name, Record())
            return self._sessions[name]

    def sessions(self) -> list[str]:
        """The names of the conversations that are kept."""
        with self._changed:
            return sorted(self._sessions)

    def encode(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> list[int]:
        """The ids of chat messages, this engine's answers as they were sampled; `variables` as in `Tokenizer.chat`."""
        return self._replay.encode(self.model.tokenizer, messages, **variables)[0]

    def remember(self, messages: Sequence[Mapping[str, Any]], tokens: Sequence[int], **variables: Any) -> None:
        """Have `encode` find these tokens for a conversation that ends with an answer in another form, see `Replay`."""
        self._replay.remember(messages, tokens, **variables)

    def new_session(self, name: str, record: Record) -> Session:
        """A conversation that begins with what is recorded. Raises ValueError if there is one of this name."""
        with self._changed:
            self._refuse_closed()
            if name in self._sessions:
                raise ValueError(f"there is a session {name!r} already: close it, or take another name")
            session = self._sessions[name] = Session(self, name, record)
        self._remember(record)
        self.changed(session)
        return session

    def load_session(self, name: str, path: str | os.PathLike[str]) -> Session:
        """A conversation from what `Session.save` wrote. Raises SnapshotError for a file that is none, or damaged."""
        snapshot = Snapshot.load(path)
        try:
            record = Record.from_json(list(snapshot.tokens), snapshot.notes)
        except (ValueError, TypeError, RecursionError) as error:
            raise SnapshotError(f"{path} holds no session of lmstate: {error}") from None

        def take(_: Model) -> None:
            state = self._new_state(1)
            state.restore(0, snapshot)  # checks all of it
            self._keep(state.snapshot(0))

        self._called(take)
        return self.new_session(name, record)

    def save_session(self, record: Record, path: Path) -> None:
        """Write a snapshot with a session's record in its notes."""

        def taken(_: Model) -> Snapshot:
            match = self._prefixes.match(record.tokens, logits=False)
            state = self._new_state(1)
            if (snapshot := self._prefixes.snapshot(match)) is not None:
                state.restore(0, snapshot)
                state.rewind(0, match.length)
            state.queue(0, record.tokens[match.length :])
            return state.snapshot(0)

        replace(self._called(taken), notes=record.to_json()).save(path)

    def close_session(self, session: Session) -> None:
        """Forget a conversation."""
        with self._changed:
            if self._sessions.get(session.name) is session:
                del self._sessions[session.name]
        if self._tier is not None:
            self._tier.drop_session(session.name)
        with suppress(EngineClosed):
            self.call(lambda _: self._pin(session, []))

    def changed(self, session: Session) -> None:
        """A session stands elsewhere now: what going on from there needs is to stay."""
        self._called(lambda _: self._hold(session))

    def _hold(self, session: Session) -> None:
        """Keep what going on from a session's end and its marks needs, and the session itself where there is a tier."""
        record = session.record
        self._pin(session, [*record.marks, len(record.tokens)])
        if self._tier is not None:
            self._tier.put_session(SavedSession(session.name, list(record.tokens), record.to_json()))

    def _recall(self, tier: Tier) -> None:
        """The sessions that a tier has."""
        vocab = self.model.config.vocab_size
        for saved in tier.sessions():
            with suppress(ValueError, TypeError, RecursionError):  # not one of ours
                if all(token < vocab for token in saved.tokens):
                    record = Record.from_json(saved.tokens, saved.record)
                    self._sessions[saved.name] = Session(self, saved.name, record)
                    self._remember(record)

    def _pin(self, session: Session, positions: list[int]) -> None:
        for node in self._pins.pop(session, []):
            self._prefixes.unpin(node)
        tokens = session.record.tokens
        pinned = [self._prefixes.pin(tokens[:at]) for at in positions if at]
        nodes = [node for node in pinned if node is not None]
        if nodes:
            self._pins[session] = nodes

    def _remember(self, record: Record) -> None:
        """Have its messages found again as the tokens that they were."""
        for moment in (*record.turns, record.moment()):
            if moment.messages and record.messages[moment.messages - 1].get("role") == "assistant":
                self._replay.remember(record.messages[: moment.messages], record.tokens[: moment.tokens])

    def call(self, function: Callable[[Model], Result]) -> Future[Result]:
        """Run `function(model)` between two steps, on the thread that owns the model."""
        future: Future[Result] = Future()
        with self._changed:
            self._refuse_closed()
            self._commands.append((function, future))
            self._changed.notify_all()
        return future

    def explain(self, prompt: str | Sequence[int] | Sequence[Mapping[str, Any]]) -> Reuse:
        """How much of a prompt would be reused now, and why not more."""
        ids = self._encoded(prompt)

        def told(_: Model) -> Reuse:
            match = self._prefixes.match(ids)
            return self._told(ids, match, match.length)

        return self._called(told)

    def _called(self, function: Callable[[Model], Result]) -> Result:
        return function(self.model) if current_thread() is self._thread else self.call(function).result()

    def stats(self) -> dict[str, float]:
        """Counters since the start, and what is going on now."""
        now = {
            "waiting": len(self._queue),
            "reading": len(self._reading),
            "decoding": len(self._pool),
            "row_bytes": self._pool.nbytes(),
            "prefix_bytes": self._prefixes.nbytes,
            **{f"prefixes_{name}": number for name, number in self._prefixes.counts.items()},
        }
        if self._tier is not None:
            now |= {f"{self._tier.name}_{name}": number for name, number in self._tier.counts.items()}
        return {**self._counts, **now}

    def close(self) -> None:
        """End all requests as they are, and the thread. Harmless if it was closed."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if current_thread() is not self._thread:
            self._thread.join()
            if self._tier is not None:
                self._tier.close()
        atexit.unregister(self._at_exit)

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

    def _refuse_closed(self) -> None:
        if self._closed:
            raise EngineClosed("the engine was closed: make another one")

    def _new_state(self, rows: int) -> State:
        return self.model.new_state(rows=rows, kv=self._kv)

    # ---- the engine's thread

    def _busy(self) -> bool:
        return bool(self._commands or self._reading or self._answering or len(self._queue))

    def _turn(self) -> None:
        """One step of everything: what others asked for, a part of a prompt, a token of every answer."""
        while self._commands:
            function, future = self._commands.popleft()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function(self.model))
                except BaseException as error:
                    future.set_exception(error)
        self._end_early()
        self._seat()
        self._admit()
        self._read()
        self._decode()

    def _turn_guarded(self) -> bool:
        """Whether anything could be done."""
        try:
            self._turn()
        except Exception as error:  # of the engine itself, not of one request: nobody is to wait for ever
            for job in self._all():
                self._fail(job, error)
        return bool(self._commands or self._reading or self._answering)

    def _shut(self) -> None:
        for job in self._all():
            self._end(job, "cancelled")
        while self._commands:
            self._commands.popleft()[1].cancel()

    def _all(self) -> list[Job]:
        with self._changed:
            return [*self._queue, *self._reading, *self._answering]

    # ---- beginning

    def _admit(self) -> None:
        """Start requests while there are rows for them."""
        if self._free() <= 0 or not len(self._queue):
            return
        with self._changed:
            waiting = list(self._queue)
        for job in waiting:
            if self._free() <= 0:
                return
            if not self._better_wait(job):
                with self._changed:
                    self._queue.remove(job)
                self._guarded(job, self._start)

    def _better_wait(self, job: Job) -> bool:
        """Whether another request is reading what this one begins with too, and has not come to where they part."""
        if self._fetching(job):
            return True
        if job.follows is not None:
            leader, until = job.follows
            if leader in self._reading and leader.at < until:
                return True
            job.follows = None
            return False
        for leader in self._reading:
            until = min(shared(leader.prompt, job.prompt), len(job.prompt) - 1)
            if until - max(leader.at, self._prefixes.match(job.prompt).length) >= WORTH_WAITING:
                leader.cuts.add(until)
                job.follows = (leader, until)
                return True
        return False

    def _free(self) -> int:
        return self.rows - len(self._pool) - len(self._reading) - sum(len(job.unseated) for job in self._answering)

    def _fetching(self, job: Job) -> bool:
        """Whether something is read from a tier for a request; begins it, and takes what came of it."""
        if self._tier is None or job.options.prompt_logprobs is not None:
            return False
        match = self._prefixes.match(job.prompt)
        if job.fetch is None:
            if not (keys := self._prefixes.missing(match)):
                return False
            patience = max(LEAST_PATIENCE, 2 * (self._pace.seconds(match.length) or 0.0))
            job.fetch = Fetch(self._tier, keys, patience, self._wake)
        if not job.fetch.over:
            return True
        if not job.fetch.taken:
            job.fetch.taken = True
            self._prefixes.forget_stored(job.fetch.failed)
            with suppress(RuntimeError, IndexError, AttributeError):  # what was stored has other shapes
                self._prefixes.fill(match, dict(job.fetch.read))
        return False

    def _start(self, job: Job) -> None:
        job.passed()
        self._reading.append(job)
        job.state = self._new_state(1)
        if job.options.prompt_logprobs is None:  # else all of it is computed
            match = self._prefixes.match(job.prompt)
            if self._prefixes.missing(match):
                match = self._prefixes.match(job.prompt, only_memory=True)
            self._reuse(job, match)
            job.cuts |= self._worth_keeping(job.prompt, match)
        if job.at == len(job.prompt):
            self._begin_answers(job, self._logits(job.state))

    def _reuse(self, job: Job, match: Match) -> None:
        assert job.state is not None
        reused = 0
        try:
            if (snapshot := self._prefixes.snapshot(match)) is not None:
                job.state.restore(0, snapshot)
                reused = match.length - job.state.rewind_cost(0, match.length)
                job.state.rewind(0, match.length)
                job.request.computed = match.length
                self._counts["reused_tokens"] += reused
        except (StateError, RuntimeError, IndexError):  # of a file that was made by someone else
            self._prefixes.discard(match)
            job.state, reused = self._new_state(1), 0
        if job.fetch is not None and match.tier == "memory" and self._tier is not None:
            match = replace(match, tier=self._tier.name)
        job.reuse = self._told(job.prompt, match, reused)

    def _told(self, prompt: list[int], match: Match, reused: int) -> Reuse:
        differs = prompt[match.matched] if match.matched < len(prompt) else None
        return Reuse(
            reused,
            len(prompt) - reused,
            match.tier,
            match.matched,
            None if differs is None else match.matched,
            self.model.tokenizer.decode([differs], False) if differs is not None and has_text(self.model) else "",
            self._prefixes.split.forced_by if match.length < min(match.matched, len(prompt) - 1) else None,
        )

    def _worth_keeping(self, prompt: list[int], match: Match) -> set[int]:
        """Where to cut a prompt and keep what layers that forget hold there: each of these may be come back to."""
        if not self._prefixes.split.needs_carry:
            return set()
        ends = [at for at, token in enumerate(prompt, 1) if token in self.model.eos_ids]
        wanted = {match.matched, *ends[-TURNS:], *range(LADDER, len(prompt), LADDER)}
        return {at for at in wanted if match.length < at < len(prompt)}

    def _logits(self, state: State) -> Tensor:
        """The last logits `[V]` of a state of one row, which are known."""
        logits = self.model([[]], state)
        assert logits is not None
        return logits[0]

    def _keep(self, snapshot: Snapshot) -> None:
        """Have the prefix store keep it, if there is room. What cannot be kept is no one's error."""
        self._prefixes.shrink(max(0, self._memory - self._row_bytes()))
        self._prefixes.seconds_per_token = self._pace.seconds(1) or 1e-3
        self._prefixes.put(snapshot)

    def _row_bytes(self) -> int:
        states = [job.state for job in self._reading if job.state is not None]
        states += [job.source for job in self._answering if isinstance(job.source, State)]
        sources = [job.source for job in self._answering if isinstance(job.source, Snapshot)]
        reading = sum(sum(state.memory().values()) for state in states)
        return self._pool.nbytes() + reading + sum(source.nbytes for source in sources)

    # ---- prompts

    def _read(self) -> None:
        """Read a part of a prompt: of the request that came first among those of the largest priority."""
        jobs = sorted(self._reading, key=lambda job: (-job.options.priority, job.order))
        if jobs:
            self._guarded(jobs[0], self._read_chunk)

    def _read_chunk(self, job: Job) -> None:
        assert job.state is not None
        start, echo = job.at, job.options.prompt_logprobs
        count = job.chunk(min(self._pace.chunk(decoding=len(self._pool) > 0), ECHO_CHUNK if echo is not None else 512))
        ids = job.prompt[start : start + count]
        begin = perf_counter()
        logits = self.model([ids], job.state, logits="last" if echo is None else "all")
        assert logits is not None
        self._pace.read(count, perf_counter() - begin)
        if echo is not None:
            self._echo(job, logits[0], start)
            logits = logits[:, -1]
        job.request.computed += count
        self._counts["computed_tokens"] += count
        if job.at in job.cuts or job.at == len(job.prompt):
            self._keep(job.state.snapshot(0))
        if job.at == len(job.prompt):
            self._begin_answers(job, logits[0])

    def _echo(self, job: Job, logits: Tensor, start: int) -> None:
        """Log probabilities of the prompt's tokens after each of a chunk's. logits float32 `[T, V]`."""
        top = job.options.prompt_logprobs
        assert top is not None
        if not job.prompt_logprobs:
            job.prompt_logprobs.append(None)
        for offset, token in enumerate(job.prompt[start + 1 : start + 1 + len(logits)]):
            job.prompt_logprobs.append(logprob(logits[offset], token, top))

    def _begin_answers(self, job: Job, logits: Tensor) -> None:
        """The prompt is read: every answer gets its first token from its last logits `[V]`, then a row."""
        job.passed()
        self._counts["prompt_tokens"] += len(job.prompt)
        self._reading.remove(job)
        self._answering.append(job)
        job.begin_answers(self.model)
        job.source, job.state = job.state, None
        for choice in job.choices:
            if job.options.max_new_tokens == 0:
                job.request.push(choice.end("length"))
            else:
                self._give(job, choice, choice.pick(logits), logits)
        job.unseated = [choice for choice in job.choices if choice.finished is None]
        if len(job.unseated) > 1:
            assert isinstance(job.source, State)
            job.source = job.source.snapshot(0)
        self._settle(job)
        self._seat()

    def _seat(self) -> None:
        """Give rows to answers that have none."""
        for job in list(self._answering):
            while job.unseated and len(self._pool) < self.rows:
                choice = job.unseated.pop(0)
                assert job.source is not None
                self._pool.join(choice, job.source)
                self._jobs[choice] = job
            if not job.unseated:
                job.source = None

    # ---- answers

    def _decode(self) -> None:
        """One token for every answer that has a row."""
        self._pool.tidy()
        for choice in self._pool.owners:
            self._end_if_full(choice)
        choices = self._pool.owners
        if not choices:
            return
        begin = perf_counter()
        try:
            logits = self._pool.step({choice: choice.feed for choice in choices})
        except Exception:
            self._decode_apart(choices)
            return
        self._take(choices, logits)
        self._pace.decoded(perf_counter() - begin)

    def _decode_apart(self, choices: list[Choice]) -> None:
        """A step of all failed, and changed nothing: have each row take it by itself, so that one stops no other."""
        for choice in choices:
            job = self._jobs.get(choice)
            if job is not None and choice.finished is None:
                self._guarded(job, partial(self._decode_one, choice))

    def _decode_one(self, choice: Choice, job: Job) -> None:
        self._take([choice], self._pool.step({choice: choice.feed}))

    def _take(self, choices: list[Choice], logits: Tensor) -> None:
        """The next token of each of these, from logits float32 `[R, V]`."""
        rows = {choice: self._pool.row(choice) for choice in choices}
        together = [choice for choice in choices if choice.plain]
        best = dict(zip(together, _best(logits, [rows[choice] for choice in together])))
        for choice in choices:
            choice.feed.clear()
        for choice, row in rows.items():
            if choice in self._jobs:  # its request may have failed with another answer of it
                self._guarded(self._jobs[choice], partial(self._next, choice, logits[row], best.get(choice)))

    def _next(self, choice: Choice, logits: Tensor, token: int | None, job: Job) -> None:
        """One more token of an answer: this one, or None for one picked from logits `[V]`."""
        self._give(job, choice, choice.pick(logits) if token is None else token, logits)
        if choice.finished is not None:
            self._leave(choice)
            self._settle(job)

    def _give(self, job: Job, choice: Choice, token: int, logits: Tensor) -> None:
        """Hand one more token of an answer, and those that its grammar leaves no choice about, to the request."""
        self._push(job, choice.take(token, logits))
        if (forced := choice.force()) is not None:
            self._push(job, forced)

    def _push(self, job: Job, piece: Piece) -> None:
        self._counts["generated_tokens"] += len(piece.tokens)
        job.request.push(piece)

    def _end_if_full(self, choice: Choice) -> None:
        most = self.model.max_positions
        if most is not None and self._pool.length(choice) + len(choice.feed) > most:
            job = self._jobs[choice]
            job.request.push(choice.end("capacity"))
            self._leave(choice)
            self._settle(job)

    # ---- endings

    def _leave(self, choice: Choice) -> None:
        """An answer gives its row back; what the row computed, up to the end of the answer, is kept."""
        job = self._jobs.pop(choice)
        self._pool.rewind(choice, len(job.prompt) + choice.kept())
        self._keep(self._pool.snapshot(choice))
        self._pool.leave(choice)

    def _settle(self, job: Job) -> None:
        """Finish a request whose answers all ended."""
        if job in self._answering and all(choice.finished is not None for choice in job.choices):
            self._answering.remove(job)
            self._finish(job)

    def _finish(self, job: Job) -> None:
        """All answers of a request ended: its conversation is what it was and the first of them."""
        self._counts["finished"] += 1
        choice = job.choices[0]
        tokens = [*job.prompt, *choice.answer.tokens[: choice.kept()]]
        messages = [dict(message) for message in job.messages]
        begun = bool(choice.answer.tokens) or choice.finished in ("eos", "stop", "length")
        if messages and begun:
            messages.append({"role": "assistant", "content": choice.answer.text})
            self._replay.remember(messages, tokens)
        if (session := job.session) is not None:
            if begun:
                session.adopt(tokens, messages)
                self._hold(session)
            else:
                session.give_up()
        job.request.finish(job.completion())

    def _end_early(self) -> None:
        for job in self._all():
            if job.request.cancelled:
                self._end(job, "cancelled")
            elif job.overdue:
                self._end(job, "deadline")

    def _end(self, job: Job, why: Finished) -> None:
        """End a request wherever it is."""
        if not job.choices:
            job.begin_answers(self.model)
        for choice in job.choices:
            if choice.finished is None:
                job.request.push(choice.end(why))
        self._forget(job)
        self._finish(job)

    def _fail(self, job: Job, error: BaseException) -> None:
        self._counts["failed"] += 1
        self._forget(job)
        if job.session is not None:
            job.session.give_up()
        job.request.finish(error)

    def _forget(self, job: Job) -> None:
        """Take a request out of everything; what was computed is kept."""
        if job.state is not None and job.at and job in self._reading:
            with suppress(Exception):
                self._keep(job.state.snapshot(0))
        for choice in [choice for choice, owner in self._jobs.items() if owner is job]:
            self._leave(choice)
        job.unseated.clear()
        job.state = job.source = None
        with self._changed:
            if job in self._queue:
                self._queue.remove(job)
        for jobs in (self._reading, self._answering):
            if job in jobs:
                jobs.remove(job)

    def _guarded(self, job: Job, action: Callable[[Job], None]) -> None:
        """Do it; what it raises is the end of this request, and of no other."""
        try:
            action(job)
        except Exception as error:
            self._fail(job, error)


def _best(logits: Tensor, rows: list[int]) -> list[int | None]:
    """The most likely token of each of these rows of float32 `[R, V]`; None where the logits are not numbers."""
    if not rows:
        return []
    values, ids = ops.best(logits if len(rows) == len(logits) else logits[rows])
    return [None if bad else token for token, bad in zip(ids.tolist(), values.isnan().tolist())]


def _serve(reference: weakref.ref[Engine], changed: Condition) -> None:
    """The engine's thread. It holds the engine only while there is work, so that a forgotten engine can go."""
    with torch.no_grad():
        while True:
            engine = reference()
            if engine is None:
                return
            if engine._closed:
                engine._shut()
                return
            if engine._busy():
                if not engine._turn_guarded():
                    del engine
                    with changed:
                        changed.wait(IDLE)
            else:
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
