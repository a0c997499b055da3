"""A request that outlives its replica: it goes on at another one, and no token is told twice or lost."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from threading import RLock
from time import monotonic

from lmstate.cluster.handle import Errand, Listener, ReplicaLost, Told, Work
from lmstate.engine.delivery import Delivery
from lmstate.engine.request import Request
from lmstate.engine.results import Completion, Drained, EngineError, Piece
from lmstate.generation.thinking import ThinkingFormat

MOST_MOVES = 2
LEAST_SECONDS = 1e-3  # of a deadline that is left to a request that moves

Send = Callable[[Work, list[list[int]], Listener], Errand]
"""`send(work, answered, listener)`: have a replica go on with it. Raises what `Engine.submit` does."""


class MovingRequest(Request):
    """A request of a front. Made by `Front.submit`, which sends it for the first time with `start`."""

    def __init__(
        self,
        work: Work,
        ids: list[int],
        send: Send,
        later: Callable[[Callable[[], None]], object],
        thinking: Callable[[], ThinkingFormat],
    ) -> None:
        """`ids`: of the prompt, if they are known; `later(function)` calls it soon, on a thread that may wait."""
        super().__init__(ids, self._forward, Delivery(), thinking)
        self.moves = 0
        self._work, self._send, self._later = work, send, later
        self._began = monotonic()
        self._lock = RLock()
        self._errand: Errand | None = None
        self._answered: list[list[int]] = [[] for _ in range(work.params.n)]
        self._texts = [""] * work.params.n
        self._ended = [False] * work.params.n

    def start(self) -> None:
        """Send it. Raises what `Engine.submit` does."""
        work = self._work
        if self.moves and work.deadline is not None:
            work = replace(work, deadline=max(LEAST_SECONDS, work.deadline - (monotonic() - self._began)))
        answered = [list(tokens) for tokens in self._answered] if any(self._answered) else []
        errand = self._send(work, answered, partial(self._hear, self.moves))
        with self._lock:
            if not self.done:
                self._errand, self.prompt = errand, errand.prompt
        self._forward()

    def _forward(self) -> None:
        """Tell the replica what the sender wants."""
        with self._lock:
            if (errand := self._errand) is None:
                return
        if self.end_of_thinking is not None:
            errand.end_thinking()
        if self.cancelled:
            errand.cancel()

    def _hear(self, attempt: int, told: Told) -> None:
        """Take news of a replica, unless the request has moved on from there."""
        with self._lock:
            if attempt != self.moves or self.done:
                return
            if told.reused is not None:
                self.computed = told.computed
                if self.reused is None:
                    self.begin(told.reused)
            try:
                for piece in told.pieces:
                    self._add(piece)
            except ReplicaLost as error:
                self._finish(error)
                return
            if told.outcome is None:
                self._delivery.deliver()
            elif not isinstance(told.outcome, Drained | ReplicaLost):
                self._finish(told.outcome)
            elif self.moves == MOST_MOVES:
                gave_up = EngineError(
                    f"the answer moved {self.moves} times, and its replica ended again: {told.outcome}"
                )
                self._finish(gave_up)
            else:
                self._delivery.deliver()
                self.moves += 1
                self._errand = None
                self._later(self._move)

    def _move(self) -> None:
        try:
            self.start()
        except Exception as error:
            with self._lock:
                self._finish(error)

    def _finish(self, outcome: Completion | BaseException) -> None:
        errand, self._errand = self._errand, None
        if errand is not None and isinstance(outcome, ReplicaLost):
            errand.cancel()
        self.finish(outcome, Delivery())

    def _add(self, piece: Piece) -> None:
        """Tell of what is new in a piece. Raises ReplicaLost for one that does not follow what was told."""
        index, had = piece.index, self._answered[piece.index]
        if self._ended[index]:  # an answer that had ended is ended again
            return
        again = len(had) - piece.start
        if again:  # the answer to a turn that was stored before its sender heard of it: all of it at once
            text = self._texts[index]
            if again < 0 or piece.start or piece.tokens[: len(had)] != had or not piece.text.startswith(text):
                raise ReplicaLost("the replica sent other tokens than those that follow what was answered")
            tokens, logprobs = piece.tokens[again:], piece.logprobs and piece.logprobs[again:]
            piece = Piece(piece.text[len(text) :], index, tokens, logprobs, piece.finished, piece.certain, len(had))
        had.extend(piece.tokens)
        self._texts[index] += piece.text
        self._ended[index] = piece.finished is not None
        self.push(piece)
