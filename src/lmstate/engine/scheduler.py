"""One step of the engine's thread: begin requests, read a part of a prompt, give every answer a token."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from time import perf_counter
from typing import TYPE_CHECKING

from torch import Tensor

from lmstate import ops
from lmstate.engine.choice import Choice, logprob
from lmstate.engine.job import Job
from lmstate.engine.pace import Pace
from lmstate.engine.prefix.tree import shared
from lmstate.engine.queue import Queue
from lmstate.engine.results import Finished, Piece
from lmstate.engine.reuse import PrefixReuse
from lmstate.engine.rows import RowPool
from lmstate.state import Snapshot, State

if TYPE_CHECKING:
    from lmstate.models.model import Model

COUNTERS = ("requests", "finished", "failed", "prompt_tokens", "reused_tokens", "computed_tokens", "generated_tokens")
WORTH_WAITING = 16  # tokens that another request is about to compute, for which one waits
ECHO_CHUNK = 64  # tokens of a prompt read at once where the logits of all of them are wanted


class Scheduler:
    """Owns the rows. Every prompt is read in a state of its own, of one row, and its answers join the others then.

    All of it runs on one thread, but for `waiting`, that any thread may add to. `ended(job)` is called with each
    request whose answers all ended, before its sender hears of it.
    """

    def __init__(
        self,
        model: Model,
        new_state: Callable[[int], State],
        rows: int,
        waiting: Queue,
        pace: Pace,
        reuse: PrefixReuse,
        ended: Callable[[Job], None],
    ) -> None:
        self.model = model
        self.rows = rows
        self.waiting = waiting
        self.reading: list[Job] = []  # whose prompts are being read
        self.answering: list[Job] = []
        self.counts: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.pool: RowPool[Choice] = RowPool(model, new_state, rows)
        self.peak = 0  # most bytes of rows at a time
        self._jobs: dict[Choice, Job] = {}  # of the choices that have a row
        self._pace, self._reuse, self._ended = pace, reuse, ended

    def step(self) -> bool:
        """One step of everything. Whether anything could be done."""
        try:
            self._end_early()
            self._seat()
            self._admit()
            self._read()
            self._decode()
        except Exception as error:  # of the scheduler itself, not of one request: nobody is to wait for ever
            for job in self.all():
                self._fail(job, error)
        return bool(self.reading or self.answering)

    def end_all(self) -> None:
        for job in self.all():
            self._end(job, "cancelled")

    def all(self) -> list[Job]:
        return [*self.waiting, *self.reading, *self.answering]

    def row_bytes(self) -> int:
        """Bytes of all states, and of what answers without a row begin from."""
        states = [job.state for job in self.reading if job.state is not None]
        states += [job.source for job in self.answering if isinstance(job.source, State)]
        sources = [job.source for job in self.answering if isinstance(job.source, Snapshot)]
        reading = sum(sum(state.memory().values()) for state in states)
        return self.pool.nbytes() + reading + sum(source.nbytes for source in sources)

    # ---- beginning

    def _admit(self) -> None:
        """Start requests while there are rows for them."""
        if self._free() <= 0 or not len(self.waiting):
            return
        for job in self.waiting:
            if self._free() <= 0:
                return
            if not self._better_wait(job):
                self.waiting.discard(job)
                self._guarded(job, self._start)

    def _free(self) -> int:
        return self.rows - len(self.pool) - len(self.reading) - sum(len(job.unseated) for job in self.answering)

    def _better_wait(self, job: Job) -> bool:
        """Whether another request is reading what this one begins with too, and has not come to where they part."""
        if self._reuse.fetching(job):
            return True
        if job.follows is not None:
            leader, until = job.follows
            if leader in self.reading and leader.at < until:
                return True
            job.follows = None
            return False
        for leader in self.reading:
            until = min(shared(leader.prompt, job.prompt), len(job.prompt) - 1)
            if until - max(leader.at, self._reuse.prefixes.match(job.prompt).length) >= WORTH_WAITING:
                leader.cuts.add(until)
                job.follows = (leader, until)
                return True
        return False

    def _start(self, job: Job) -> None:
        job.passed()
        self.reading.append(job)
        job.state = self._reuse.begin(job)
        self.counts["reused_tokens"] += job.reuse.reused
        if job.at == len(job.prompt):
            logits = self.model([[]], job.state)  # those after its last token, which are known
            assert logits is not None
            self._begin_answers(job, logits[0])

    # ---- prompts

    def _read(self) -> None:
        """Read a part of a prompt: of the request that came first among those of the largest priority."""
        jobs = sorted(self.reading, key=lambda job: (-job.options.priority, job.order))
        if jobs:
            self._guarded(jobs[0], self._read_chunk)

    def _read_chunk(self, job: Job) -> None:
        assert job.state is not None
        start, echo = job.at, job.options.prompt_logprobs
        count = job.chunk(min(self._pace.chunk(decoding=len(self.pool) > 0), ECHO_CHUNK if echo is not None else 512))
        ids = job.prompt[start : start + count]
        begin = perf_counter()
        logits = self.model([ids], job.state, logits="last" if echo is None else "all")
        assert logits is not None
        self._pace.read(count, perf_counter() - begin)
        if echo is not None:
            self._echo(job, logits[0], start)
            logits = logits[:, -1]
        job.request.computed += count
        self.counts["computed_tokens"] += count
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
        self.counts["prompt_tokens"] += len(job.prompt)
        self.reading.remove(job)
        self.answering.append(job)
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
        for job in list(self.answering):
            while job.unseated and len(self.pool) < self.rows:
                choice = job.unseated.pop(0)
                assert job.source is not None
                self.pool.join(choice, job.source)
                self._jobs[choice] = job
            if not job.unseated:
                job.source = None

    # ---- answers

    def _decode(self) -> None:
        """One token for every answer that has a row."""
        self.pool.tidy()
        for choice in self.pool.owners:
            self._end_if_full(choice)
        choices = self.pool.owners
        if not choices:
            return
        begin = perf_counter()
        try:
            logits = self.pool.step({choice: choice.feed for choice in choices})
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
        self._take([choice], self.pool.step({choice: choice.feed}))

    def _take(self, choices: list[Choice], logits: Tensor) -> None:
        """The next token of each of these, from logits float32 `[R, V]`."""
        rows = {choice: self.pool.row(choice) for choice in choices}
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
        self.counts["generated_tokens"] += len(piece.tokens)
        job.request.push(piece)

    def _end_if_full(self, choice: Choice) -> None:
        most = self.model.max_positions
        if most is not None and self.pool.length(choice) + len(choice.feed) > most:
            job = self._jobs[choice]
            job.request.push(choice.end("capacity"))
            self._leave(choice)
            self._settle(job)

    # ---- endings

    def _leave(self, choice: Choice) -> None:
        """An answer gives its row back; what the row computed, up to the end of the answer, is kept."""
        job = self._jobs.pop(choice)
        self.pool.rewind(choice, len(job.prompt) + choice.kept())
        self._keep(self.pool.snapshot(choice))
        self.pool.leave(choice)

    def _settle(self, job: Job) -> None:
        """Finish a request whose answers all ended."""
        if job in self.answering and all(choice.finished is not None for choice in job.choices):
            self.answering.remove(job)
            self._finish(job)

    def _finish(self, job: Job) -> None:
        self.counts["finished"] += 1
        self._ended(job)
        job.request.finish(job.completion())

    def _end_early(self) -> None:
        for job in self.all():
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

    def _fail(self, job: Job, error: Exception) -> None:
        self.counts["failed"] += 1
        self._forget(job)
        job.error = error
        self._ended(job)
        job.request.finish(error)

    def _forget(self, job: Job) -> None:
        """Take a request out of everything; what was computed is kept."""
        if job.state is not None and job.at and job in self.reading:
            with suppress(Exception):
                self._keep(job.state.snapshot(0))
        for choice in [choice for choice, owner in self._jobs.items() if owner is job]:
            self._leave(choice)
        job.unseated.clear()
        job.state = job.source = None
        self.waiting.discard(job)
        for jobs in (self.reading, self.answering):
            if job in jobs:
                jobs.remove(job)

    def _keep(self, snapshot: Snapshot) -> None:
        held = self.row_bytes()
        self.peak = max(self.peak, held)
        self._reuse.keep(snapshot, held)

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
    values, ids = ops.argmax(logits if len(rows) == len(logits) else logits[rows])
    return [None if bad else token for token, bad in zip(ids.tolist(), values.isnan().tolist())]
