"""Prefill: parts of prompts that a step reads, and the beginning of the answers to those that are read."""

from __future__ import annotations

from time import sleep

from torch import Tensor

from lmstate.engine.job import Job, Preempted, Reader
from lmstate.engine.memory import MemoryBudget
from lmstate.engine.pace import Pace
from lmstate.engine.workload import Workload
from lmstate.state.media import inside

TOGETHER = 0.1  # seconds that an answer may wait for the prompts of others, so that they begin together
YIELD = 1e-4  # seconds without the GIL, so that readers can take their token
ECHO_CHUNK = 64  # tokens of a prompt read at once where the logits of all of them are wanted


class Prefill:
    """Reads prompts, and again the texts of answers whose rows were taken back."""

    def __init__(self, work: Workload, budget: MemoryBudget, pace: Pace) -> None:
        self._work, self._budget, self._pace = work, budget, pace
        # Where padding is computed too, a chunk beside rows of one token each would be as much work for all of them.
        self.together = work.model.network.leaves_padding_out

    # ---- chunks

    def chunks(self) -> dict[Reader, int]:
        """The texts that the next step reads, and how many tokens of each: within the bounds on the gaps of the rows
        that decode. They have rows, unless each is read in a state of its own."""
        work = self._work
        unread = [reader for reader in work.readers() if isinstance(reader, Preempted) or reader.logits is None]
        readers = work.in_turn(unread)
        texts = [(reader.at, min(reader.left(), ECHO_CHUNK) if reader.echo else reader.left()) for reader in readers]
        itls = {job.itl for job in work.jobs.values()}
        chunks = dict(zip(readers, self._pace.chunks(texts, bool(work.jobs), itls)))
        if work.model.network.whole_pictures:
            chunks = {reader: _with_whole_pictures(reader, size) for reader, size in chunks.items()}
        if not self.together:
            return chunks
        for reader in chunks:
            work.guarded(reader.job, self._seat_reader, reader)
        return {reader: size for reader, size in chunks.items() if reader in work.pool}

    def _seat_reader(self, reader: Reader) -> None:
        if reader.state is not None:
            state, reader.state = reader.state, None
            self._work.pool.join(reader, state)
            self._work.pool.expect(reader, len(reader.text))
            self._work.joined()

    @staticmethod
    def wanted(reader: Reader, size: int) -> int:
        """Number of the last tokens of a chunk whose logits are wanted. The head may be a third of the weights: a chunk
        that nothing begins after does without."""
        if reader.echo:
            return size
        return int(isinstance(reader, Job) and reader.at + size == len(reader.prompt))

    def has_read(self, reader: Reader, size: int, logits: Tensor) -> None:
        """A chunk of a text was read; logits float32 `[K, V]` are those of its last tokens, as far as wanted."""
        self._work.counts["computed_tokens"] += size
        self._budget.grown(size)
        if reader.echo:
            reader.take_logprobs(logits[:size])
        if isinstance(reader, Preempted):
            self._has_read_again(reader, size)
            return
        cut = size == reader.left()
        reader.request.computed += size
        if reader.at == len(reader.prompt):
            reader.has_read(logits[size - 1 if reader.echo else 0].clone())
            reader.unkept = True
        elif cut:
            self._work.keep(self._work.read_so_far(reader), reader)

    def _has_read_again(self, reader: Preempted, size: int) -> None:
        work = self._work
        reader.at += size
        if reader.left():
            return
        work.preempted.remove(reader)
        if reader.state is not None:
            work.seat(reader.choice, reader.job, reader.state)
        else:
            work.pool.hand_over(reader, reader.choice)
            work.jobs[reader.choice] = reader.job
            work.joined()

    # ---- answers

    def begin_answers(self) -> None:
        """Begin the answers of prompts that are read.

        Where no row decodes yet they may wait for prompts that came with theirs: beside rows that decode these would be
        read in small chunks, and rows that decode together share the weights.
        """
        jobs = [reader for reader in self._work.in_turn(self._work.readers()) if isinstance(reader, Job)]
        read, unread = [[job for job in jobs if (job.logits is None) is so] for so in (False, True)]
        others = unread and not any(aside.reading for aside in self._work.preempted)
        together = others and all(self._waits(job, unread[0]) for job in read)
        for job in read:
            self._work.guarded(job, self._keep_read if together else self._begin, job)

    def seat(self) -> None:
        """Give rows to answers that have none."""
        work = self._work
        for job in list(work.answering):
            while job.unseated and len(work.pool) < work.pool.most:
                assert job.source is not None
                work.seat(job.unseated.pop(0), job, job.source)
            if not job.unseated:
                job.source = None

    def _waits(self, job: Job, other: Job) -> bool:
        """Whether the answers of a prompt that is read wait for another one's prompt."""
        if self._work.jobs or job.params.max_new_tokens <= 1:
            return False
        reading = self._pace.seconds(len(other.prompt) - other.at)
        return reading is not None and job.waited_to_answer() + reading <= TOGETHER

    def _keep_read(self, job: Job) -> None:
        """Keep what was computed of a prompt that is read, unless it is."""
        if job.unkept:
            job.unkept = False
            self._work.keep(self._work.read_so_far(job), job)

    def _begin(self, job: Job) -> None:
        """Every answer gets its first token from the last logits of the prompt, then a row: the first the prompt's."""
        work = self._work
        logits, job.logits = job.logits, None
        assert logits is not None
        job.passed()
        work.counts["prompt_tokens"] += len(job.prompt)
        work.reading.remove(job)
        work.answering.append(job)
        job.begin_answers(work.model)
        again = [choice for choice in job.choices if choice.tokens]  # answered elsewhere up to there
        for choice in job.choices:
            if choice.finished is not None:
                work.push(job, choice, "", [])
            elif job.params.max_new_tokens == 0:
                work.end_answer(job, choice, "length")
            elif choice not in again:
                work.give(job, choice, choice.pick(logits), logits)
        work.delivery.deliver()  # no reader waits for the work that follows
        sleep(YIELD)
        self._keep_read(job)
        job.unseated = [choice for choice in job.choices if choice.finished is None and choice not in again]
        job.source = work.read_so_far(job) if len(job.unseated) > 1 else job.state
        job.state = None
        if job in work.pool:
            if job.unseated:
                work.jobs[job.unseated[0]] = job
                work.pool.hand_over(job, job.unseated.pop(0))
            else:
                work.pool.leave(job)
        for choice in again:
            if echo := job.params.logprobs is not None:
                choice.logprobs = [choice.scored(0, logits)] * len(choice.tokens)
            if choice.finished is None:
                work.preempted.append(Preempted.of(job, choice, echo=echo))
        work.settle(job)
        self.seat()


def _with_whole_pictures(reader: Reader, size: int) -> int:
    """The size of a chunk that would end inside a picture: up to the picture, or all of it where it comes first."""
    span = inside(reader.job.pictured.media, reader.at + size)
    if span is None:
        return size
    return (span.at if span.at > reader.at else span.end) - reader.at
