"""Drafts for the answers that decode together: who proposes, how deep, and what became of it."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from lmstate.engine.job import Job
from lmstate.engine.rows import RowPool
from lmstate.generation.row import AnswerRow
from lmstate.generation.sampling import Sampler
from lmstate.speculation import (
    Draft,
    DraftChoice,
    Drafter,
    DraftReport,
    HeadsDrafter,
    Speculator,
    TextCorpus,
    TextDrafter,
    make_drafter,
)
from lmstate.speculation.drafter import ForgettingDrafter
from lmstate.speculation.speculator import widest_draft
from lmstate.state import State

if TYPE_CHECKING:
    from lmstate.models.model import Model

READING = 128  # tokens of a text that a drafter reads at most between two steps: a long prompt delays no answer
CONTEXT = 32  # tokens of a prompt that an earlier answer is found by: enough to begin one that is asked for again
CORPUS_TOKENS = 2**17  # of earlier answers, at most
CORPUS_PART = 64  # the part of the engine's memory that earlier answers take: 1/64 at most
TOKEN_BYTES = 200


class Drafting:
    """The speculation of an engine. Drafts change speed, never an answer.

    The rows of a `Speculator` are answers here: they come and go, each under a number of its own.
    """

    def __init__(self, draft: DraftChoice, model: Model, rows: int, memory: int, state: State) -> None:
        """`draft`, as in `Engine`: raises ValueError for anything else. `state`: such a one as the rows will have."""
        self.counts: dict[str, float] = dict.fromkeys(("drafted_tokens", "accepted_tokens", "draft_seconds_saved"), 0)
        self._corpus: TextCorpus | None = None
        self._speculator: Speculator | None = None
        self._numbers: dict[AnswerRow, int] = {}
        self._next = 0
        self._empty = state
        self._observed: dict[AnswerRow, int] = {}  # tokens of a text that the drafter was told
        if isinstance(draft, Speculator):
            self._speculator = draft
        elif (drafter := self._drafter(draft, model, rows, memory, state)) is not None:
            self._speculator = Speculator(drafter, model.config.vocab_size, 1)

    def _drafter(self, draft: DraftChoice, model: Model, rows: int, memory: int, state: State) -> Drafter | None:
        text = None
        if draft in ("auto", "text"):
            self._corpus = TextCorpus(min(CORPUS_TOKENS, memory // CORPUS_PART // TOKEN_BYTES))
            text = TextDrafter(self._corpus, READING)
        if draft == "heads" or (draft == "auto" and model.has_heads(state)):
            return HeadsDrafter(model, state, text)
        assert not isinstance(draft, Speculator)
        return text or make_drafter(draft, model, rows, Sampler(), None, READING)

    def propose(self, jobs: Mapping[AnswerRow, Job], pool: RowPool[Any]) -> dict[AnswerRow, Draft]:
        """Drafts for the answers of the pool, each within what it has room for; {} if there are none."""
        forced = {choice: Draft(choice.forced) for choice in jobs if choice.forced}
        if self._speculator is None:
            room = {choice: self._room(choice, pool, widest_draft(len(jobs))) for choice in forced}
            return {choice: draft.cut(room[choice]) for choice, draft in forced.items() if room[choice]}
        self._speculator.resize(len(jobs))
        try:
            self._observe(jobs)
            rows = {self._numbers[choice]: choice for choice in jobs}
            rooms = {row: self._room(choice, pool, self._speculator.most) for row, choice in rows.items()}
            with self._heads_in(pool, rows):
                drafts = self._speculator.propose(rooms, lambda row, draft: rows[row].admitted(draft))
        except Exception as error:
            self._do_without(error)
            return {}
        found = {rows[row]: draft for row, draft in drafts.items()}
        for choice, draft in forced.items():  # they hold, whatever depth pays for others
            found[choice] = draft.cut(rooms[self._numbers[choice]])
        return {choice: draft for choice, draft in found.items() if draft.tokens}

    def measured(
        self,
        drafts: Mapping[AnswerRow, Draft],
        accepted: Mapping[AnswerRow, int],
        tokens: int,
        seconds: float,
        rows: int,
    ) -> None:
        """Note the seconds of a step of `tokens` tokens over `rows` answers, which accepted `accepted` of `drafts`."""
        for choice, draft in drafts.items():
            choice.drafted += len(draft)
            choice.accepted += accepted[choice]
            self.counts["drafted_tokens"] += len(draft)
            self.counts["accepted_tokens"] += accepted[choice]
        if self._speculator is not None:
            known = {self._numbers[choice]: choice for choice in accepted if choice in self._numbers}
            self._speculator.verified(
                {row: drafts.get(choice, Draft()) for row, choice in known.items()},
                {row: accepted[choice] for row, choice in known.items()},
            )
            self._speculator.measured(tokens, seconds, rows, sum(accepted.values()))
            self.counts["draft_seconds_saved"] = self._speculator.report().seconds_saved

    def report(self) -> DraftReport:
        """Speculation statistics of all answers so far. Zeros without a drafter, also where it was given up."""
        speculator = self._speculator
        return DraftReport() if speculator is None else speculator.report()

    def leave(self, choice: AnswerRow, job: Job) -> None:
        """An answer has ended: it is one of the earlier ones now."""
        try:
            self._forget(choice)
        except Exception as error:
            self._do_without(error)
        if self._corpus is not None and not job.salt:  # else its tokens would show others where they are drafted
            self._corpus.remember([*job.prompt[-CONTEXT:], *choice.tokens])

    # ---- the parts of it

    @contextmanager
    def _heads_in(self, pool: RowPool[Any], rows: Mapping[int, AnswerRow]) -> Iterator[None]:
        """Meanwhile heads draft in the pool's state. No longer, so that the bytes of rows that have left are freed."""
        heads = None if self._speculator is None else self._speculator.drafter
        if not isinstance(heads, HeadsDrafter):
            yield
            return
        heads.move(pool.state, {row: pool.row(choice) for row, choice in rows.items()})
        try:
            yield
        finally:
            heads.move(self._empty, {})

    def _observe(self, jobs: Mapping[AnswerRow, Job]) -> None:
        assert self._speculator is not None
        for choice in [choice for choice in self._numbers if choice not in jobs]:
            self._forget(choice)  # its row was taken back, or its request failed without one
        new: dict[int, list[int]] = {}
        for choice, job in jobs.items():
            if choice not in self._numbers:
                self._numbers[choice] = self._number(self._speculator)
                new[self._numbers[choice]] = [*job.prompt, *choice.tokens]
            elif tokens := choice.tokens[self._observed[choice] :]:
                new[self._numbers[choice]] = tokens
            self._observed[choice] = len(choice.tokens)
        self._speculator.observe(new)

    def _forget(self, choice: AnswerRow) -> None:
        number = self._numbers.pop(choice, None)
        self._observed.pop(choice, None)
        if self._speculator is not None and number is not None:
            self._speculator.forget(number)

    def _do_without(self, error: Exception) -> None:
        """A drafter failed, which is not what requests depend on."""
        warnings.warn(f"the engine goes on without drafts: its drafter failed with {error!r}", stacklevel=3)
        self._speculator = None

    def _number(self, speculator: Speculator) -> int:
        """A number for a new row: of one that was forgotten, where the drafter forgets."""
        if isinstance(speculator.drafter, ForgettingDrafter):
            used = set(self._numbers.values())
            return next(number for number in range(len(used) + 1) if number not in used)
        self._next += 1
        return self._next - 1

    def _room(self, choice: AnswerRow, pool: RowPool[Any], most: int) -> int:
        """Number of tokens that may be drafted for an answer, at most `most`."""
        fed = len(choice.feed)
        wanted = min(most + 1 - fed, choice.params.max_new_tokens - len(choice.tokens) - 1)
        return max(0, pool.room(choice, fed + wanted) - fed) if wanted > 0 else 0
