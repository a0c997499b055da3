"""Requests in work: by phase, with the rows they have, and how they end."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, TypeVarTuple

from torch import Tensor

from lmstate.engine.delivery import Delivery
from lmstate.engine.drafting import Drafting
from lmstate.engine.job import Job, Preempted, Reader
from lmstate.engine.queue import Queue
from lmstate.engine.results import Completion, Drained, Piece
from lmstate.engine.reuse import PrefixReuse
from lmstate.engine.rows import RowPool
from lmstate.engine.turns import Turn, had_turn, turns
from lmstate.errors import RanksError
from lmstate.generation.row import AnswerRow, Finish
from lmstate.ops.types.block_table import KVBlock
from lmstate.state import BlockPool, Snapshot, State

if TYPE_CHECKING:
    from lmstate.models.model import Model

COUNTERS = (
    "requests", "finished", "failed", "prompt_tokens", "reused_tokens", "computed_tokens", "generated_tokens",
    "preempted", "rested", "pictures", "picture_seconds",
)  # fmt: skip

Arguments = TypeVarTuple("Arguments")


class Workload:
    """The requests that an engine has, each in one phase: it waits, its prompt is read, or its answers are made.

    All of it is for one thread, but for `waiting`, that any thread may add to. `ended(job, outcome)` is called with
    each request whose answers all ended, and tells its sender.
    """

    def __init__(
        self,
        model: Model,
        pool: RowPool[AnswerRow | Reader],
        waiting: Queue,
        reuse: PrefixReuse,
        blocks: BlockPool,
        drafting: Drafting,
        ended: Callable[[Job, Completion | BaseException], None],
        delivery: Delivery,
    ) -> None:
        self.model, self.pool, self.delivery = model, pool, delivery
        self.waiting = waiting
        self.reading: list[Job] = []  # whose prompts are being read
        self.answering: list[Job] = []
        self.preempted: list[Preempted] = []  # answers whose rows were taken back
        self.jobs: dict[AnswerRow, Job] = {}  # of the answers that have a row
        self.counts: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.peak = 0  # most bytes of rows at a time
        self.looks = 2  # steps to look at the bytes of rows after
        self.crowded = False  # rows were taken back, and nothing has ended since
        self.failure: RanksError | None = None  # what a process of the model ended with, and so all of them
        self.reuse, self._blocks, self._drafting, self._tell_end = reuse, blocks, drafting, ended

    # ---- what there is

    def all(self) -> list[Job]:
        return [*self.waiting.jobs(), *self.reading, *self.answering]

    def readers(self) -> list[Reader]:
        """Texts that are read, or were and wait for their answers."""
        return [*(work for work in self.preempted if work.reading), *self.reading]

    def turns(self) -> Mapping[Job, Turn]:
        """The places of all requests: see `turns`."""
        return turns(self.all())

    def in_turn(self, readers: list[Reader]) -> list[Reader]:
        """Texts in the order of their requests' turns."""
        if len(readers) < 2:
            return readers
        places = self.turns()
        return sorted(readers, key=lambda reader: places[reader.job])

    def at_work(self) -> list[Job]:
        """The request of each row in use: whose prompt is read, or an answer of which is made."""
        return [*self.jobs.values(), *(work.job for work in self.preempted if work.reading), *self.reading]

    def row_bytes(self) -> int:
        """Bytes of all states, and of what answers without a row begin from, but for what the prefix store has too."""
        works: list[Reader] = [*self.reading, *self.preempted]
        states = [work.state for work in works if work.state is not None]
        states += [job.source for job in self.answering if isinstance(job.source, State)]
        sources = [job.source for job in self.answering if isinstance(job.source, Snapshot)]
        apart = self.pool.nbytes_apart() + sum(state.nbytes_apart() for state in states)
        held = [each for source in sources for each in source.held()]
        apart += sum(each.nbytes for each in held if isinstance(each, Tensor))
        prefixes = self.reuse.prefixes
        if prefixes.tier is None or not prefixes.tier.writing:
            return apart + max(0, self._blocks.nbytes - prefixes.block_nbytes)
        # Entries that wait to be written hold blocks too, which belong to no row.
        blocks = chain(self.pool.blocks(), *(state.blocks() for state in states))
        own = {id(each): each for each in (*blocks, *held) if isinstance(each, KVBlock) and not prefixes.holds(each)}
        return apart + sum(block.nbytes for block in own.values())

    # ---- rows

    def joined(self) -> None:
        """A row has joined, or more is kept. The row takes blocks of its own in the next step."""
        self.looks = 2

    def seat(self, choice: AnswerRow, job: Job, source: State | Snapshot) -> None:
        """Give an answer a row that goes on from there."""
        self.pool.join(choice, source)
        self.jobs[choice] = job
        self.joined()

    def leave(self, choice: AnswerRow) -> None:
        """An answer gives its row back; what the row computed, up to the end of the answer, is kept."""
        job = self.jobs.pop(choice)
        self._drafting.leave(choice, job)
        try:
            self.pool.rewind(choice, len(job.prompt) + choice.kept())
            self.keep(self.pool.snapshot(choice), job)
        finally:  # a row without a choice would never be given to another one
            self.pool.leave(choice)
            self.crowded = False

    def set_aside(self, choice: AnswerRow, job: Job) -> None:
        """Take the row of an answer back, which goes on later; what it computed is kept if there is room for it."""
        self.preempted.append(Preempted.of(job, choice))
        del self.jobs[choice]
        kept = self.pool.snapshot(choice)
        self.pool.leave(choice)
        self.keep(kept, job)

    def rest(self) -> None:
        """Take rows back from answers whose readers are behind: they go on once their readers have caught up."""
        for choice, job in list(self.jobs.items()):
            if choice in self.jobs and job.request.rests():
                self.guarded(job, self._rest, choice, job)

    def _rest(self, choice: AnswerRow, job: Job) -> None:
        self.set_aside(choice, job)
        self.counts["rested"] += 1
        self.crowded = False

    def unseat(self, reader: Reader) -> None:
        """Take the row of a text back, if it has one."""
        if reader in self.pool:
            self.pool.leave(reader)

    def read_so_far(self, job: Job) -> Snapshot:
        """The part of a prompt that is read, as a value."""
        return self.pool.snapshot(job) if job.state is None else job.state.snapshot(0)

    def keep(self, snapshot: Snapshot, job: Job) -> None:
        """Have the prefix store keep what was computed of a request."""
        held = self.row_bytes()
        self.peak = max(self.peak, held)
        self.joined()
        self.reuse.keep(snapshot, held, job.salt)

    # ---- answers

    def give(self, job: Job, choice: AnswerRow, token: int, logits: Tensor) -> None:
        """Hand one more token of an answer, and those that its grammar leaves no choice about, to the request."""
        at = len(choice.tokens)
        text = choice.take(token, logits)
        self.push(job, choice, text, choice.tokens[at:])
        # A log probability needs the logits before its token: forced ones are drafts that hold then.
        if choice.forced and not choice.over and job.params.logprobs is None:
            self.push(job, choice, *choice.force())

    def push(self, job: Job, choice: AnswerRow, text: str, tokens: list[int]) -> None:
        self.counts["generated_tokens"] += len(tokens)
        if tokens and len(choice.tokens) <= len(job.told(choice.index)):  # chosen once more
            text, tokens = "", []
        logprobs = choice.logprobs[len(choice.logprobs) - len(tokens) :] if job.params.logprobs is not None else None
        start = len(choice.tokens) - len(tokens)
        job.request.push(Piece(text, choice.index, tokens, logprobs, choice.finished, choice.certain(), start))

    def end_answer(self, job: Job, choice: AnswerRow, why: Finish) -> None:
        self.push(job, choice, choice.end(why), [])

    # ---- endings

    def settle(self, job: Job) -> None:
        """Finish a request whose answers all ended."""
        if job in self.answering and all(choice.finished is not None for choice in job.choices):
            self.answering.remove(job)
            job.source = None
            self._finish(job)

    def end_early(self) -> None:
        """End the requests, or the thinking of those, that are not to go on."""
        for job in self.all():
            if job.request.cancelled:
                self.guarded(job, self._end, job, "cancelled")
            elif job.overdue:
                self.guarded(job, self._end, job, "deadline")
            elif job.request.end_of_thinking is not None:
                self.guarded(job, _end_thinking, job)

    def end_all(self) -> None:
        """End all requests as they are, or with the error that lost the model."""
        for job in self.all():
            if self.failure is None:
                self.guarded(job, self._end, job, "cancelled")
            else:
                self.fail(job, self.failure)
        self.delivery.deliver()

    def drain(self) -> None:
        """End all requests with their answers so far; the computed part of them is kept."""
        for job in self.all():
            answered = [list(choice.tokens) for choice in job.choices]
            told = answered or [list(job.told(index)) for index in range(job.params.n)]
            self._forget(job)
            job.error = Drained(told, job.seed)
            self._ended(job, job.error)
        self.delivery.deliver()

    def guarded(self, job: Job, action: Callable[[*Arguments], None], *arguments: *Arguments) -> None:
        """Do it; what it raises is the end of this request, and of no other."""
        try:
            action(*arguments)
        except BaseException as error:  # of a model, a grammar or a store that others wrote: its sender hears of it
            self.fail(job, error)

    def fail(self, job: Job, cause: BaseException) -> None:
        error = cause
        if isinstance(cause, RanksError):
            self.failure = cause
        if not isinstance(cause, Exception):  # a panic of native code, say, which is not to end who reads the answer
            error = RuntimeError(f"{type(cause).__name__}: {cause}")
            error.__cause__ = cause
        self.counts["failed"] += 1
        self.crowded = False
        self._forget(job)
        job.error = error
        self._ended(job, error)

    def _end(self, job: Job, why: Finish) -> None:
        """End a request wherever it is."""
        if not job.choices:
            job.begin_answers(self.model)
        for choice in job.choices:
            if choice.finished is None:
                self.end_answer(job, choice, why)
        self._forget(job)
        self._finish(job)

    def _finish(self, job: Job) -> None:
        self.counts["finished"] += 1
        self.crowded = False
        self._ended(job, job.completion())

    def _ended(self, job: Job, outcome: Completion | BaseException) -> None:
        had_turn(job.sender, self.waiting.jobs(), perf_counter())
        self._tell_end(job, outcome)

    def _forget(self, job: Job) -> None:
        """Take a request out of everything; the computed part is kept if possible: the request may have ended for lack
        of memory."""
        if job.at and job in self.reading:
            with suppress(BaseException):
                self.keep(self.read_so_far(job), job)
        readers: list[Reader] = [job, *(work for work in self.preempted if work.job is job)]
        for reader in readers:
            with suppress(BaseException):
                self.unseat(reader)
        for choice in [choice for choice, owner in self.jobs.items() if owner is job]:
            with suppress(BaseException):
                self.leave(choice)
        job.unseated.clear()
        self.preempted = [work for work in self.preempted if work.job is not job]
        job.state = job.source = None
        self.waiting.discard(job)
        for jobs in (self.reading, self.answering):
            if job in jobs:
                jobs.remove(job)


def _end_thinking(job: Job) -> None:
    assert job.request.end_of_thinking is not None
    for choice in job.choices:
        choice.end_thinking(job.request.end_of_thinking)
