"""One step of the engine's thread: begin requests, then one forward that reads parts of prompts and decodes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import chain
from time import perf_counter, sleep
from typing import TYPE_CHECKING

from torch import Tensor

from lmstate.engine.delivery import Delivery
from lmstate.engine.drafting import Drafting
from lmstate.engine.job import Job
from lmstate.engine.memory import CHECK_EVERY, Preempted, RowCost, too_large
from lmstate.engine.pace import Pace
from lmstate.engine.prefix.tree import shared
from lmstate.engine.queue import Queue
from lmstate.engine.results import Completion, Drained, Load, Piece
from lmstate.engine.reuse import PrefixReuse
from lmstate.engine.rows import RowPool
from lmstate.generation.logprobs import logprob
from lmstate.generation.row import AnswerRow, Finish, most_likely
from lmstate.ops.types.block_table import BLOCK_TOKENS, KVBlock
from lmstate.speculation import Draft
from lmstate.speculation.acceptance import verify
from lmstate.state import BlockPool, Snapshot, State

if TYPE_CHECKING:
    from lmstate.models.model import Model

COUNTERS = (
    "requests", "finished", "failed", "prompt_tokens", "reused_tokens", "computed_tokens", "generated_tokens",
    "preempted", "pictures", "picture_seconds",
)  # fmt: skip
WORTH_WAITING = 16  # tokens that another request is about to compute, for which one waits
TOGETHER = 0.5  # seconds that an answer may wait for the prompts of others, so that they begin together
YIELD = 1e-4  # seconds for whoever was given a token to take the interpreter, which all else is done in
ECHO_CHUNK = 64  # tokens of a prompt read at once where the logits of all of them are wanted

Reader = Job | Preempted
"""A text that is read into a row: a prompt, or that of an answer which had a row before."""


class Scheduler:
    """Owns the rows. A prompt is read in a row beside those that decode, which becomes that of its first answer.

    All of it runs on one thread, but for `waiting`, that any thread may add to. `ended(job, outcome)` is
    called with each request whose answers all ended, and tells its sender.
    """

    def __init__(
        self,
        model: Model,
        new_state: Callable[[int], State],
        rows: int,
        waiting: Queue,
        pace: Pace,
        reuse: PrefixReuse,
        blocks: BlockPool,
        cost: RowCost,
        drafting: Drafting,
        ended: Callable[[Job, Completion | BaseException], None],
        delivery: Delivery,
    ) -> None:
        self.model = model
        self.rows = rows
        self.waiting = waiting
        self.reading: list[Job] = []  # whose prompts are being read
        self.answering: list[Job] = []
        self.counts: dict[str, float] = dict.fromkeys(COUNTERS, 0)
        self.pool: RowPool[AnswerRow | Reader] = RowPool(model, new_state, rows)
        self.peak = 0  # most bytes of rows at a time
        self._held = 0  # bytes of rows when they were last looked at
        self.preempted: list[Preempted] = []  # answers whose rows were taken back
        self._jobs: dict[AnswerRow, Job] = {}  # of the choices that have a row
        self._blocks, self._cost = blocks, cost
        self._crowded = False  # rows were taken back, and nothing has ended since
        self._unmeasured = 0  # steps since the bytes of the rows were last looked at
        self._spare = 0.0  # bytes that they may have grown by since, beside having doubled; below 0: look again
        self._looks = 2  # steps to look after: a row that has joined takes blocks of its own in the next one
        self._pace, self._reuse, self._drafting, self._ended = pace, reuse, drafting, ended
        self._delivery = delivery
        # Where padding is computed too, a chunk beside rows of one token each would be as much work for all of them.
        self._together = model.leaves_padding_out

    def step(self) -> bool:
        """One step of everything. Whether anything could be done."""
        try:
            self._end_early()
            self._seat()
            self._admit()
            self._delivery.deliver()  # how much of a prompt is reused is known before it is read
            self._begin_read()
            self._compute()
            self._delivery.deliver()
            self._begin_read()
            self._bound()
        except BaseException as error:  # of the scheduler itself, not of one request: nobody is to wait for ever
            for job in self.all():
                self._fail(job, error)
        finally:
            self._delivery.deliver()
        return bool(self.reading or self.answering)

    def drain(self) -> None:
        """End all requests with what was answered so far; what was computed of them is kept."""
        for job in self.all():
            answered = [list(choice.tokens) for choice in job.choices]
            told = answered or [list(job.told(index)) for index in range(job.params.n)]
            self._forget(job)
            job.error = Drained(told, job.seed)
            self._ended(job, job.error)
        self._delivery.deliver()

    def load(self) -> Load:
        """For any thread, and without a lock: numbers of the same moment, or nearly so."""
        waiting, reading, answering = self.waiting.jobs(), list(self.reading), list(self.answering)
        unread = sum(len(job.prompt) for job in waiting) + sum(len(job.prompt) - job.at for job in reading)
        room = max(0, self._reuse.memory - self._held - self._cost.fixed)
        return Load(
            len(waiting),
            len(reading),
            len(answering),
            unread,
            int(room / self._cost.per_token) if self._cost.per_token else room,
            self._pace.until_read(unread, bool(self._jobs)),
        )

    def end_all(self) -> None:
        for job in self.all():
            self._guarded(job, partial(self._end, why="cancelled"))
        self._delivery.deliver()

    def all(self) -> list[Job]:
        return [*self.waiting.jobs(), *self.reading, *self.answering]

    def at_work(self) -> list[Job]:
        """The request of each row in use: whose prompt is read, or an answer of which is made."""
        return [*self._jobs.values(), *(work.job for work in self.preempted if work.reading), *self.reading]

    @property
    def decoding(self) -> int:
        """Number of answers that have a row."""
        return len(self._jobs)

    def row_bytes(self) -> int:
        """Bytes of all states, and of what answers without a row begin from, but for what the prefix store has too."""
        works: list[Job | Preempted] = [*self.reading, *self.preempted]
        states = [work.state for work in works if work.state is not None]
        states += [job.source for job in self.answering if isinstance(job.source, State)]
        sources = [job.source for job in self.answering if isinstance(job.source, Snapshot)]
        apart = self.pool.nbytes_apart() + sum(state.nbytes_apart() for state in states)
        held = [each for source in sources for each in source.held()]
        apart += sum(each.nbytes for each in held if isinstance(each, Tensor))
        prefixes = self._reuse.prefixes
        if prefixes.tier is None or not prefixes.tier.writing:
            return apart + max(0, self._blocks.nbytes - prefixes.block_nbytes)
        # What waits to be written holds blocks too, which are no row's.
        blocks = chain(self.pool.blocks(), *(state.blocks() for state in states))
        own = {id(each): each for each in (*blocks, *held) if isinstance(each, KVBlock) and not prefixes.holds(each)}
        return apart + sum(block.nbytes for block in own.values())

    # ---- beginning

    def _admit(self) -> None:
        """Start requests while there are rows and bytes for them; before them, what was taken back goes on."""
        if self._free() <= 0 or not (len(self.waiting) or self.preempted) or (self._crowded and self._working()):
            return
        for work in sorted(self.preempted, key=lambda work: work.rank):
            if not work.reading:
                if self._free() <= 0 or not self._fits(len(work.text) + CHECK_EVERY):
                    return
                self._guarded(work.job, partial(self._resume, work))
        for job in self.waiting:
            if self._free() <= 0:
                return
            if not self._better_wait(job):
                if not self._fits(len(job.prompt)):
                    return  # nobody overtakes it: with small ones before it, a large one might never start
                self.waiting.discard(job)
                self._guarded(job, self._start)

    def _free(self) -> int:
        unseated = sum(len(job.unseated) for job in self.answering)
        return self.rows - len(self._jobs) - len(self._readers()) - unseated

    def _readers(self) -> list[Reader]:
        """Texts that are read, or were and wait for their answers; those whose turn it is first."""
        works = sorted((work for work in self.preempted if work.reading), key=lambda work: work.rank)
        return [*works, *sorted(self.reading, key=Job.turn)]

    def _working(self) -> bool:
        return bool(self._jobs or self._readers())

    def _fits(self, tokens: int) -> bool:
        """Whether a row of so many tokens has room beside the others. One that is alone may always try."""
        if not self._working():
            return True
        promised = sum(self._cost(len(reader.text)) - self._cost(reader.at) for reader in self._readers())
        return self.row_bytes() + promised + self._cost(tokens) <= self._reuse.memory

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
            keys = (self.model.frequency_key(len(each.prompt)) for each in (leader, job))
            if leader.salt != job.salt or len({*keys}) > 1:
                continue
            until = min(shared(leader.text, job.text), len(job.prompt) - 1)
            if until - max(leader.at, self._reuse.match(job.text, job.salt).length) >= WORTH_WAITING:
                leader.cuts.add(until)
                job.follows = (leader, until)
                return True
        return False

    def _start(self, job: Job) -> None:
        job.passed()
        self.reading.append(job)
        job.state = self._reuse.begin(job)
        job.request.begin(job.reuse.reused)
        self._looks = 2
        self.counts["reused_tokens"] += job.reuse.reused
        if job.at == len(job.prompt):
            logits = self.model([[]], job.state)  # those after its last token, which are known
            assert logits is not None
            job.has_read(logits[0])

    # ---- prompts

    def _begin_read(self) -> None:
        """Begin the answers of prompts that are read.

        Where nobody decodes yet they may wait for prompts that came with theirs: beside rows that decode these would be
        read in small chunks, and rows that decode together share the weights.
        """
        jobs = [reader for reader in self._readers() if isinstance(reader, Job)]
        read, unread = [[job for job in jobs if (job.logits is None) is so] for so in (False, True)]
        others = unread and not any(work.reading for work in self.preempted)
        if others and all(self._waits(job, unread[0]) for job in read):
            for job in read:
                self._guarded(job, self._keep_read)
        else:
            for job in read:
                self._guarded(job, self._begin_answers)

    def _waits(self, job: Job, other: Job) -> bool:
        """Whether the answers of a prompt that is read wait for another one's prompt."""
        if self._jobs or job.params.max_new_tokens <= 1:
            return False
        reading = self._pace.seconds(len(other.prompt) - other.at)
        return reading is not None and job.waited_to_answer() + reading <= TOGETHER

    def _keep_read(self, job: Job) -> None:
        """Keep what was computed of a prompt that is read, unless it is."""
        if job.unkept:
            job.unkept = False
            self._keep(self._read_so_far(job), job)

    def _read_so_far(self, job: Job) -> Snapshot:
        """The part of a prompt that is read, as a value."""
        if job.state is not None:
            return job.state.snapshot(0)
        return self.pool.snapshot(job)

    def _itls(self) -> set[float | None]:
        """Bounds on the gaps of the rows that decode, in seconds; None for the engine's."""
        return {job.itl for job in self._jobs.values()}

    def _chunks(self) -> dict[Reader, int]:
        """The texts that the next step reads, and how many tokens of each: within the bounds on the gaps of the rows
        that decode. They have rows, unless each is read in a state of its own."""
        readers = [reader for reader in self._readers() if isinstance(reader, Preempted) or reader.logits is None]
        texts = [
            (reader.at, min(reader.left(), ECHO_CHUNK) if _echoes(reader) else reader.left()) for reader in readers
        ]
        chunks = dict(zip(readers, self._pace.chunks(texts, bool(self._jobs), self._itls())))
        if not self._together:
            return chunks
        for reader in chunks:
            self._guarded(_job_of(reader), partial(self._seat_reader, reader))
        return {reader: size for reader, size in chunks.items() if reader in self.pool}

    def _seat_reader(self, reader: Reader, _: Job) -> None:
        if reader.state is not None:
            state, reader.state = reader.state, None
            self.pool.join(reader, state)
            self.pool.expect(reader, len(reader.text))
            self._looks = 2

    def _wanted(self, reader: Reader, size: int) -> int:
        """Number of the last tokens of a chunk whose logits are wanted. The head may be a third of the weights: a chunk
        that nothing begins after does without."""
        if _echoes(reader):
            return size
        return int(isinstance(reader, Job) and reader.at + size == len(reader.prompt))

    def _has_read(self, reader: Reader, size: int, logits: Tensor, job: Job) -> None:
        """A chunk of a text was read; logits float32 `[K, V]` are those of its last tokens, as far as wanted."""
        self.counts["computed_tokens"] += size
        self._spare -= self._cost.per_token * (size + BLOCK_TOKENS)
        if isinstance(reader, Preempted):
            if _echoes(reader):
                self._echo_answer(reader, logits[:size])
            reader.at += size
            if not reader.left():
                self._looks = 2
                self.preempted.remove(reader)
                if reader.state is not None:
                    self.pool.join(reader.choice, reader.state)
                else:
                    self.pool.hand_over(reader, reader.choice)
                self._jobs[reader.choice] = job
            return
        if _echoes(job):
            self._echo(job, logits[:size], job.at)
        cut = size == job.left()
        job.request.computed += size
        if job.at == len(job.prompt):
            job.has_read(logits[size - 1 if _echoes(job) else 0].clone())
            job.unkept = True
        elif cut:
            self._keep(self._read_so_far(job), job)

    def _echo(self, job: Job, logits: Tensor, start: int) -> None:
        """Log probabilities of the prompt's tokens after each of a chunk's. logits float32 `[T, V]`."""
        top = job.params.prompt_logprobs
        assert top is not None
        if not job.prompt_logprobs:
            job.prompt_logprobs.append(None)
        for offset, token in enumerate(job.prompt[start + 1 : start + 1 + len(logits)]):
            job.prompt_logprobs.append(logprob(logits[offset], token, top))

    def _begin_answers(self, job: Job) -> None:
        """Every answer gets its first token from the last logits of the prompt, then a row: the first the prompt's."""
        logits, job.logits = job.logits, None
        assert logits is not None
        job.passed()
        self.counts["prompt_tokens"] += len(job.prompt)
        self.reading.remove(job)
        self.answering.append(job)
        job.begin_answers(self.model)
        again = [choice for choice in job.choices if choice.tokens]  # answered elsewhere up to there
        for choice in job.choices:
            if choice.finished is not None:
                self._push(job, choice, "", [])
            elif job.params.max_new_tokens == 0:
                self._end_answer(job, choice, "length")
            elif choice not in again:
                self._give(job, choice, choice.pick(logits), logits)
        self._delivery.deliver()  # nobody waits for what else is to be done
        sleep(YIELD)
        self._keep_read(job)
        job.unseated = [choice for choice in job.choices if choice.finished is None and choice not in again]
        job.source = self._read_so_far(job) if len(job.unseated) > 1 else job.state
        job.state = None
        if job in self.pool:
            if job.unseated:
                self._jobs[job.unseated[0]] = job
                self.pool.hand_over(job, job.unseated.pop(0))
            else:
                self.pool.leave(job)
        for choice in again:
            if (top := job.params.logprobs) is not None:
                choice.logprobs = [logprob(logits, choice.tokens[0], top)] * len(choice.tokens)
            if choice.finished is None:
                self.preempted.append(Preempted.of(job, choice, echo=top is not None))
        self._settle(job)
        self._seat()

    def _seat(self) -> None:
        """Give rows to answers that have none."""
        for job in list(self.answering):
            while job.unseated and len(self.pool) < self.rows:
                choice = job.unseated.pop(0)
                assert job.source is not None
                self.pool.join(choice, job.source)
                self._looks = 2
                self._jobs[choice] = job
            if not job.unseated:
                job.source = None

    # ---- memory

    def _bound(self) -> None:
        """Have rows and store within the budget: what is kept goes first, then the rows that started last."""
        self._unmeasured += 1
        if not (self._looks or self._spare < 0 or self.preempted or self._unmeasured >= CHECK_EVERY):
            return
        self._looks = max(0, self._looks - 1)
        memory, prefixes, kept = self._reuse.memory, self._reuse.prefixes, -1
        while kept != prefixes.nbytes:  # a block that the store lets go is a row's alone from then on
            held, kept = self.row_bytes(), prefixes.nbytes
            while held > memory and self._preempt():
                if (held := self.row_bytes()) > memory:
                    self._pack()
                    held = self.row_bytes()
                kept = prefixes.nbytes
            self._reuse.bound(held)
        self.peak, self._held = max(self.peak, held), held
        self._unmeasured = 0
        # The rows may double in a step. Far from the budget they are looked at now and then.
        self._spare = memory - 2 * held - prefixes.nbytes

    def _preempt(self) -> bool:
        """Take a row back, of the lowest priority and the latest: it goes on later. False if there is none.

        One that is alone has no room even so, and ends.
        """
        working: list[tuple[tuple[int, int, int], Job, AnswerRow | Preempted | None]] = [
            ((-job.priority, job.order, 0), job, None) for job in self.reading
        ]
        for job in self.answering:
            working += [((-job.priority, job.order, choice.index), job, choice) for choice in job.unseated]
        working += [((-job.priority, job.order, c.index), job, c) for c, job in self._jobs.items()]
        working += [(work.rank, work.job, work) for work in self.preempted if work.reading]
        if not working:
            return False
        _, job, what = max(working, key=lambda entry: entry[0])
        if len(working) == 1:
            self._end_too_large(job, what)
        elif what is None:
            self.reading.remove(job)
            kept = self._read_so_far(job) if job.at else None
            self._unseat(job)
            job.begin_again()
            self.waiting.put_back(job)
            self._keep_if(kept, job)
        elif isinstance(what, Preempted):
            self._unseat(what)
            what.set_aside()
        elif what in job.unseated:
            self.preempted += [Preempted.of(job, choice) for choice in job.unseated]
            job.unseated, job.source = [], None
        else:
            self.preempted.append(Preempted.of(job, what))
            del self._jobs[what]
            kept = self.pool.snapshot(what)
            self.pool.leave(what)
            self._keep_if(kept, job)
        self.counts["preempted"] += 1
        self._crowded = True
        return True

    def _keep_if(self, snapshot: Snapshot | None, job: Job) -> None:
        if snapshot is not None:
            self._keep(snapshot, job)

    def _end_too_large(self, job: Job, what: AnswerRow | Preempted | None) -> None:
        """A request that is alone, and has no room: it ends with what it has."""
        if what is None:
            self._fail(job, too_large(len(job.prompt), self._cost(len(job.prompt)), self._reuse.memory))
            return
        choice = what.choice if isinstance(what, Preempted) else what
        self._end_answer(job, choice, "capacity")
        if isinstance(what, Preempted):
            self.preempted.remove(what)
        elif choice in job.unseated:
            job.unseated.remove(choice)
            job.source = None
        else:
            self._leave(choice)
        self._settle(job)

    def _pack(self) -> None:
        """Have the rows take no more than they need: those that left, and the longest that was, leave room behind."""
        rows = [(choice, self.pool.snapshot(choice)) for choice in self.pool.owners]
        for choice, _ in rows:
            self.pool.leave(choice)
        for choice, snapshot in rows:
            self.pool.join(choice, snapshot)

    def _unseat(self, reader: Reader) -> None:
        """Take the row of a text back, if it has one."""
        if reader in self.pool:
            self.pool.leave(reader)

    def _resume(self, work: Preempted, job: Job) -> None:
        """Have the text of an answer that had a row be read again; if all of it is known, it has one at once."""
        state = self._reuse.resume(
            replace(job.pictured, tokens=work.text), job.salt, len(job.prompt) if work.echo else None
        )
        work.at = state.lengths[0]
        if work.left():
            work.state, work.reading = state, True
        else:
            self.preempted.remove(work)
            self.pool.join(work.choice, state)
            self._jobs[work.choice] = job
            self._looks = 2

    def _echo_answer(self, work: Preempted, logits: Tensor) -> None:
        """Log probabilities of an answer's tokens after each of a chunk's. logits float32 `[T, V]`."""
        choice, top = work.choice, work.job.params.logprobs
        assert top is not None
        for at, one in enumerate(logits, work.at + 1 - len(work.job.prompt)):
            if 0 < at < len(choice.tokens):
                choice.logprobs[at] = logprob(one, choice.tokens[at], top)

    # ---- answers

    def _compute(self) -> None:
        """One forward: the next token for every answer that has a row, those of its draft that hold, and parts of the
        prompts that are read."""
        self.pool.tidy()
        for choice, job in list(self._jobs.items()):
            self._guarded(job, partial(self._end_if_full, choice))
        chunks = self._chunks()
        if not self._together:
            for reader, size in chunks.items():
                self._guarded(_job_of(reader), partial(self._read_apart, reader, size))
            chunks = {}
        choices = [owner for owner in self.pool.owners if isinstance(owner, AnswerRow)]  # in the order of the rows
        if not choices and not chunks:
            return
        begin = perf_counter()
        jobs = {choice: self._jobs[choice] for choice in choices}
        drafts = self._drafting.propose(jobs, self.pool) if choices else {}
        ran = perf_counter()
        feed: dict[AnswerRow | Reader, list[int]] = {}
        wanted: dict[AnswerRow | Reader, int] = {}
        for choice in choices:
            draft = drafts.get(choice, Draft()).tokens
            feed[choice], wanted[choice] = [*choice.feed, *draft], 1 + len(draft)
        for reader, size in chunks.items():
            feed[reader] = _ids_of(reader, size)
            wanted[reader] = self._wanted(reader, size)
        try:
            logits = self.pool.step(feed, wanted, commit=not drafts, once=chunks)
        except BaseException:  # of any row; whose it was shows when each is alone
            self._compute_apart(choices, chunks)
            return
        read = {choice: len(choice.feed) for choice in choices}
        own = {reader: logits[self.pool.row(reader)] for reader in chunks}
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
            self._drafting.measured(drafts, accepted, tokens, seconds, len(choices))
            self._end_choices(choices, failed)
            if not chunks:
                self._pace.decoded(perf_counter() - begin, len(choices))
            self._delivery.deliver()  # who ended does not wait for what is kept of prompts
        for reader, places in own.items():
            if reader in self.pool:
                self._guarded(_job_of(reader), partial(self._has_read, reader, chunks[reader], places))

    def _accept(self, texts: Mapping[AnswerRow, list[int]], chunks: Mapping[Reader, int]) -> bool:
        """Commit what holds of a step that was verified. False if that fails: the next step reads it again."""
        try:
            self.pool.accept(dict(chain(((choice, len(text)) for choice, text in texts.items()), chunks.items())))
        except BaseException:  # nothing of it was committed, and its tokens are given out
            for choice, text in texts.items():
                choice.feed[:0] = text
            return False
        return True

    def _compute_apart(self, choices: list[AnswerRow], chunks: Mapping[Reader, int]) -> None:
        """A step of all failed, and changed nothing: have each row take it by itself, so that one stops no other."""
        for reader, size in chunks.items():
            self._guarded(_job_of(reader), partial(self._read_one, reader, size))
        for choice in choices:
            job = self._jobs.get(choice)
            if job is not None and choice.finished is None:
                self._guarded(job, partial(self._decode_one, choice))

    def _read_one(self, reader: Reader, size: int, job: Job) -> None:
        ids = _ids_of(reader, size)
        logits = self.pool.step({reader: ids}, {reader: self._wanted(reader, size)}, once=[reader])
        self._has_read(reader, size, logits[self.pool.row(reader)], job)

    def _read_apart(self, reader: Reader, size: int, job: Job) -> None:
        """Read a chunk in the text's own state."""
        assert reader.state is not None
        begin, wanted = perf_counter(), self._wanted(reader, size)
        logits = self.model([_ids_of(reader, size)], reader.state, logits=[wanted], rewindable=False)
        assert logits is not None
        self._pace.read(perf_counter() - begin, [(size, reader.at)], wanted, len(self._jobs), apart=True)
        self._has_read(reader, size, logits[0], job)

    def _decode_one(self, choice: AnswerRow, job: Job) -> None:
        _, failed = self._take([choice], self.pool.step({choice: choice.feed}, {choice: 1}), {})
        self._end_choices([choice], failed)

    def _take(
        self, choices: list[AnswerRow], logits: Tensor, drafts: Mapping[AnswerRow, Draft]
    ) -> tuple[dict[AnswerRow, int], dict[Job, BaseException]]:
        """Give each of these its next tokens, from logits float32 `[R, K, V]` after what it had to read and of its
        draft. Returns how many tokens of each draft hold, and the requests whose tokens could not be chosen."""
        logits = logits[:, : 1 + max((len(draft) for draft in drafts.values()), default=0)]
        together = [choice for choice in choices if choice.plain]
        best = dict(zip(together, most_likely(logits, [self.pool.row(choice) for choice in together])))
        accepted = dict.fromkeys(choices, 0)
        failed: dict[Job, BaseException] = {}
        for choice in choices:
            job = self._jobs[choice]
            if job in failed:
                continue
            choice.feed.clear()
            try:
                places, draft = logits[self.pool.row(choice)], drafts.get(choice, Draft())
                accepted[choice] = verify(choice, places, draft, partial(self._give, job, choice), best.get(choice))
            except BaseException as error:
                failed[job] = error
        return accepted, failed

    def _end_choices(self, choices: list[AnswerRow], failed: Mapping[Job, BaseException]) -> None:
        """Free the rows of the answers that have ended, and end the requests that failed."""
        for job, error in failed.items():
            self._fail(job, error)
        for choice in choices:
            if choice in self._jobs and choice.finished is not None:
                self._guarded(self._jobs[choice], partial(self._end_choice, choice))

    def _end_choice(self, choice: AnswerRow, job: Job) -> None:
        self._leave(choice)
        self._settle(job)

    def _give(self, job: Job, choice: AnswerRow, token: int, logits: Tensor) -> None:
        """Hand one more token of an answer, and those that its grammar leaves no choice about, to the request."""
        at = len(choice.tokens)
        text = choice.take(token, logits)
        self._push(job, choice, text, choice.tokens[at:])
        # A log probability needs the logits before its token: forced ones are drafts that hold then.
        if choice.forced and not choice.over and job.params.logprobs is None:
            self._push(job, choice, *choice.force())

    def _end_answer(self, job: Job, choice: AnswerRow, why: Finish) -> None:
        self._push(job, choice, choice.end(why), [])

    def _push(self, job: Job, choice: AnswerRow, text: str, tokens: list[int]) -> None:
        self.counts["generated_tokens"] += len(tokens)
        if tokens and len(choice.tokens) <= len(job.told(choice.index)):  # chosen once more
            text, tokens = "", []
        logprobs = choice.logprobs[len(choice.logprobs) - len(tokens) :] if job.params.logprobs is not None else None
        start = len(choice.tokens) - len(tokens)
        job.request.push(Piece(text, choice.index, tokens, logprobs, choice.finished, choice.certain(), start))

    def _end_if_full(self, choice: AnswerRow, job: Job) -> None:
        most = self.model.max_positions
        if most is not None and self.pool.length(choice) + len(choice.feed) > most:
            self._end_answer(job, choice, "capacity")
            self._leave(choice)
            self._settle(job)

    # ---- endings

    def _leave(self, choice: AnswerRow) -> None:
        """An answer gives its row back; what the row computed, up to the end of the answer, is kept."""
        job = self._jobs.pop(choice)
        self._drafting.leave(choice, job)
        try:
            self.pool.rewind(choice, len(job.prompt) + choice.kept())
            self._keep(self.pool.snapshot(choice), job)
        finally:  # a row without a choice would never be given to another one
            self.pool.leave(choice)
            self._crowded = False

    def _settle(self, job: Job) -> None:
        """Finish a request whose answers all ended."""
        if job in self.answering and all(choice.finished is not None for choice in job.choices):
            self.answering.remove(job)
            job.source = None
            self._finish(job)

    def _finish(self, job: Job) -> None:
        self.counts["finished"] += 1
        self._crowded = False
        self._ended(job, job.completion())

    def _end_early(self) -> None:
        for job in self.all():
            if job.request.cancelled:
                self._guarded(job, partial(self._end, why="cancelled"))
            elif job.overdue:
                self._guarded(job, partial(self._end, why="deadline"))
            elif job.request.end_of_thinking is not None:
                self._guarded(job, self._end_thinking)

    def _end_thinking(self, job: Job) -> None:
        assert job.request.end_of_thinking is not None
        for choice in job.choices:
            choice.end_thinking(job.request.end_of_thinking)

    def _end(self, job: Job, why: Finish) -> None:
        """End a request wherever it is."""
        if not job.choices:
            job.begin_answers(self.model)
        for choice in job.choices:
            if choice.finished is None:
                self._end_answer(job, choice, why)
        self._forget(job)
        self._finish(job)

    def _fail(self, job: Job, cause: BaseException) -> None:
        error = cause
        if not isinstance(cause, Exception):  # a panic of native code, say, which is not to end who reads the answer
            error = RuntimeError(f"{type(cause).__name__}: {cause}")
            error.__cause__ = cause
        self.counts["failed"] += 1
        self._crowded = False
        self._forget(job)
        job.error = error
        self._ended(job, error)

    def _forget(self, job: Job) -> None:
        """Take a request out of everything; what was computed is kept if it can be: memory may be what it ended for."""
        if job.at and job in self.reading:
            with suppress(BaseException):
                self._keep(self._read_so_far(job), job)
        readers: list[Reader] = [job, *(work for work in self.preempted if work.job is job)]
        for reader in readers:
            with suppress(BaseException):
                self._unseat(reader)
        for choice in [choice for choice, owner in self._jobs.items() if owner is job]:
            with suppress(BaseException):
                self._leave(choice)
        job.unseated.clear()
        self.preempted = [work for work in self.preempted if work.job is not job]
        job.state = job.source = None
        self.waiting.discard(job)
        for jobs in (self.reading, self.answering):
            if job in jobs:
                jobs.remove(job)

    def _keep(self, snapshot: Snapshot, job: Job) -> None:
        held = self.row_bytes()
        self.peak = max(self.peak, held)
        self._looks = 2
        self._reuse.keep(snapshot, held, job.salt)

    def _guarded(self, job: Job, action: Callable[[Job], None]) -> None:
        """Do it; what it raises is the end of this request, and of no other."""
        try:
            action(job)
        except BaseException as error:  # of a model, a grammar or a store that others wrote: its sender hears of it
            self._fail(job, error)


def _job_of(reader: Reader) -> Job:
    return reader if isinstance(reader, Job) else reader.job


def _echoes(reader: Reader) -> bool:
    """Whether log probabilities of the text's own tokens are wanted."""
    return reader.params.prompt_logprobs is not None if isinstance(reader, Job) else reader.echo


def _ids_of(reader: Reader, size: int) -> list[int]:
    """The next tokens of a text."""
    ids = reader.prompt if isinstance(reader, Job) else reader.text
    return ids[reader.at : reader.at + size]
