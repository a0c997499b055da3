"""A request that outlives its replica: it goes on at another one, and no token is told twice or lost."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import replace
from functools import partial
from threading import RLock
from time import monotonic

from lmstate.cluster.handle import Errand, Listener, ReplicaLost, Told, Unreached, Work
from lmstate.engine.delivery import Delivery
from lmstate.engine.request import Request
from lmstate.engine.results import (
    Completion,
    Drained,
    EngineClosed,
    EngineError,
    NoReplica,
    Piece,
    QueueFull,
    SessionMoved,
)
from lmstate.engine.session import SessionBusy
from lmstate.generation.thinking import ThinkingFormat

MOST_LOST = 2  # replicas that may be lost with one answer; those that are drained do not count
LOOK = 0.25  # seconds between two looks for a new replica
LEAST_SECONDS = 1e-3  # of a deadline that is left to a request that moves

FINAL = (QueueFull, SessionBusy)  # refusals that a new request ends with; one that moves waits

Send = Callable[[Work, list[list[int]], Listener, list[str]], Errand]
"""`send(work, answered, listener, tried)`: have a replica go on with it that is not in `tried`, and add it there.
Raises what `Engine.submit` does."""


Later = Callable[[Callable[[], None], float], object]
"""`later(function, seconds)`: call it then, on a thread that may wait."""


Settle = Callable[[Callable[[], None]], "Future[None]"]
"""`settle(finish)`: do what follows the end of a request, then call `finish`, on a thread that may wait."""


class MovingRequest(Request):
    """A request of a front. Made by `Front.submit`, which sends it for the first time with `start`.

    While no replica takes requests it waits: it may be one that has no tokens yet.
    """

    def __init__(
        self,
        work: Work,
        ids: list[int],
        send: Send,
        later: Later,
        thinking: Callable[[], ThinkingFormat],
        settle: Settle | None = None,
        patience: float = 0.0,
    ) -> None:
        """`ids`: of the prompt, if they are known; `patience`: seconds that it waits for a replica."""
        super().__init__(ids, self._forward, Delivery(), thinking)
        self.moves = 0
        self.stranded = False  # whether it waits for a replica
        self._lost = 0  # of the replicas that it was at
        self._settle, self._patience = settle, patience
        self._attempt = 0  # number of the replica that is heard
        self._tried: list[str] = []  # replicas, since it moved
        self._refusal: Exception | None = None  # the last one
        self._work, self._send, self._later = work, send, later
        self._began = monotonic()
        self._lock = RLock()
        self._errand: Errand | None = None
        self._answered: list[list[int]] = [[] for _ in range(work.params.n)]
        self._texts = [""] * work.params.n
        self._ended = [False] * work.params.n
        # Tokens and characters of each answer that the replica which is heard told of; None before it tells of any.
        self._places: list[tuple[int, int] | None] = [None] * work.params.n
        self._homeless: float | None = None  # since when no replica takes it
        self._asked_again = False  # a session's turn, whether it may be there already
        self._drained = False
        self._came = False  # whether it came to the replica that is heard
        self._heard = 0  # pieces from the replica that is heard
        self._told_read: int | None = None  # of these, as many as the replica knows to be read

    def start(self, waits: bool = False) -> None:
        """Send it for the first time. `waits`: where no replica takes it, it waits for one.

        Raises what `Engine.submit` does, and NoReplica.
        """
        try:
            self._sent()
        except NoReplica:
            if not waits:
                raise
            self._wait()

    def drain(self) -> None:
        """End it as `Engine.drain` does, unless it has ended. Waits for `settle`."""
        with self._lock:
            if self.done:
                return
            self._drained = True
            self._attempt += 1  # nothing more is heard of it
            errand, self._errand = self._errand, None
            answered = [list(tokens) for tokens in self._answered]
        if errand is not None:
            errand.cancel()
        finish = partial(self._finish, Drained(answered, self._work.params.seed or 0))
        if self._settle is None:
            finish()
        else:
            self._settle(finish).result()

    def _sent(self) -> None:
        work = self._work
        if work.deadline is not None:
            work = replace(work, deadline=max(LEAST_SECONDS, work.deadline - (monotonic() - self._began)))
        answered = [list(tokens) for tokens in self._answered] if any(self._answered) else []
        if answered and work.session is not None:
            work = replace(work, answered_to=self.prompt)
        attempt = self._attempt
        errand = self._send(work, answered, partial(self._hear, attempt), self._tried)
        with self._lock:
            if not self.done and attempt == self._attempt:
                self._errand = errand
            drained = self._drained
        if drained:
            errand.cancel()
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
        self._tell_read()

    def _taken(self, count: int) -> int:
        super()._taken(count)
        self._tell_read()
        return count

    def _tell_read(self) -> None:
        """Tell the replica how far the reader is: a note for each quarter of the pieces that may be unread."""
        with self._lock:
            if (errand := self._errand) is None or self.done or self.max_unread is None or self._read is None:
                return
            read = self._heard - (len(self._pieces) - self._read)
            if self._told_read is not None and read < self._told_read + max(1, self.max_unread // 4):
                return
            self._told_read = read
        errand.read_elsewhere(read, self.max_unread)

    def _hear(self, attempt: int, told: Told, delivery: Delivery) -> None:
        """Take news of a replica, unless the request has moved on from there."""
        with self._lock:
            if attempt != self._attempt or self.done:
                return
            self._delivery = delivery
            self.prompt = told.prompt or self.prompt
            if told.reused is not None:
                self._came = True
                self.computed = told.computed
                if self.reused is None:
                    self.begin(told.reused)
            try:
                for piece in told.pieces:
                    self._add(piece)
                    self._heard += 1
            except ReplicaLost as error:
                self._finish(error)
                return
            outcome = told.outcome
            if outcome is None:
                self._homeless = None
            elif self._refused(outcome):
                self._refusal = outcome if isinstance(outcome, FINAL) else None
                self._go_on()
            elif isinstance(outcome, Drained | ReplicaLost) or self._may_be_stored(outcome):
                self._lost += isinstance(outcome, ReplicaLost)
                if self._lost > MOST_LOST:
                    gave_up = f"{self._lost} replicas were lost with this answer, the last one so: {outcome}"
                    self._finish(EngineError(gave_up))
                    return
                self.moves += 1
                self._tried = []
                self._go_on()
            else:
                self._attempt += 1  # nothing more is heard of it
                if self._settle is None:
                    self._finish(outcome)
                else:
                    self._settle(partial(self._finish, outcome))

    def _refused(self, outcome: object) -> bool:
        """Whether the replica did not take it, and another one may."""
        if isinstance(outcome, SessionBusy):
            return self.moves > 0  # by what is left of this turn, say
        return not self._came and isinstance(outcome, QueueFull | EngineClosed | Unreached)

    def _may_be_stored(self, outcome: object) -> bool:
        """Whether a replica that was taken for lost may have committed this turn before another one did, once."""
        asks = isinstance(outcome, SessionMoved) and self.moves > 0 and not self._asked_again
        self._asked_again |= asks
        return asks

    def _go_on(self) -> None:
        """Send it to another replica."""
        self._attempt += 1
        self._errand, self._came, self._heard, self._told_read = None, False, 0, None
        self._places = [None] * self._work.params.n
        self._later(self._move, 0.0)

    def _move(self) -> None:
        self.stranded = False
        if self.done:
            return
        try:
            self._sent()
        except (NoReplica, *FINAL) as error:  # a replica that replaces the last one may come, or room at another one
            if isinstance(error, FINAL):
                self._refusal = error
            now = monotonic()
            self._homeless = self._homeless or now
            late = self._work.deadline is not None and now - self._began >= self._work.deadline
            waited = now - self._homeless >= self._patience
            if (self._refusal is not None and not self.moves) or self.cancelled or late or waited:
                with self._lock:
                    self._finish(self._refusal or error)
            else:
                self._wait()
        except Exception as error:
            with self._lock:
                self._finish(self._refusal or error)

    def _wait(self) -> None:
        """Look for a replica again in a moment."""
        self._homeless = self._homeless or monotonic()
        self._tried, self._refusal = [], None
        self.stranded = True
        self._later(self._move, LOOK)

    def _finish(self, outcome: Completion | BaseException) -> None:
        errand, self._errand = self._errand, None
        if errand is not None and isinstance(outcome, ReplicaLost):
            errand.cancel()
        self.finish(outcome, Delivery())

    def _add(self, piece: Piece) -> None:
        """Tell of what is new in a piece. Raises ReplicaLost for one that does not follow what was told.

        A replica that had the turn already tells of it from an earlier token on, and cuts it as it likes.
        """
        index, start = piece.index, piece.start
        had, text = self._answered[index], self._texts[index]
        if self._ended[index]:  # an answer that had ended is ended again
            return
        if (place := self._places[index]) is None:
            place = start, self._text_before(index, start)
        repeated, known = len(had) - start, len(text) - place[1]
        follows = place[0] == start and repeated >= 0
        if (
            not follows
            or piece.tokens[:repeated] != had[start : start + len(piece.tokens)]
            or piece.text[:known] != text[place[1] : place[1] + len(piece.text)]
        ):
            raise ReplicaLost("the replica sent other tokens than those that follow what was answered")
        self._places[index] = start + len(piece.tokens), place[1] + len(piece.text)
        if repeated or known:
            tokens, logprobs = piece.tokens[repeated:], piece.logprobs and piece.logprobs[repeated:]
            piece = Piece(piece.text[known:], index, tokens, logprobs, piece.finished, piece.certain, len(had))
            if not (tokens or piece.text or piece.finished):
                return
        had.extend(piece.tokens)
        self._texts[index] += piece.text
        self._ended[index] = piece.finished is not None
        self.push(piece)

    def _text_before(self, index: int, start: int) -> int:
        """Characters of an answer's text that were told with its first `start` tokens. Raises ReplicaLost where they
        end within a piece."""
        tokens = characters = 0
        for piece in self._pieces:
            if piece.index == index and tokens + len(piece.tokens) <= start:
                tokens += len(piece.tokens)
                characters += len(piece.text)
        if tokens != start:
            raise ReplicaLost(f"the replica goes on after {start} tokens, and {tokens} were told")
        return characters
