"""Memory of rows: the bytes that one takes, and the budget of all of them with what is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lmstate.engine.job import Job, Preempted
from lmstate.errors import CapacityError
from lmstate.generation.row import AnswerRow
from lmstate.ops.types.block_table import BLOCK_TOKENS
from lmstate.state import State

if TYPE_CHECKING:
    from lmstate.engine.workload import Workload
    from lmstate.models.model import Model
    from lmstate.vision.reader import PicturePrompt

CHECK_EVERY = 16  # steps between two looks at the bytes of rows that are far from the budget


@dataclass(frozen=True)
class RowCost:
    """Bytes of a row: `fixed` ones (carries, logits), those of each token (keys, values, latents), in blocks, and those
    of each token of its source; those of a sound are fixed."""

    fixed: int
    per_token: float
    per_source: float = 0.0

    @staticmethod
    def of(model: Model, new_state: Callable[[], State]) -> RowCost:
        """Of a model's states; `new_state` makes one of one row."""

        def reserved(tokens: int) -> int:
            state = new_state()
            if source is not None:
                state.restore(0, source)
            state.queue(0, [0] * tokens)
            state.plan_backlog(state.backlog([0], logits=False), [0])
            return nbytes(state) + sum(layer.nbytes_to_come() for layer in state.layers)

        source, per_source = None, 0.0
        if (encoder := model.encoder) is not None:
            state = new_state()
            state.condition(0, encoder.shortest)
            source = state.snapshot(0)
            per_source = 0.0 if encoder.hears else nbytes(state) / BLOCK_TOKENS  # sounds have one length
        most = model.max_positions or 2 * BLOCK_TOKENS  # of a row, which may be less than a block
        shorter, longer = (reserved(min(count, most)) for count in (BLOCK_TOKENS, 2 * BLOCK_TOKENS))
        per_token = (longer - shorter) / BLOCK_TOKENS
        return RowCost(int(shorter - BLOCK_TOKENS * per_token) + 4 * model.config.vocab_size, per_token, per_source)

    def __call__(self, tokens: int) -> int:
        return self.fixed + int(self.per_token * BLOCK_TOKENS * -(-tokens // BLOCK_TOKENS))

    def beside(self, prompt: PicturePrompt) -> int:
        """Bytes that a prompt takes beside its tokens: pictures, and keys and values of its source."""
        return prompt.nbytes + int(self.per_source * len(prompt.source or ()))

    def refuse_too_little(self, memory: int) -> None:
        """Raises CapacityError for memory that not even the shortest prompt would have room in."""
        if (need := self(1)) > memory:
            raise CapacityError(
                f"{memory:,} bytes of memory were asked for; a row of {BLOCK_TOKENS} tokens, the least that a request "
                f"takes, needs about {need:,} with this model: give more memory"
            )

    def refuse_too_long(self, tokens: int, memory: int, beside: int = 0) -> None:
        """Raises CapacityError for a prompt that could not be read by itself. `beside`: see `RowCost.beside`."""
        if (need := self(tokens) + beside) > memory:
            raise too_large(tokens, need, memory)


def too_large(tokens: int, need: int, memory: int) -> CapacityError:
    return CapacityError(
        f"a row of {tokens} tokens takes about {need:,} bytes, and the engine was made with memory={memory:,} for all "
        "of its rows: shorten the prompt, or make the engine with more memory"
    )


def nbytes(state: State) -> int:
    return sum(state.memory().values())


class MemoryBudget:
    """Rows and prefix store within the engine's memory: kept entries go first, then the rows whose turns are last."""

    def __init__(self, work: Workload, cost: RowCost) -> None:
        self.held = 0  # bytes of rows when they were last looked at
        self._work, self._cost, self._reuse = work, cost, work.reuse
        self._unmeasured = 0  # steps since then
        self._spare = 0.0  # bytes that they may have grown by since, beside having doubled; below 0: look again

    def working(self) -> bool:
        return bool(self._work.jobs or self._work.readers())

    def fits(self, tokens: int, prompt: PicturePrompt) -> bool:
        """Whether a row of `tokens` tokens, including its prompt, has room beside the others.

        One that is alone may always try.
        """
        if not self.working():
            return True
        promised = sum(self._cost(len(reader.text)) - self._cost(reader.at) for reader in self._work.readers())
        coming = self._cost(tokens) + self._cost.beside(prompt)
        return self._work.row_bytes() + promised + coming <= self._reuse.memory

    def room(self) -> int:
        """Number of tokens that there was room for when the rows were last looked at; bytes if none takes any."""
        room = max(0, self._reuse.memory - self.held - self._cost.fixed)
        return int(room / self._cost.per_token) if self._cost.per_token else room

    def grown(self, tokens: int) -> None:
        """Note that a row has read `tokens` tokens of a text."""
        self._spare -= self._cost.per_token * (tokens + BLOCK_TOKENS)

    def bound(self) -> None:
        """Let go of what is kept, then of rows, until they fit."""
        work, memory, prefixes, kept = self._work, self._reuse.memory, self._reuse.prefixes, -1
        self._unmeasured += 1
        if not (work.looks or self._spare < 0 or work.preempted or self._unmeasured >= CHECK_EVERY):
            return
        work.looks = max(0, work.looks - 1)
        while kept != prefixes.nbytes:  # a block that the store lets go is a row's alone from then on
            held, kept = work.row_bytes(), prefixes.nbytes
            while held > memory and self._preempt():
                if (held := work.row_bytes()) > memory:
                    self._pack()
                    held = work.row_bytes()
                kept = prefixes.nbytes
            self._reuse.bound(held)
        work.peak, self.held = max(work.peak, held), held
        self._unmeasured = 0
        # The rows may double in a step. Far from the budget they are looked at now and then.
        self._spare = memory - 2 * held - prefixes.nbytes

    def _preempt(self) -> bool:
        """Take the row back whose turn is last: it goes on later. False if there is none.

        One that is alone has no room even so, and ends.
        """
        work = self._work
        working: list[tuple[Job, AnswerRow | Preempted | None]] = [(job, None) for job in work.reading]
        working += [(job, choice) for job in work.answering for choice in job.unseated]
        working += [(job, choice) for choice, job in work.jobs.items()]
        working += [(aside.job, aside) for aside in work.preempted if aside.reading]
        if not working:
            return False
        places = work.turns()
        job, what = max(working, key=lambda entry: (places[entry[0]], 0 if entry[1] is None else entry[1].index))
        if len(working) == 1:
            self._end_too_large(job, what)
        elif what is None:
            work.reading.remove(job)
            kept = work.read_so_far(job) if job.at else None
            work.unseat(job)
            job.begin_again()
            work.waiting.put_back(job)
            if kept is not None:
                work.keep(kept, job)
        elif isinstance(what, Preempted):
            work.unseat(what)
            what.set_aside()
        elif what in job.unseated:
            work.preempted += [Preempted.of(job, choice) for choice in job.unseated]
            job.unseated, job.source = [], None
        else:
            work.set_aside(what, job)
        work.counts["preempted"] += 1
        work.crowded = True
        return True

    def _end_too_large(self, job: Job, what: AnswerRow | Preempted | None) -> None:
        """A request that is alone, and has no room: it ends with what it has."""
        work = self._work
        if what is None:
            work.fail(job, too_large(len(job.prompt), self._cost(len(job.prompt)), self._reuse.memory))
            return
        choice = what.choice if isinstance(what, Preempted) else what
        work.end_answer(job, choice, "capacity")
        if isinstance(what, Preempted):
            work.preempted.remove(what)
        elif choice in job.unseated:
            job.unseated.remove(choice)
            job.source = None
        else:
            work.leave(choice)
        work.settle(job)

    def _pack(self) -> None:
        """Have the rows take no more than they need: those that left, and the longest that was, leave room behind."""
        pool = self._work.pool
        rows = [(owner, pool.snapshot(owner)) for owner in pool.owners]
        for owner, _ in rows:
            pool.leave(owner)
        for owner, snapshot in rows:
            pool.join(owner, snapshot)
