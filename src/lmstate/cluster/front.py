"""Many replicas as one engine: each request goes where its state is, and goes on elsewhere when its replica ends."""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from threading import Lock, Timer
from time import monotonic, sleep
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import torch

from lmstate.cluster.handle import Errand, Listener, ReplicaHandle, ReplicaLost, Work
from lmstate.cluster.key import RouteKey, key_seed, route_key
from lmstate.cluster.moving import MovingRequest
from lmstate.cluster.placement import Placement, ReplicaView, RouteCosts
from lmstate.engine.options import check_length, read_prompt, read_sourced, refuse_sourceless, with_frames
from lmstate.engine.request import Request
from lmstate.engine.results import EngineClosed, Load, NoReplica, QueueFull
from lmstate.engine.session import check_name
from lmstate.generation.params import SamplingParams, sampling_params
from lmstate.generation.prompts import are_messages
from lmstate.generation.thinking import ThinkingFormat
from lmstate.state import SourceFeatures
from lmstate.state.sources import named as source_named
from lmstate.text.replay import Replay
from lmstate.vision.reader import PicturePrompt

if TYPE_CHECKING:
    from lmstate.engine.serving import ServingModel

LOG = logging.getLogger(__name__)
Found = TypeVar("Found")

MOVERS = 4  # threads on which requests move
SETTLERS = 16  # threads on which turns of sessions end: each may wait for the store
MOST_WAITING = 256  # new requests that wait for a replica while none takes them
DRAIN_LOOK = 0.02  # seconds between two looks at whether requests ended
SESSIONS = 100_000  # whose lengths are remembered


