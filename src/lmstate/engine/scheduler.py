"""One step of the engine's thread: begin requests, then one forward that reads parts of prompts and decodes."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from itertools import chain
from time import perf_counter

from torch import Tensor

from lmstate.engine.admission import Admission
from lmstate.engine.drafting import Drafting
from lmstate.engine.job import Job, Reader
from lmstate.engine.memory import MemoryBudget, RowCost
from lmstate.engine.pace import Pace
from lmstate.engine.prefill import Prefill
from lmstate.engine.results import Load
from lmstate.engine.workload import Workload
from lmstate.generation.row import AnswerRow, most_likely
from lmstate.speculation import Draft
from lmstate.speculation.acceptance import verify


class Scheduler:
    """Runs the steps. A prompt is read in a row beside those that decode, which becomes that of its first answer."""

    def __init__(self, work: Workload, cost: RowCost, pace: Pace, drafting: Drafting) -> None:
        self._work, self._pool, self._jobs = work, work.pool, work.jobs
        self._pace, self._drafting = pace, drafting
        self._budget = MemoryBudget(work, cost)
        self._admission = Admission(work, self._budget)
        self._prefill = Prefill(work, self._budget, pace)

    def step(self) -> bool:
        """One step of everything. Whether anything could be done."""
        work, prefill = self._work, self._prefill
        try:
            work.end_early()
            work.rest()
            prefill.seat()
            self._admission.admit()
            work.delivery.deliver()  # how much of a prompt is reused is known before it is read
            prefill.begin_answers()
            self._compute()
            work.delivery.deliver()
            prefill.begin_answers()
            self._budget.bound()
        except BaseException as error:  # of the scheduler itself, not of one request: no request is to wait for ever
            for job in work.all():
                work.fail(job, error)
        finally:
            work.delivery.deliver()
        return bool(work.reading) or any(not job.request.rests() for job in work.answering)

    def load(self) -> Load:
        """For any thread, and without a lock: numbers of the same moment, or nearly so."""
        work = self._work
        waiting, reading, answering = work.waiting.jobs(), list(work.reading), list(work.answering)
        unread = sum(len(job.prompt) for job in waiting) + sum(len(job.prompt) - job.at for job in reading)
        return Load(
            len(waiting),
            len(reading),
            len(answering),
            unread,
            self._budget.room(),
            self._pace.until_read(unread, bool(work.jobs)),
        )

    def _compute(self) -> None:
        """One forward: the next token for every answer that has a row, those of its draft that hold, and parts of the
        prompts that are read."""
        self._pool.tidy()
        for choice, job in list(self._jobs.items()):
            self._work.guarded(job, self._end_if_full, choice, job)
        chunks = self._prefill.chunks()
        if not self._prefill.together:
            for reader, size in chunks.items():
                self._work.guarded(reader.job, self._read_apart, reader, size)
            chunks = {}
        choices = [owner for owner in self._pool.owners if isinstance(owner, AnswerRow)]  # in the order of the rows
        if not choices and not chunks:
            return
        begin = perf_counter()
        jobs = {choice: self._jobs[choice] for choice in choices}
        drafts = self._drafting.propose(jobs, self._pool) if choices else {}
        ran = perf_counter()
        feed: dict[AnswerRow | Reader, list[int]] = {}
        wanted: dict[AnswerRow | Reader, int] = {}
        for choice in choices:
            draft = drafts.get(choice, Draft()).tokens
            feed[choice], wanted[choice] = [*choice.feed, *draft], 1 + len(draft)
        for reader, size in chunks.items():
            feed[reader] = reader.coming(size)
            wanted[reader] = self._prefill.wanted(reader, size)
        followed = None
        try:
            if not drafts and not chunks:
                followed = self._followed(choices)
            if followed is None:
                logits = self._pool.step(feed, wanted, commit=not drafts, once=chunks)
            else:
                read_by, logits = followed
                drafts = {choice: Draft(tuple(tokens[1:])) for choice, tokens in read_by.items()}
                feed = dict(read_by.items())
        except BaseException:  # of any row; whose it was shows when each is alone
            self._compute_apart(choices, chunks)
            return
        read = {choice: len(choice.feed) for choice in choices}
        own = {reader: logits[self._pool.row(reader)] for reader in chunks}
        accepted, failed = self._take(choices, logits, drafts)
        if drafts and not self._accept(
            {choice: feed[choice][: read[choice] + accepted[choice]] for choice in choices}, chunks
        ):
            own = {}
        seconds = perf_counter() - ran
        if chunks:
            sizes, heads = [(size, reader.at) for reader, size in chunks.items()], [wanted[reader] for reader in chunks]
            seconds = self._pace.read(seconds, sizes, sum(heads), len(choices))
        if choices:
            tokens = sum(len(feed[choice]) for choice in choices)
            if followed is None:
                self._drafting.measured(drafts, accepted, tokens, seconds, len(choices))
            self._end_choices(choices, failed)
            if not chunks:
                steps = 1 if followed is None else logits.shape[1]
                self._pace.decoded((perf_counter() - begin) / steps, len(choices))
            self._work.delivery.deliver()  # who ended does not wait for what is kept of prompts
        for reader, places in own.items():
            if reader in self._pool:
                self._work.guarded(reader.job, self._prefill.has_read, reader, chunks[reader], places)

    def _followed(self, choices: list[AnswerRow]) -> tuple[dict[AnswerRow, list[int]], Tensor] | None:
        """Several tokens of each answer in one go, if all take the likeliest ones and no request waits."""
        alone = not self._work.reading and not self._work.waiting.jobs()
        if not alone or not all(choice.plain and not choice.forced for choice in choices):
            return None
        wanted = min(choice.params.max_new_tokens - len(choice.tokens) for choice in choices)
        most = min(self._pool.room(choice, wanted) for choice in choices)
        found = self._pool.follow({choice: choice.feed for choice in choices}, most)
        return None if found is None else ({choice: found[0][choice] for choice in choices}, found[1])

    def _accept(self, texts: Mapping[AnswerRow, list[int]], chunks: Mapping[Reader, int]) -> bool:
        """Commit what holds of a step that was verified. False if that fails: the next step reads it again."""
        try:
            self._pool.accept(dict(chain(((choice, len(text)) for choice, text in texts.items()), chunks.items())))
        except BaseException:  # nothing of it was committed, and its tokens are given out
            for choice, text in texts.items():
                choice.feed[:0] = text
            return False
        return True

    def _compute_apart(self, choices: list[AnswerRow], chunks: Mapping[Reader, int]) -> None:
        """A step of all failed, and changed nothing: have each row take it by itself, so that one stops no other."""
        for reader, size in chunks.items():
            self._work.guarded(reader.job, self._read_one, reader, size)
        for choice in choices:
            job = self._jobs.get(choice)
            if job is not None and choice.finished is None:
                self._work.guarded(job, self._decode_one, choice)

    def _read_one(self, reader: Reader, size: int) -> None:
        ids = reader.coming(size)
        logits = self._pool.step({reader: ids}, {reader: self._prefill.wanted(reader, size)}, once=[reader])
        self._prefill.has_read(reader, size, logits[self._pool.row(reader)])

    def _read_apart(self, reader: Reader, size: int) -> None:
        """Read a chunk in the text's own state."""
        assert reader.state is not None
        begin, wanted = perf_counter(), self._prefill.wanted(reader, size)
        logits = self._work.model([reader.coming(size)], reader.state, logits=[wanted], rewindable=False)
        assert logits is not None
        self._pace.read(perf_counter() - begin, [(size, reader.at)], wanted, len(self._jobs), apart=True)
        self._prefill.has_read(reader, size, logits[0])

    def _decode_one(self, choice: AnswerRow) -> None:
        _, failed = self._take([choice], self._pool.step({choice: choice.feed}, {choice: 1}), {})
        self._end_choices([choice], failed)

    def _take(
        self, choices: list[AnswerRow], logits: Tensor, drafts: Mapping[AnswerRow, Draft]
    ) -> tuple[dict[AnswerRow, int], dict[Job, BaseException]]:
        """Give each of these its next tokens, from logits float32 `[R, K, V]` after what it had to read and of its
        draft. Returns how many tokens of each draft hold, and the requests whose tokens could not be chosen."""
        logits = logits[:, : 1 + max((len(draft) for draft in drafts.values()), default=0)]
        together = [choice for choice in choices if choice.plain]
        best = dict(zip(together, most_likely(logits, [self._pool.row(choice) for choice in together])))
        accepted = dict.fromkeys(choices, 0)
        failed: dict[Job, BaseException] = {}
        for choice in choices:
            job = self._jobs[choice]
            if job in failed:
                continue
            choice.feed.clear()
            try:
                places, draft = logits[self._pool.row(choice)], drafts.get(choice, Draft())
                accepted[choice] = verify(
                    choice, places, draft, partial(self._work.give, job, choice), best.get(choice)
                )
            except BaseException as error:
                failed[job] = error
        return accepted, failed

    def _end_choices(self, choices: list[AnswerRow], failed: Mapping[Job, BaseException]) -> None:
        """Free the rows of the answers that have ended, and end the requests that failed."""
        for job, error in failed.items():
            self._work.fail(job, error)
        for choice in choices:
            if choice in self._jobs and choice.finished is not None:
                job = self._jobs[choice]
                self._work.guarded(job, self._end_choice, choice, job)

    def _end_choice(self, choice: AnswerRow, job: Job) -> None:
        self._work.leave(choice)
        self._work.settle(job)

    def _end_if_full(self, choice: AnswerRow, job: Job) -> None:
        most = self._work.model.max_positions
        if most is not None and self._pool.length(choice) + len(choice.feed) > most:
            self._work.end_answer(job, choice, "capacity")
            self._work.leave(choice)
            self._work.settle(job)
