"""The generation loop. There is one: `generate`, `stream` and the command line all run a `Generation`.

Afterwards each row of the state holds its earlier tokens, the prompt, and the tokens of the answer.
- The last token of an answer is handed over with `state.queue`: it counts as seen, and the next call computes it
  together with its own tokens. So no forward is spent on logits that may never be needed.
- An end-of-sequence token ends the answer and is neither in the text nor in the state. A chat's next turn begins with
  the template's own closing of the turn (`<|im_end|>` and a newline, say), and plain text continued has none inside.
- A stop string is not in the text, and the state is rewound to the last token wholly before it.
- Tokens that a drafter proposed (`lmstate.speculation`) are verified several at a step; the text and the state are
  those without drafts.
- Closing the iterator early keeps every token whose piece was given out. An exception (Ctrl-C, a full state) leaves the
  state at the last token that was computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from lmstate.errors import CapacityError
from lmstate.generation.beams import BeamParams, BeamSearch
from lmstate.generation.logprobs import TokenLogprob
from lmstate.generation.params import sampling_params
from lmstate.generation.prompts import (
    Messages,
    Prompt,
    Sources,
    are_messages,
    as_token_lists,
    check_prompts,
    with_source,
)
from lmstate.generation.report import Report, RowPiece
from lmstate.generation.row import AnswerRow, most_likely
from lmstate.generation.sampling import Sampler
from lmstate.language_model import LanguageModel
from lmstate.speculation.acceptance import verify
from lmstate.speculation.choose import DraftChoice, make_speculator
from lmstate.speculation.drafter import Draft
from lmstate.speculation.speculator import DraftReport, widest_draft
from lmstate.state.validate import token_ids

if TYPE_CHECKING:
    from torch import Tensor

    from lmstate.state import State


class Generation:
    """One run of a model on a batch of prompts: iterate for the pieces; `texts` and `report()` at any time.

    prompts: one list of token ids per row of `state`; an empty one continues a row that holds tokens already.
    Raises ValueError for options out of range, prompts that do not fit the state, and an empty prompt on an empty row;
    PendingError if the state awaits a verdict; while iterating, CapacityError where a prompt does not fit the state. A
    state that is full later ends the answer, which is then `finished` with "capacity".
    A model without a tokenizer gives no text: `ids` has the answers.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        state: State | None = None,
        params: Sampler | None = None,
        *,
        draft: DraftChoice = "auto",
        **changes: Any,
    ) -> None:
        """`params`: a `SamplingParams`, or a `Sampler`; `changes`: fields of it by name."""
        params = sampling_params(params, changes)
        params.check(model)
        params = params.compiled(model)
        if params.n != 1 or params.prompt_logprobs is not None:
            raise ValueError("n and prompt_logprobs are options of Engine.submit: a row has one answer here")
        self.model = model
        self.params = params
        self.state = model.new_state(rows=len(prompts)) if state is None else state
        self.prompts = [token_ids(prompt, f"prompt {row}") for row, prompt in enumerate(prompts)]
        check_prompts(self.prompts, self.state)
        # Tokens queued by an earlier call, or rewound past the window, are computed together with the prompt.
        queued = sum(self.state.rewind_cost(row, length) for row, length in enumerate(self.state.lengths))
        self._fed = queued + sum(map(len, self.prompts))
        self._reused = sum(self.state.lengths) - queued
        self._begins = [held + len(prompt) for held, prompt in zip(self.state.lengths, self.prompts)]
        seed = int(torch.randint(2**62, ())) if params.seed is None else params.seed
        self._rows = [
            AnswerRow(model, params, [*self.state.tokens(row), *prompt], row, seed)
            for row, prompt in enumerate(self.prompts)
        ]
        self._speculator = make_speculator(draft, model, len(self.prompts), params, params.seed, self.state)
        self._told: list[int] = []  # rows that the drafter knows
        self._seconds = [0.0, 0.0]  # prefill, decode
        self._first_tokens = 0

    @property
    def texts(self) -> list[str]:
        return [row.text for row in self._rows]

    @property
    def ids(self) -> list[list[int]]:
        """The tokens of each row's answer: those that its text stands for."""
        return [row.tokens[: row.kept()] for row in self._rows]

    @property
    def logprobs(self) -> list[list[TokenLogprob]]:
        """Log probabilities of the tokens in `ids`, where the parameters ask for them."""
        return [row.logprobs[: row.kept()] for row in self._rows]

    def report(self) -> Report:
        generated = sum(len(row.tokens) for row in self._rows)
        return Report(
            fed=self._fed,
            reused=self._reused,
            generated=generated,
            prefill_seconds=self._seconds[0],
            decode_seconds=self._seconds[1],
            decoded=generated - self._first_tokens,
            finished=tuple(row.finished for row in self._rows),
            draft=self._speculator.report() if self._speculator else DraftReport(),
        )

    def __iter__(self) -> Iterator[RowPiece]:
        if self.params.max_new_tokens == 0:
            self._prefill_only()
            return
        try:
            yield from self._pieces()
        finally:
            if self._speculator is not None:  # its drafter may go on to other texts
                for row in self._told:
                    self._speculator.forget(row)

    @property
    def _going(self) -> list[int]:
        return [index for index, row in enumerate(self._rows) if row.feed and not row.over]

    def _pieces(self) -> Iterator[RowPiece]:
        texts = self._first_step()
        while True:
            given = dict.fromkeys(texts, 0)
            try:
                for row, pieces in texts.items():
                    for piece in pieces:
                        given[row] += 1
                        if piece:
                            yield RowPiece(row, piece)
            except GeneratorExit:
                self._close({row: pieces[given[row] :] for row, pieces in texts.items()})
                raise
            if not self._going:
                return
            texts = self._step()

    def _close(self, withheld: dict[int, list[str]]) -> None:
        """The caller wants no more: answers, and the state, end before the `withheld` pieces of the last step."""
        for index, pieces in withheld.items():
            row = self._rows[index]
            if pieces:
                row.take_back(pieces)
            if pieces or not row.over:
                with suppress(CapacityError):  # a full state: it ends one token earlier
                    self._hold(index, row.kept())

    def _first_step(self) -> dict[int, list[str]]:
        """The prompts' forward, and the first token of every row."""
        begin = perf_counter()
        held = [self.state.tokens(row) + prompt for row, prompt in enumerate(self.prompts)] if self._speculator else []
        logits = self.model(self.prompts, self.state)  # [R, V]
        assert logits is not None
        texts, _ = self._choose(logits[:, None], {row: Draft() for row in range(len(self.prompts))})
        if self._speculator is not None and self._going:
            going = {row: [*held[row], *self._rows[row].tokens] for row in self._going}
            self._speculator.observe(going)
            self._told = list(going)
        self._seconds[0] += perf_counter() - begin
        self._first_tokens = sum(len(row.tokens) for row in self._rows)
        return texts

    def _step(self) -> dict[int, list[str]]:
        """One forward over the newest token of every active row and its draft, or over tokens that the model gives."""
        begin = perf_counter()
        full = [row for row in self._going if not self.state.step_room(row, 1)]
        if full:
            return {row: [self._rows[row].end("capacity")] for row in full}
        drafts = self._drafts()
        width = 1 + max(map(len, drafts.values()))
        feed: list[list[int]] = [[] for _ in self.prompts]
        for row, draft in drafts.items():
            feed[row] = [*self._rows[row].feed, *draft.tokens]
        before = {row: len(self._rows[row].tokens) for row in drafts}
        ran = perf_counter()
        followed = self._followed(feed) if width == 1 else None
        if width == 1 and followed is None:
            logits = self.model(feed, self.state)  # [R, V]
            assert logits is not None
            texts, accepted = self._choose(logits[:, None], drafts)
        else:
            try:
                logits = self.model(feed, self.state, logits="all", commit=False) if followed is None else followed[1]
                assert logits is not None  # [R, T, V]
                if followed is not None:
                    drafts = {row: Draft(tuple(followed[0][row][1:])) for row in drafts}
                texts, accepted = self._choose(logits, drafts, verdict=True)
            except BaseException:
                self.state.discard()  # of a signal between the two
                raise
        if self._speculator is not None:
            if followed is None:
                self._speculator.verified(drafts, accepted)
                tokens = sum(map(len, feed))
                self._speculator.measured(tokens, perf_counter() - ran, len(drafts), gained=sum(accepted.values()))
            self._speculator.observe({row: self._rows[row].tokens[before[row] :] for row in self._going})
        self._seconds[1] += perf_counter() - begin
        return texts

    def _followed(self, feed: list[list[int]]) -> tuple[list[list[int]], Tensor] | None:
        """Several tokens of each active row in one go, if all rows take the likeliest ones."""
        going = self._going
        if not all(self._rows[row].plain for row in going):
            return None
        wanted = min(self.params.max_new_tokens - len(self._rows[row].tokens) for row in going)
        return self.model.follow(feed, self.state, min(self.state.step_room(row, wanted) for row in going))

    def _drafts(self) -> dict[int, Draft]:
        """A draft for each active row, within what its answer and the state have room for."""
        going = self._going
        forced = {row: Draft(self._rows[row].forced) for row in going}
        if self._speculator is None and not any(forced.values()):
            return {row: Draft() for row in going}
        most = widest_draft(len(self.prompts)) if self._speculator is None else self._speculator.most
        room = {}
        for row in going:
            wanted = min(most, self.params.max_new_tokens - len(self._rows[row].tokens) - 1)
            room[row] = max(0, self.state.step_room(row, 1 + wanted) - 1) if wanted > 0 else 0
        drafts = {row: Draft() for row in going}
        if self._speculator is not None:
            drafts = self._speculator.propose(room, lambda row, draft: self._rows[row].admitted(draft))
        return drafts | {row: draft.cut(room[row]) for row, draft in forced.items() if draft.tokens}

    def _choose(
        self, logits: Tensor, drafts: dict[int, Draft], verdict: bool = False
    ) -> tuple[dict[int, list[str]], dict[int, int]]:
        """Give each row of `drafts` its next tokens, and the state their `verdict` where it awaits one.

        logits: float32 [R, T, V] of all rows. Returns, for each row, the new text token by token, and how many
        tokens of its draft it accepted.
        """
        texts: dict[int, list[str]] = {index: [] for index in drafts}
        accepted = dict.fromkeys(drafts, 0)
        plain = [index for index in drafts if self._rows[index].plain]
        try:
            best = dict(zip(plain, most_likely(logits, plain)))
            for index in drafts:
                self._rows[index].feed.clear()
            for index, draft in drafts.items():
                row = self._rows[index]

                def give(token: int, at: Tensor, row: AnswerRow = row, new: list[str] = texts[index]) -> None:
                    new.append(row.take(token, at))

                accepted[index] = verify(row, logits[index], draft, give, best.get(index))
        finally:  # an exception leaves the tokens that were given out before this step
            if verdict:
                counts = [1 + accepted[row] if row in accepted else 0 for row in range(len(self.prompts))]
                self.state.commit(counts)
        for index in drafts:
            if self._rows[index].over:
                with suppress(CapacityError):  # a full state: it ends one token earlier
                    self._hold(index, self._rows[index].kept())
        return texts, accepted

    def _hold(self, row: int, count: int) -> None:
        """Bring the state to the first `count` tokens of the row's answer, after what it held before that."""
        held = self.state.lengths[row] - self._begins[row]
        if count < held:
            self.state.rewind(row, self._begins[row] + count)
        elif count > held:
            self.state.queue(row, self._rows[row].tokens[held:count])

    def _prefill_only(self) -> None:
        begin = perf_counter()
        self.model(self.prompts, self.state, logits="none")
        self._seconds[0] += perf_counter() - begin
        for row in self._rows:
            row.end("length")