class Front:
    """Engines behind one `submit`. Close it, or use `with`: it closes its replicas.

    replicas  of one namespace: the same weights, data type and KV policy, and one shared store if there are sessions
    model     for its tokenizer and its limits; nothing is computed with it
    costs     seconds of reading and fetching, by which replicas are chosen
    patience  seconds that a request waits for a replica while none takes it, as when the last one is replaced
    """

    def __init__(
        self,
        replicas: Sequence[ReplicaHandle],
        model: ServingModel,
        *,
        costs: RouteCosts | None = None,
        patience: float = 0.0,
    ) -> None:
        if not replicas:
            raise ValueError("a Front was asked for without replicas; give one or more")
        self.model = model
        self.namespace = replicas[0].namespace
        self._replay = Replay()
        self._placement = Placement(costs)
        self._replicas: dict[str, ReplicaHandle] = {}
        self._seen: dict[str, tuple[Load, bool]] = {}  # loads that the placement knows, and who takes requests
        self._draining: set[str] = set()
        self._lengths: OrderedDict[str, int] = OrderedDict()  # tokens of sessions
        self._lock = Lock()
        self._patience = patience
        self._movers = ThreadPoolExecutor(MOVERS, "lmstate-moves")
        self._settlers = ThreadPoolExecutor(SETTLERS, "lmstate-turns")
        self._due: list[Callable[[], None]] = []  # to be called once the timer ends
        self._texts_waiting = 0  # to be embedded
        self._running: set[MovingRequest] = set()
        self._closed = self._ending = False
        self.moved = self.lost = 0  # requests, replicas
        for replica in replicas:
            self.add(replica)

    def add(self, replica: ReplicaHandle) -> None:
        """Send requests to one more replica.

        Raises ValueError for one of another namespace, or of the id of one that is not lost.
        """
        if replica.namespace != self.namespace:
            raise ValueError(
                f"replica {replica.id} is of {replica.namespace!r}, this front of {self.namespace!r}: states of one "
                "mean nothing to the other; make a front for each"
            )
        with self._lock:
            self._observe()
            if replica.id in self._replicas:
                raise ValueError(f"there is a replica {replica.id!r} already; ids differ, also after a restart")
            self._replicas[replica.id] = replica

    def submit(
        self,
        prompt: str | Sequence[int] | Sequence[Mapping[str, Any]] | PicturePrompt | None = None,
        params: SamplingParams | None = None,
        *,
        source: str | Sequence[int] | SourceFeatures | None = None,
        priority: int = 0,
        deadline: float | None = None,
        session: str | None = None,
        itl: float | None = None,
        idempotency_key: str | None = None,
        salt: str = "",
        sender: str = "",
        settle: Callable[[], None] | None = None,
        **changes: Any,
    ) -> Request:
        """`Engine.submit` at the replica that is estimated to answer soonest.

        settle  is called before the outcome is told, on a thread that may wait

        A session is given by its name. Its turns get an idempotency key if they have none, so that a turn whose replica
        ends is in the record once; as with every key, one that is cancelled is not kept.
        """
        if session is not None:
            check_name(session)
        params = sampling_params(params, changes)
        params.check(self.model)
        params.compiled(self.model)  # replicas compile what is written, by their prompts: what is wrong is told now
        if params.seed is None and not params.greedy:  # another replica draws the same numbers
            turn = None if session is None or idempotency_key is None else (session, idempotency_key)
            params = replace(params, seed=int(torch.randint(2**62, ())) if turn is None else key_seed(*turn, salt))
        ids: list[int] = []
        told: str | PicturePrompt | list[dict[str, Any]]
        if source is not None:
            if session is not None:
                raise ValueError("a session and a source were given, and sessions have no sources: leave one out")
            prompt = read_sourced(self.model, source, prompt)
        if session is None:
            if idempotency_key is not None:
                raise ValueError("an idempotency_key was given; it is for turns of a session")
            told = self._read(with_frames(prompt), salt)
            source_name = None if told.source is None else str(source_named(told.source))
            ids, key = told.tokens, route_key(told.identities, source=source_name, tenant=salt)
            refuse_sourceless(self.model, told)
            check_length(self.model, ids)
        else:
            idempotency_key = idempotency_key or uuid4().hex
            if isinstance(prompt, str):
                told = prompt
            elif are_messages(prompt):
                told = [dict(message) for message in prompt]
            else:
                told = self._read(prompt, salt)
            key = route_key([], session=session, tenant=salt)
            key = replace(key, tokens=self._lengths.get(session, 0) + len(told))
        work = Work(told, params, priority, deadline, itl, session, idempotency_key, salt, sender)
        send = partial(self._send, key)
        settled = None if settle is None else partial(self._settle, settle)
        request = MovingRequest(work, ids, send, self._later, self._thinking_format, settled, self._patience)
        with self._lock:
            self._refuse_ending()
            waits = self._may_wait()
            self._running.add(request)
        request.when_done(partial(self._ended, session))
        try:
            request.start(waits)
        except BaseException:
            with self._lock:
                self._running.discard(request)
            raise
        return request

    def _read(self, prompt: Any, salt: str) -> PicturePrompt:
        return read_prompt(self.model, prompt, self._replay, salt)

    def _may_wait(self) -> bool:
        """Whether one more request may wait for a replica. With the lock."""
        return self._patience > 0 and self._texts_waiting + sum(one.stranded for one in self._running) < MOST_WAITING

    def _later(self, function: Callable[[], None], seconds: float) -> None:
        """Call it after these seconds, or sooner if others wait already."""
        if not seconds:
            self._submit(function)
            return
        with self._lock:
            self._due.append(function)
            runs = len(self._due) > 1
        if not runs:
            timer = Timer(seconds, self._call_due)
            timer.daemon = True
            timer.start()

    def _call_due(self) -> None:
        with self._lock:
            due, self._due = self._due, []
        for function in due:
            self._submit(function)

    def _submit(self, function: Callable[[], None]) -> None:
        try:
            self._movers.submit(function)
        except RuntimeError:  # the front was closed meanwhile, which the function finds out
            function()

    def _settle(self, settle: Callable[[], None], finish: Callable[[], None]) -> Future[None]:
        def settled() -> None:
            try:
                settle()
            except Exception:  # the answer is there all the same
                LOG.exception("what follows the end of a request failed")
            finish()

        try:
            return self._settlers.submit(settled)
        except RuntimeError:  # the front was closed meanwhile
            settled()
            done = Future[None]()
            done.set_result(None)
            return done

    def _send(
        self, key: RouteKey, work: Work, answered: list[list[int]], listener: Listener, tried: list[str]
    ) -> Errand:
        """Give a request to the best replica that takes it and was not tried."""
        refused: Exception | None = None
        with self._lock:
            self.refuse_closed()  # a front that is being drained lets its requests move
            self.moved += bool(answered)
        for replica in self.by_choice(key):
            if replica.id in tried:
                continue
            tried.append(replica.id)
            try:
                errand = replica.submit(work, answered, listener)
            except (QueueFull, EngineClosed, ReplicaLost) as error:
                refused = error
                continue
            with self._lock:
                self._placement.sent(key, replica.id)
            return errand
        raise refused if isinstance(refused, QueueFull) else NoReplica()

    def by_choice(self, key: RouteKey) -> list[ReplicaHandle]:
        """The replicas that take requests, the best for this key first."""
        with self._lock:
            self.refuse_closed()
            self._observe()
            return [self._replicas[id] for id in self._placement.choose(key, self.namespace)]

    def _observe(self) -> None:
        views, seen = [], {}
        for id, replica in list(self._replicas.items()):
            try:
                load = replica.load()
            except (ReplicaLost, EngineClosed):
                del self._replicas[id]
                self._draining.discard(id)
                self.lost += 1
                continue
            unread = self._placement.costs.read * load.unread
            wait = unread if load.first_token is None else load.first_token
            takes = replica.takes and id not in self._draining
            seen[id] = (load, takes)
            views.append(
                ReplicaView(id, replica.rank, replica.namespace, wait, load.answering, load.free_tokens, takes)
            )
        # Requests sent since the last loads count beside them.
        if seen.keys() != self._seen.keys() or any(
            load is not self._seen[id][0] or takes != self._seen[id][1] for id, (load, takes) in seen.items()
        ):
            self._placement.observe(views)
            self._seen = seen

    def _ended(self, session: str | None, request: Request) -> None:
        with self._lock:
            self._running.discard(request)
            if session is None:
                return
            self._lengths[session] = len(request.prompt) + request.generated
            self._lengths.move_to_end(session)
            if len(self._lengths) > SESSIONS:
                self._lengths.popitem(last=False)

    def _thinking_format(self) -> ThinkingFormat:
        return ThinkingFormat.of(self.model.tokenizer)

    # ---- looking in

    @property
    def replicas(self) -> list[ReplicaHandle]:
        """Those that are there, drained ones too."""
        with self._lock:
            return list(self._replicas.values())

    @property
    def rows(self) -> int:
        """Sequences that all replicas work on at a time."""
        return sum(replica.rows for replica in self.replicas)

    def load(self) -> Load:
        """The work of all replicas together; the seconds are those of the one that is free first."""
        loads = [load for _, load in self._each(lambda replica: replica.load())]
        first = [load.first_token for load in loads if load.first_token is not None]
        return Load(
            sum(load.waiting for load in loads),
            sum(load.reading for load in loads),
            sum(load.answering for load in loads),
            sum(load.unread for load in loads),
            sum(load.free_tokens for load in loads),
            min(first, default=None),
        )

    def stats(self) -> dict[str, float]:
        """Counters of all replicas added up, and of the front."""
        told = self._each(lambda replica: replica.stats())
        found: dict[str, float] = {"replicas": len(told), "replicas_lost": self.lost, "moves": self.moved}
        for _, stats in told:
            for name, number in stats.items():
                found[name] = found.get(name, 0) + number
        return found

    def _each(self, ask: Callable[[ReplicaHandle], Found]) -> list[tuple[int, Found]]:
        """The answer of each replica, with its rank; of those that are lost meanwhile there is none."""
        answers = []
        for replica in self.replicas:
            with suppress(ReplicaLost, EngineClosed):
                answers.append((replica.rank, ask(replica)))
        return answers

    def drain_replica(self, id: str, seconds: float = 0.0) -> bool:
        """Send it no more requests, and have its running ones end within `seconds` or go on elsewhere.

        Returns whether its store took all that was computed. The replica stays open. Raises ValueError for an unknown
        id.
        """
        with self._lock:
            if (replica := self._replicas.get(id)) is None:
                raise ValueError(f"unknown replica {id!r}; expected one of {sorted(self._replicas)}")
            self._draining.add(id)
        try:
            return replica.drain(seconds)
        except ReplicaLost:  # if it is still there, its views tell whether it takes requests
            with self._lock:
                self._draining.discard(id)
            raise

    def drain(self, seconds: float = 0.0) -> bool:
        """As `Engine.drain`, of the requests of this front: its replicas go on, and other fronts may use them.

        Returns whether the store has all turns of sessions, as far as is known.
        """
        with self._lock:
            self.refuse_closed()
            self._ending = True
        until = monotonic() + seconds
        while monotonic() < until and self._running:
            sleep(DRAIN_LOOK)
        with self._lock:
            running = list(self._running)
        for request in running:
            request.drain()
        return not any(replica.unstored for replica in self.replicas)

    def close(self) -> None:
        """Close all replicas. Harmless if it was closed."""
        with self._lock:
            self._closed = True
            replicas, self._replicas = list(self._replicas.values()), {}
        for replica in replicas:
            replica.close()
        self._movers.shutdown()
        self._settlers.shutdown()

    def refuse_closed(self) -> None:
        """Raise EngineClosed if it was closed."""
        if self._closed:
            raise EngineClosed("the front was closed: make another one")

    def _refuse_ending(self) -> None:
        self.refuse_closed()
        if self._ending:
            raise EngineClosed("the front is being drained: it takes no more requests")

    def __enter__(self) -> Front:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
