"""Beam search over forks of a state's rows: the hypotheses and scores are those of transformers' `generate`.

Each hypothesis is a row of the state, and `State.select` forks the rows that go on and drops the others. The rows of
the prompts stay at the front, so that a search that ends early leaves the state after its prompts. At the end each row
holds its prompt and the best answer, as after `Generation`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from itertools import chain
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch

from lmstate.errors import CapacityError, UnsupportedError
from lmstate.generation.params import SamplingParams, sampling_params
from lmstate.generation.prompts import check_prompts
from lmstate.generation.report import Report, RowPiece
from lmstate.generation.row import AnswerText, Finish
from lmstate.generation.sampling import FILTERS, Sampler, TokenPicker, check_numbers
from lmstate.language_model import LanguageModel
from lmstate.state.validate import real_number, token_ids, whole_number

if TYPE_CHECKING:
    from torch import Tensor

    from lmstate.state import State

MOST_BEAMS = 256
# Fields of `SamplingParams` that a search follows; the last four are of draws, and nothing is drawn.
HONORED = (
    "max_new_tokens", "min_tokens", "stop_token_ids", "ignore_eos", "repetition_penalty", "logit_bias",
    *FILTERS, "seed",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class BeamParams:
    """Beam search, with transformers' names and meanings.

    num_beams             hypotheses of each prompt that go on together; 1: no search
    length_penalty        a finished answer of n tokens has the sum of its log probabilities divided by n to this power
    early_stopping        True: end with `num_beams` finished answers; False: when the best running one would not get
                          better by ending now; "never": when it cannot get better by ending later either
    num_return_sequences  the answers to return, best first

    Raises ValueError for values out of range, and for the others of these without beams.
    """

    num_beams: int = 1
    length_penalty: float = 1.0
    early_stopping: bool | Literal["never"] = False
    num_return_sequences: int = 1

    def __post_init__(self) -> None:
        beams, count = (whole_number(getattr(self, name), name) for name in ("num_beams", "num_return_sequences"))
        if not 1 <= beams <= MOST_BEAMS:
            raise ValueError(f"num_beams is {beams}; it must be 1 to {MOST_BEAMS}")
        if not 1 <= count <= beams:
            raise ValueError(f"num_return_sequences is {count}; it must be 1 to num_beams, which is {beams}")
        if not math.isfinite(penalty := real_number(self.length_penalty, "length_penalty")):
            raise ValueError(f"length_penalty is {penalty}; it must be a finite number")
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(f'early_stopping is {self.early_stopping!r:.80}; it must be True, False or "never"')
        if beams == 1 and (penalty != 1.0 or self.early_stopping):
            raise ValueError("length_penalty and early_stopping are of a beam search: give num_beams=2 or more")


class Hypothesis(NamedTuple):
    """An answer in the making. `row` of the state holds all of it but its last token.

    `score`: the sum of its log probabilities; of a finished one, divided for its length.
    """

    tokens: tuple[int, ...]
    score: float
    row: int


class Beams:
    """The hypotheses of one prompt. `finished`: best first."""

    def __init__(self, params: SamplingParams, beams: BeamParams, ends: frozenset[int], row: int) -> None:
        self._params, self._beams, self._ends = params, beams, ends
        self._sampler = replace(params, seed=0)  # nothing is drawn
        self.running = [Hypothesis((), 0.0, row)]
        self.finished: list[Hypothesis] = []

    def advance(self, logits: Tensor, state: State) -> None:
        """Give each running hypothesis its next token: logits float32 `[B, V]`, one row for each of them."""
        beams, count, vocab = self._beams, len(self.running[0].tokens) + 1, logits.shape[-1]
        sums = torch.tensor([each.score for each in self.running], device=logits.device)
        scores = self._log_probabilities(logits, state) + sums[:, None]
        # Enough to go on with: each end of the text can end every beam.
        wanted = beams.num_beams * max(2, 1 + len(self._ends))
        values, places = scores.flatten().topk(min(wanted, scores.numel()))
        check_numbers(bool((values[:1] > -math.inf).all()))
        found = [
            Hypothesis((*self.running[place // vocab].tokens, place % vocab), value, self.running[place // vocab].row)
            for value, place in zip(values.tolist(), places.tolist())
            if value > -math.inf
        ]
        last = count == self._params.max_new_tokens or not state.step_room(self.running[0].row, 1)
        ended = [last or each.tokens[-1] in self._ends for each in found]
        scale = count**beams.length_penalty
        fresh = [each._replace(score=each.score / scale) for each, end in zip(found[: beams.num_beams], ended) if end]
        self.finished = sorted([*self.finished, *fresh], key=lambda each: -each.score)[: beams.num_beams]
        self.running = [each for each, end in zip(found, ended) if not end][: beams.num_beams]
        if len(self.finished) == beams.num_beams and not self._improves(count):
            self.running = []

    def _improves(self, count: int) -> bool:
        """Whether a running hypothesis of `count` tokens can become better than the worst finished one."""
        beams = self._beams
        if not self.running or beams.early_stopping is True:
            return False
        longest = beams.early_stopping == "never" and beams.length_penalty > 0.0
        length = self._params.max_new_tokens if longest else count
        return self.running[0].score / length**beams.length_penalty > self.finished[-1].score

    def _log_probabilities(self, logits: Tensor, state: State) -> Tensor:
        """Float32 `[B, V]`, with the bias, the penalty and the tokens that may not come yet."""
        picker = TokenPicker(self._sampler, rows=len(self.running))
        if self._sampler.repetition_penalty != 1.0:
            for index, each in enumerate(self.running):
                picker.see(index, chain(state.tokens(each.row), each.tokens[-1:]))
        scores = picker.adjusted(logits.log_softmax(-1), range(len(self.running)))
        if self._ends and len(self.running[0].tokens) < self._params.min_tokens:
            scores[:, list(self._ends)] = -math.inf
        return scores


class BeamSearch:
    """A search for the best answers to a batch of prompts: iterate to the end; `answers`, `texts` and `report()` then.

    Each step gives an empty piece, and the last one the best text of each row. Its arguments and errors are those of
    `Generation`; parameters that a search does not follow raise ValueError, a static state `UnsupportedError`. An
    exception, and an iterator that is closed early, leave the state after its prompts.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        state: State | None = None,
        params: Sampler | None = None,
        *,
        beams: BeamParams,
        **changes: Any,
    ) -> None:
        self.params = sampling_params(params, changes)
        self.params.check(model)
        self.check_params(self.params)
        self.model, self.beams = model, beams
        self.state = model.new_state(rows=len(prompts)) if state is None else state
        self.prompts = [token_ids(prompt, f"prompt {row}") for row, prompt in enumerate(prompts)]
        check_prompts(self.prompts, self.state)
        if self.state.layout.static:
            raise UnsupportedError("a static state keeps its rows, and a beam search forks them: give another state")
        queued = sum(self.state.rewind_cost(row, length) for row, length in enumerate(self.state.lengths))
        self._fed, self._reused = queued + sum(map(len, self.prompts)), sum(self.state.lengths) - queued
        self._before = [[*self.state.tokens(row), *prompt] for row, prompt in enumerate(self.prompts)]
        self._ends = self.params.ends(model.eos_ids)
        self._searches = [Beams(self.params, beams, self._ends, row) for row in range(len(self.prompts))]
        self._seconds = [0.0, 0.0]  # prefill, decode

    @staticmethod
    def check_params(params: SamplingParams) -> None:
        """Raise ValueError for what a search does not follow."""
        known = {field.name: field.default for field in fields(params) if field.name not in HONORED}
        if given := [name for name, default in known.items() if getattr(params, name) != default]:
            raise ValueError(f"a beam search does not follow {' and '.join(given)}: leave out, or give num_beams=1")
        if not params.max_new_tokens:
            raise ValueError("max_new_tokens is 0; a beam search gives at least one token")

    @property
    def answers(self) -> list[list[list[int]]]:
        """The tokens of each row's answers, best first: `num_return_sequences` of them, without what ended them."""
        count = self.beams.num_return_sequences
        return [[self._kept(each) for each in search.finished[:count]] for search in self._searches]

    @property
    def scores(self) -> list[list[float]]:
        """The score of each of `answers`."""
        count = self.beams.num_return_sequences
        return [[each.score for each in search.finished[:count]] for search in self._searches]

    @property
    def texts(self) -> list[str]:
        """The best text of each row."""
        return [self.text(row, answers[0]) if answers else "" for row, answers in enumerate(self.answers)]

    def text(self, row: int, answer: Sequence[int]) -> str:
        """The text of an answer to the prompt of a row."""
        text = AnswerText(self.model.tokenizer.stream(), (), self._before[row])
        for token in answer:
            text.take(token)
        text.finish()
        return text.text

    def best(self, return_ids: bool) -> list[Any]:
        """Search to the end: the text of each row's best answer, or its ids. Of several answers a list."""
        for _ in self:
            pass
        if not return_ids:
            given: list[Any] = [[self.text(row, ids) for ids in found] for row, found in enumerate(self.answers)]
        else:
            given = self.answers
        return given if self.beams.num_return_sequences > 1 else [found[0] for found in given]

    def report(self) -> Report:
        best = [len(answers[0]) for answers in self.answers if answers]
        return Report(
            fed=self._fed, reused=self._reused, generated=sum(best), prefill_seconds=self._seconds[0],
            decode_seconds=self._seconds[1], decoded=sum(best) - len(best),
            finished=tuple(map(self._finish, self._searches)),
        )  # fmt: skip

    def __iter__(self) -> Iterator[RowPiece]:
        begin = perf_counter()
        logits = self.model(self.prompts, self.state)  # [R, V]
        assert logits is not None
        rows = len(self.prompts)
        try:
            for search in self._searches:
                search.advance(logits[[each.row for each in search.running]], self.state)
            self._seconds[0] = perf_counter() - begin
            while any(search.running for search in self._searches):
                yield RowPiece(0, "")
                begin = perf_counter()
                self._step()
                self._seconds[1] += perf_counter() - begin
            self.state.select([search.finished[0].row for search in self._searches])
        except BaseException:
            self.state.discard()
            self.state.select(range(rows))
            for search in self._searches:
                search.finished.clear()
            raise
        for row, (search, answers) in enumerate(zip(self._searches, self.answers)):
            held = len(search.finished[0].tokens) - 1
            with suppress(CapacityError):  # a full state: it ends one token earlier
                self.state.queue(row, answers[0][held:])
        if self.model.has_tokenizer:
            yield from (RowPiece(row, text) for row, text in enumerate(self.texts))

    def _step(self) -> None:
        """One forward over the newest token of every running hypothesis."""
        rows = list(range(len(self.prompts)))
        feed: list[list[int]] = [[] for _ in rows]
        for search in self._searches:
            running = []
            for each in search.running:
                running.append(each._replace(row=len(rows)))
                rows.append(each.row)
                feed.append([each.tokens[-1]])
            search.running = running
            # Those of one parent that are finished hold the same tokens.
            places = {row: len(rows) + at for at, row in enumerate(dict.fromkeys(each.row for each in search.finished))}
            rows += places
            feed += [[] for _ in places]
            search.finished = [each._replace(row=places[each.row]) for each in search.finished]
        self.state.select(rows)
        logits = self.model(feed, self.state)
        assert logits is not None
        for search in self._searches:
            if search.running:
                search.advance(logits[[each.row for each in search.running]], self.state)

    def _finish(self, search: Beams) -> Finish | None:
        """The reason for the end of the best answer; None before the end."""
        if search.running or not search.finished:
            return None
        last = search.finished[0].tokens[-1]
        return "length" if last not in self._ends else "eos" if last in self.model.eos_ids else "stop"

    def _kept(self, answer: Hypothesis) -> list[int]:
        """The tokens of an answer, without the one that ended it."""
        return list(answer.tokens[:-1] if answer.tokens[-1] in self._ends else answer.tokens)
