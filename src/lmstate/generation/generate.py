"""The generation loop. There is one: `generate`, `stream` and the command line all run a `Generation`.

What the state holds afterwards, for every row: what it held, the prompt, and the tokens of the answer.
- The last token of an answer is handed over with `state.queue`: it counts as seen, and the next call computes it
  together with whatever comes then, so that no forward is spent on logits that nobody may ask for.
- An end-of-sequence token ends the answer and is neither in the text nor in the state. A chat's next turn begins with
  the template's own closing of the turn (`<|im_end|>` and a newline, say), and plain text continued has none inside.
- A stop string is not in the text, and the state is rewound to the last token wholly before it.
- Closing the iterator early keeps every token whose piece was given out. An exception (Ctrl-C, a full state) leaves the
  state at the last token that was computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, NamedTuple

from lmstate.errors import CapacityError, PendingError
from lmstate.generation.answer import CONTEXT, Answer, Finish
from lmstate.generation.prompts import Prompt, as_token_lists
from lmstate.generation.protocol import LanguageModel
from lmstate.generation.sampling import Sampler, TokenPicker
from lmstate.generation.stopping import as_stops
from lmstate.state.validate import token_ids, whole_number

if TYPE_CHECKING:
    from lmstate.state import State

MAX_NEW_TOKENS = 256


class Piece(NamedTuple):
    """Text that a row's answer grew by."""

    row: int
    text: str


@dataclass(frozen=True)
class Report:
    """Statistics of a generation, summed over the rows. Seconds exclude the time that the caller held the iterator."""

    fed: int  # tokens computed before the first one: the prompt, and what the state had queued
    reused: int  # tokens that the state had computed before
    generated: int  # tokens of the answers
    prefill_seconds: float  # the prompt's forward, up to the first token
    decode_seconds: float  # the steps after it
    decoded: int  # tokens that those steps gave
    finished: tuple[Finish | None, ...]  # why each row ended; None: it has not, or was interrupted

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second after the first; 0.0 where there was no second."""
        return self.decoded / self.decode_seconds if self.decode_seconds else 0.0

    @property
    def fed_per_second(self) -> float:
        return self.fed / self.prefill_seconds if self.prefill_seconds else 0.0


class Generation:
    """One run of a model on a batch of prompts: iterate for the pieces; `texts` and `report()` at any time.

    prompts: one list of token ids per row of `state`; an empty one continues a row that holds tokens already.
    Raises ValueError for options out of range, prompts that do not fit the state, and an empty prompt on an empty row;
    PendingError if the state awaits a verdict; while iterating, CapacityError when the state is full.
    """

    def __init__(
        self,
        model: LanguageModel,
        prompts: Sequence[Sequence[int]],
        state: State | None = None,
        *,
        sampler: Sampler | None = None,
        max_new_tokens: int = MAX_NEW_TOKENS,
        stop: str | Sequence[str] = (),
    ) -> None:
        max_new_tokens = whole_number(max_new_tokens, "max_new_tokens")
        if max_new_tokens < 0:
            raise ValueError(f"max_new_tokens is {max_new_tokens}; it must be 0 or more")
        self.model = model
        self.state = model.new_state(rows=len(prompts)) if state is None else state
        self.prompts = [token_ids(prompt, f"prompt {row}") for row, prompt in enumerate(prompts)]
        self.max_new_tokens = max_new_tokens
        stops = as_stops(stop)
        self._check_prompts()
        # What was queued by an earlier call, or rewound past the window, is computed together with the prompt.
        queued = sum(self.state.rewind_cost(row, length) for row, length in enumerate(self.state.lengths))
        self._fed = queued + sum(map(len, self.prompts))
        self._reused = sum(self.state.lengths) - queued
        self._answers = [
            Answer(model.tokenizer.stream(), stops, before=[*self.state.tokens(row)[-CONTEXT:], *prompt])
            for row, prompt in enumerate(self.prompts)
        ]
        self._picker = TokenPicker(sampler or Sampler(), len(self.prompts))
        self._last: dict[int, int] = {}  # the newest token of rows that go on: given out, not yet computed
        self._seconds = [0.0, 0.0]  # prefill, decode
        self._first_tokens = 0

    @property
    def texts(self) -> list[str]:
        return [answer.text for answer in self._answers]

    def report(self) -> Report:
        generated = sum(len(answer.tokens) for answer in self._answers)
        return Report(
            fed=self._fed,
            reused=self._reused,
            generated=generated,
            prefill_seconds=self._seconds[0],
            decode_seconds=self._seconds[1],
            decoded=generated - self._first_tokens,
            finished=tuple(answer.finished for answer in self._answers),
        )

    def __iter__(self) -> Iterator[Piece]:
        if self.max_new_tokens == 0:
            self._prefill_only()
            return
        self._remember_seen()
        feed = self.prompts
        active = list(range(len(feed)))
        phase = 0
        try:
            while active:
                pieces = self._step(feed, active, phase)
                yield from pieces
                active = [row for row in active if self._answers[row].finished is None]
                feed = [[self._last[row]] if row in self._last else [] for row in range(len(feed))]
                phase = 1
        except GeneratorExit:
            for row, token in self._last.items():
                with suppress(CapacityError):  # a full state: it ends one token earlier
                    self.state.queue(row, [token])
            raise

    def _step(self, feed: list[list[int]], active: list[int], phase: int) -> list[Piece]:
        """One forward and one token for every active row."""
        begin = perf_counter()
        logits = self.model(feed, self.state)  # [R, V]
        assert logits is not None
        self._last.clear()
        if len(active) < len(feed):
            logits = logits[active]
        pieces = []
        for row, token in zip(active, self._picker.pick(logits, active)):
            text = self._take(row, token)
            if text:
                pieces.append(Piece(row, text))
        self._seconds[phase] += perf_counter() - begin
        if phase == 0:
            self._first_tokens = sum(len(answer.tokens) for answer in self._answers)
        return pieces

    def _take(self, row: int, token: int) -> str:
        """Give one token to a row's answer; where that ends it, bring the state to what the answer stands for."""
        answer = self._answers[row]
        if token in self.model.eos_ids:
            text = answer.finish("eos")
            self._settle(row, computed=len(answer.tokens))
            return text
        text = answer.take(token)
        if answer.finished is None and len(answer.tokens) == self.max_new_tokens:
            text += answer.finish("length")
        if answer.finished is None:
            self._last[row] = token
        else:
            self._settle(row, computed=len(answer.tokens) - 1)
        return text

    def _settle(self, row: int, computed: int) -> None:
        """Make the row hold the `kept()` tokens of its answer; it holds the first `computed` of them now."""
        answer = self._answers[row]
        kept = answer.kept()
        if kept < computed:
            self.state.rewind(row, self.state.lengths[row] - (computed - kept))
        elif kept > computed:
            self.state.queue(row, answer.tokens[computed:kept])

    def _prefill_only(self) -> None:
        begin = perf_counter()
        self.model(self.prompts, self.state, logits="none")
        self._seconds[0] += perf_counter() - begin
        for answer in self._answers:
            answer.finish("length")

    def _remember_seen(self) -> None:
        if self._picker.sampler.repetition_penalty != 1.0:
            for row, prompt in enumerate(self.prompts):
                self._picker.see(row, self.state.tokens(row))
                self._picker.see(row, prompt)

    def _check_prompts(self) -> None:
        if any(self.state.pending):
            raise PendingError(
                f"cannot generate: the rows have {self.state.pending} pending tokens; call commit or discard first"
            )
        if len(self.prompts) != self.state.rows:
            raise ValueError(
                f"{len(self.prompts)} prompt(s) for a state of {self.state.rows} row(s): give one prompt for every row "
                "(an empty one continues what the row holds)"
            )
        for row, prompt in enumerate(self.prompts):
            if not prompt and not self.state.lengths[row]:
                raise ValueError(
                    f"the prompt of row {row} is empty and the row holds no tokens: there is nothing to continue"
                )