@overload
def generate(
    model: LanguageModel,
    prompt: str | Sequence[int] | Messages,
    state: State | None = None,
    params: None = None,
    *,
    source: None = None,
    draft: DraftChoice = "auto",
    return_ids: Literal[False] = False,
    num_beams: int = 1,
    num_return_sequences: Literal[1] = 1,
    logprobs: None = None,
    **changes: Any,
) -> str: ...
@overload
def generate(
    model: LanguageModel,
    prompt: Sequence[str] | Sequence[Sequence[int]],
    state: State | None = None,
    params: None = None,
    *,
    source: None = None,
    draft: DraftChoice = "auto",
    return_ids: Literal[False] = False,
    num_beams: int = 1,
    num_return_sequences: Literal[1] = 1,
    logprobs: None = None,
    **changes: Any,
) -> list[str]: ...
@overload
def generate(
    model: LanguageModel,
    prompt: str | Sequence[int] | Messages,
    state: State | None = None,
    params: None = None,
    *,
    source: None = None,
    draft: DraftChoice = "auto",
    return_ids: Literal[True],
    num_beams: int = 1,
    num_return_sequences: Literal[1] = 1,
    logprobs: None = None,
    **changes: Any,
) -> list[int]: ...
@overload
def generate(
    model: LanguageModel,
    prompt: Sequence[str] | Sequence[Sequence[int]],
    state: State | None = None,
    params: None = None,
    *,
    source: None = None,
    draft: DraftChoice = "auto",
    return_ids: Literal[True],
    num_beams: int = 1,
    num_return_sequences: Literal[1] = 1,
    logprobs: None = None,
    **changes: Any,
) -> list[list[int]]: ...
@overload
def generate(
    model: LanguageModel,
    prompt: Prompt | None = None,
    state: State | None = None,
    params: Sampler | None = None,
    *,
    source: Sources | None = None,
    draft: DraftChoice = "auto",
    return_ids: bool = False,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    num_return_sequences: int = 1,
    **changes: Any,
) -> Any: ...
def generate(
    model: LanguageModel,
    prompt: Prompt | None = None,
    state: State | None = None,
    params: Sampler | None = None,
    *,
    source: Sources | None = None,
    draft: DraftChoice = "auto",
    return_ids: bool = False,
    num_beams: int = 1,
    length_penalty: float = 1.0,
    early_stopping: bool | Literal["never"] = False,
    num_return_sequences: int = 1,
    **changes: Any,
) -> Any:
    """The text that the model continues `prompt` with; for a list of prompts a list of texts, from one ragged batch.

    prompt          a text, a list of token ids, or chat messages; or a list of texts or of ids: one for each row
    state           continues it (one prompt per row) and leaves it as this module's docstring says; None: a fresh one
    params          a `lmstate.SamplingParams`. Its fields can be given by name too, and count before it:
                    `generate(prompt, max_new_tokens=20, temperature=0.7)`. With one `seed` a row gives the same text
                    whatever the other rows are
    source          of a model with an encoder, what it reads: a text or token ids, or one of these for each row. The
                    rows of a state must be empty. `prompt` is then what the answer begins with, and may be left out
    draft           who proposes tokens that the model verifies several at a step: "text" (what the text itself said
                    before), "heads" (the model's own, of one loaded with heads=True), a smaller model, a
                    `lmstate.speculation.Drafter`, or None. "auto" is the text, and the heads where there are some. The
                    text and its probabilities are those without drafts, and how deep to draft is measured
    return_ids      give the answer's token ids instead of its text: a list of ids, or for a list of prompts a list of
                    these. A model without a tokenizer takes ids and needs this
    num_beams       2 or more: a beam search, with `length_penalty`, `early_stopping` and `num_return_sequences` as in
                    `BeamParams`. For 2 or more sequences an answer is the list of these. Nothing is sampled or drafted

    With `logprobs=k` it returns (the answers, a list of `TokenLogprob` for each), of the tokens that the text is of.
    Type checkers know the type of the answer unless `logprobs`, `params`, `source` or several sequences are given.

    A state that gets full ends the answer with what there is. Raises ValueError for options out of range and empty
    prompts, TypeError for unknown ones, CapacityError where a prompt does not fit the state.
    """
    if not return_ids and not model.has_tokenizer:
        raise ValueError("the model has no tokenizer, so there is no text to return: ask for ids with return_ids=True")
    if source is not None:
        state, prompts, single = with_source(model, source, prompt, state)
    else:
        prompts, single = as_token_lists(model.tokenizer if model.has_tokenizer else None, prompt, state)
    beams = BeamParams(
        num_beams=num_beams,
        length_penalty=length_penalty,
        early_stopping=early_stopping,
        num_return_sequences=num_return_sequences,
    )
    if beams.num_beams > 1:
        if draft not in ("auto", "none", None):
            raise ValueError("draft was given, and a beam search verifies no drafts: leave out draft or num_beams")
        found = BeamSearch(model, prompts, state, params, beams=beams, **changes).best(return_ids)
        return found[0] if single else found
    params = sampling_params(params, changes).compiled(model, prompts[0] if are_messages(prompt) else None)
    generation = Generation(model, prompts, state, params, draft=draft)
    for _ in generation:
        pass
    answers: list[Any] = generation.ids if return_ids else generation.texts
    given = answers[0] if single else answers
    if generation.params.logprobs is None:
        return given
    return given, generation.logprobs[0] if single else generation.logprobs


def stream(
    model: LanguageModel,
    prompt: Prompt,
    state: State | None = None,
    params: Sampler | None = None,
    *,
    draft: DraftChoice = "auto",
    **changes: Any,
) -> Iterator[str]:
    """`generate` for one prompt, piece by piece: the pieces joined are what `generate` returns.

    A piece never ends inside a character, and text that may still become a stop string waits until that is known.
    Arguments are checked here and now; the prompt is fed when the first piece is asked for. For several prompts iterate
    over a `Generation`.
    """
    prompts, single = as_token_lists(model.tokenizer, prompt, state)
    if not single:
        raise ValueError(
            f"stream gives the pieces of one prompt, and this is a list of {len(prompts)}: iterate over "
            "lmstate.generation.Generation, whose pieces name their row, or use generate"
        )
    params = sampling_params(params, changes).compiled(model, prompts[0] if are_messages(prompt) else None)
    return _texts(Generation(model, prompts, state, params, draft=draft))


def _texts(generation: Generation) -> Iterator[str]:
    for piece in generation:
        yield piece.text
