"""A replica as the front sees it: requests go in as values, and lists of pieces come out."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Protocol

from lmstate.engine.delivery import Delivery
from lmstate.engine.engine import Engine
from lmstate.engine.request import Reader, Request
from lmstate.engine.results import Completion, EngineError, Load, Piece
from lmstate.generation.params import SamplingParams
from lmstate.vision.reader import PicturePrompt


class ReplicaLost(EngineError):
    """A replica ended, or does not answer: it is unknown what else it did."""


class Unreached(ReplicaLost):
    """A request did not come to its replica, which had ended before."""


@dataclass(frozen=True)
class Work:
    """A request, whole: it can be given to any replica of the same namespace."""

    prompt: str | PicturePrompt | list[dict[str, Any]]
    params: SamplingParams  # with a seed, if tokens are drawn
    priority: int = 0
    deadline: float | None = None
    itl: float | None = None
    session: str | None = None  # whose turn it is; `prompt` is then appended to it
    key: str | None = None  # of the session's turn
    salt: str = ""  # of its prefixes
    sender: str = ""
    answered_to: list[int] | None = None  # of a session's turn that moves: the prompt that its answer followed


@dataclass(frozen=True)
class Told:
    """News of a request: pieces since the last news, how much of its prompt is done, and its outcome once it ended."""

    pieces: list[Piece]
    computed: int
    reused: int | None  # None before its prompt is begun
    outcome: Completion | BaseException | None = None
    prompt: list[int] | None = None  # in the first news, of a session's turn: all of it, what is before it too


Listener = Callable[[Told, Delivery], None]
"""Called for each news of a request, one at a time and in their order, on any thread. It must not wait. It adds news
for its own readers to the delivery. The caller delivers, once for the news of many requests."""


def tell(listener: Listener, told: Told) -> None:
    """Tell a listener alone."""
    listener(told, delivery := Delivery())
    delivery.deliver()


class Errand(Protocol):
    """A request at a replica."""

    def cancel(self) -> None: ...

    def end_thinking(self) -> None: ...

    def read_elsewhere(self, count: int, max_unread: int) -> None:
        """As `Request.read_elsewhere`."""
        ...


class ReplicaHandle(Protocol):
    """A replica. Its methods are for any thread; `submit` and `load` raise `ReplicaLost` once it is gone."""

    @property
    def id(self) -> str: ...

    @property
    def rank(self) -> int: ...

    @property
    def namespace(self) -> str: ...

    @property
    def rows(self) -> int: ...

    @property
    def takes(self) -> bool:
        """Whether it takes requests, as far as is known."""
        ...

    @property
    def unstored(self) -> int:
        """Sessions whose last turn its store did not take yet."""
        ...

    def submit(self, work: Work, answered: list[list[int]], listener: Listener) -> Errand:
        """Queue a request that began with `answered` elsewhere.

        Raises what `Engine.submit` does; `QueueFull` and `EngineClosed` can also be the outcome that is heard.
        """
        ...

    def load(self) -> Load:
        """The same object as before if nothing newer is known."""
        ...

    def stats(self) -> dict[str, float]: ...

    def drain(self, seconds: float) -> bool: ...

    def close(self) -> None: ...


def submitted(engine: Engine, work: Work, answered: list[list[int]]) -> Request:
    """The request that an engine makes of work; it goes on from the tokens `answered` elsewhere."""
    return engine.submit(
        work.prompt,
        work.params,
        priority=work.priority,
        deadline=work.deadline,
        itl=work.itl,
        session=work.session,
        idempotency_key=work.key,
        salt=work.salt,
        sender=work.sender,
        answered=answered,
        answered_to=work.answered_to,
    )


def follow(request: Request, answered: Sequence[Sequence[int]], reader: Reader) -> None:
    """`Request.follow` for a front whose sender has the tokens `answered`.

    Two turns of one key are one request, and each front may know another part of its answer: where the request began
    with other tokens elsewhere, they come first.
    """
    begins = True

    def news(pieces: list[Piece], outcome: Completion | BaseException | None) -> None:
        nonlocal begins
        if pieces and begins:
            begins = False
            beginning = request.beginning
            if [piece.tokens for piece in beginning] != [list(tokens) for tokens in answered]:
                pieces = [*(piece for piece in beginning if piece.tokens), *pieces]
        reader(pieces, outcome)

    request.follow(news)


class LocalReplica:
    """An engine of this process as a replica."""

    def __init__(self, engine: Engine, rank: int, id: str | None = None) -> None:
        self.engine, self.rank = engine, rank
        self.id = id or f"local-{rank}"
        self.rows, self.takes = engine.rows, True
        self._lost = False
        self._lock = Lock()
        self._listeners: dict[Listener, None] = {}

    @property
    def namespace(self) -> str:
        return self.engine.namespace

    @property
    def unstored(self) -> int:
        return self.engine.unstored

    def submit(self, work: Work, answered: list[list[int]], listener: Listener) -> Request:
        self._refuse_lost()
        request = submitted(self.engine, work, answered)
        with self._lock:
            if not self._lost:
                self._listeners[listener] = None
        self._refuse_lost()

        def news(pieces: list[Piece], outcome: Completion | BaseException | None) -> None:
            with self._lock:  # nothing is told of one that is lost but that it is
                if self._lost:
                    return
            tell(listener, Told(pieces, request.computed, request.reused, outcome, request.prompt))
            if outcome is not None:
                with self._lock:
                    self._listeners.pop(listener, None)

        follow(request, answered, news)
        return request

    def load(self) -> Load:
        self._refuse_lost()
        return self.engine.load()

    def stats(self) -> dict[str, float]:
        self._refuse_lost()
        return self.engine.stats()

    def drain(self, seconds: float) -> bool:
        return self.engine.drain(seconds)

    def close(self) -> None:
        self.engine.close()

    def lose(self) -> None:
        """Have it end as a process does that is killed: from now on nothing is heard of it."""
        with self._lock:
            self._lost = True
            listeners, self._listeners = list(self._listeners), {}
        for listener in listeners:
            tell(listener, Told([], 0, None, ReplicaLost(f"replica {self.id} was lost")))

    def _refuse_lost(self) -> None:
        if self._lost:
            raise ReplicaLost(f"replica {self.id} was lost")
        self.engine.refuse_closed()