def generate(
    model: LanguageModel,
    prompt: Prompt,
    state: State | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
) -> str | list[str]:
    """The text that the model continues `prompt` with; for a list of prompts a list of texts, from one ragged batch.

    prompt          a text or a list of token ids; or a list of these: one prompt for each row
    state           continues it (one prompt per row) and leaves it as this module's docstring says; None: a fresh one
    max_new_tokens  at most this many tokens; 0 only feeds the prompt
    stop            text(s) that end the answer; nothing at or after them is returned
    The other options are those of `Sampler`; with one `seed` a row gives the same text whatever the other rows are.

    Raises ValueError for options out of range and empty prompts, CapacityError where the state is full.
    """
    prompts, single = as_token_lists(model.tokenizer, prompt, state)
    sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    generation = Generation(model, prompts, state, sampler=sampler, max_new_tokens=max_new_tokens, stop=stop)
    for _ in generation:
        pass
    return generation.texts[0] if single else generation.texts


def stream(
    model: LanguageModel,
    prompt: Prompt,
    state: State | None = None,
    max_new_tokens: int = MAX_NEW_TOKENS,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
    repetition_penalty: float = 1.0,
    stop: str | Sequence[str] = (),
    seed: int | None = None,
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
    sampler = Sampler(temperature, top_k, top_p, min_p, repetition_penalty, seed)
    generation = Generation(model, prompts, state, sampler=sampler, max_new_tokens=max_new_tokens, stop=stop)
    return _texts(generation)


def _texts(generation: Generation) -> Iterator[str]:
    for piece in generation:
        yield piece.text
