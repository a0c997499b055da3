"""One answer in the making: which token comes next, what text it gives, and whether it ends the answer."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Literal, Protocol

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import StateError
from lmstate.generation.grammar import NOTHING_ALLOWED, Grammar, admitted, forbidden
from lmstate.generation.logprobs import TokenLogprob, logprob
from lmstate.generation.params import SamplingParams
from lmstate.generation.sampling import TokenPicker
from lmstate.generation.stopping import StopScanner
from lmstate.generation.thinking import Thinking, ThinkingFormat
from lmstate.language_model import LanguageModel
from lmstate.speculation.drafter import Draft

CONTEXT = 32  # tokens of the prompt that the text of an answer can depend on: a space, or a run of bytes
Finish = Literal["eos", "stop", "length", "capacity", "cancelled", "deadline"]


class TextLike(Protocol):
    """A stream of the text of tokens, as `Tokenizer.stream` gives."""

    def push(self, token: int) -> str: ...

    def flush(self) -> str: ...

    def follow(self, tokens: Iterable[int]) -> None: ...


class NoText:
    """The text stream of a model without a tokenizer: nothing."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""

    def follow(self, tokens: Iterable[int]) -> None:
        """Nothing follows from them."""


class AnswerText:
    """Tokens in, text out. `text` is all that `take` and `finish` have returned so far.

    `before` are the tokens that the answer follows: a token's text can depend on its left neighbors (some tokenizers
    drop a space at the beginning of a text, and a character can span tokens). A stop string that is complete within
    the first `min_tokens` ends nothing; with `include_stop` the one that ends the text is the end of it.
    """

    def __init__(
        self,
        stream: TextLike,
        stops: Sequence[str],
        before: Sequence[int] = (),
        min_tokens: int = 0,
        include_stop: bool = False,
    ) -> None:
        stream.follow(before[-CONTEXT:])
        self.tokens: list[int] = []
        self._whole = False  # the answer ended, and no stop string cut it
        self._stream = stream
        self._scanner = StopScanner(stops, include_stop)
        self._min_tokens = min_tokens
        self._ends: list[int] = []  # characters of text after each token
        self._characters = 0
        self._pieces: list[str] = []

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    @property
    def stop(self) -> str | None:
        """The stop string that ended it."""
        return self._scanner.found

    def take(self, token: int) -> str:
        """One more token. Returns the text that is certain now: whole characters, none that may yet be cut off."""
        self.tokens.append(token)
        piece = self._stream.push(token)
        self._characters += len(piece)
        self._ends.append(self._characters)
        return self._scan(piece)

    def finish(self) -> str:
        """The answer ends here. Returns the text held back until now."""
        piece = self._scan(self._stream.flush())
        if self.stop is not None:
            return piece
        self._whole = True
        rest = self._scanner.flush()
        self._pieces.append(rest)
        return piece + rest

    def take_back(self, pieces: Sequence[str], count: int) -> None:
        """The last `count` tokens never came, nor the text in these pieces, the last ones that were returned."""
        left = len(self.tokens) - count
        del self.tokens[left:], self._ends[left:]
        text = self.text
        self._pieces = [text[: len(text) - sum(map(len, pieces))]]
        self._whole = False

    def kept(self) -> int:
        """Number of `tokens` that the state is to hold: all, or those wholly before where a stop string cuts the text.

        Tokens at the edge without text of their own go too: they may be the first bytes of the stop string's character.
        """
        if self._scanner.cut is None:
            return len(self.tokens)
        count = bisect_right(self._ends, self._scanner.cut)
        while count and self._ends[count - 1] == (self._ends[count - 2] if count > 1 else 0):
            count -= 1
        return count

    def certain(self) -> int:
        """Number of `tokens` that begin in the text for certain: all of them, once it ended without a stop string.

        Tokens without text of their own wait for the next one: they may be the first bytes of the stop string.
        """
        scanner, count = self._scanner, len(self.tokens)
        if not scanner.stops or self._whole:
            return count
        # Each token begins where the one before it ends.
        return min(bisect_left(self._ends, scanner.certain) + 1, count) if scanner.certain else 0

    def _scan(self, piece: str) -> str:
        certain = self._scanner.push(piece, len(self.tokens) > self._min_tokens) if piece else ""
        if certain:
            self._pieces.append(certain)
        return certain


class AnswerRow:
    """Logits in, text out, for one answer.

    feed    tokens given out that the model has not read yet
    forced  tokens that the grammar leaves no choice about, not yet given out: drafts that hold

    before  the tokens that the row holds ahead of the answer
    index   number of the random stream, where several answers share a seed
    """

    def __init__(self, model: LanguageModel, params: SamplingParams, before: Sequence[int], index: int, seed: int):
        self.index = index
        self.params = params
        self.feed: list[int] = []
        self.forced: tuple[int, ...] = ()
        self.finished: Finish | None = None
        self.stopped_by: str | int | None = None
        self.logprobs: list[TokenLogprob] = []
        self.drafted = self.accepted = 0  # tokens of drafts that were verified, and those that held
        assert not isinstance(params.grammar, str), "`SamplingParams.compiled` comes first"
        self._grammar: Grammar | None = None if params.grammar is None else params.grammar.copy()
        self._lost: Exception | None = None  # of a grammar that is no longer where the answer is
        stream = model.tokenizer.stream() if model.has_tokenizer else NoText()
        self._text = AnswerText(stream, params.stops, before, params.min_tokens, params.include_stop_str_in_output)
        self._picker = TokenPicker(replace(params, seed=seed), rows=1, first=index)
        self._picker.see(0, before)
        self._eos = frozenset() if params.ignore_eos else model.eos_ids
        self._ends = params.ends(model.eos_ids)
        self._before = before
        self._vocab_size = model.config.vocab_size
        self._thinking: Thinking | None = None
        if params.max_thinking_tokens is not None:
            self._thinking = Thinking(ThinkingFormat.of(model.tokenizer), before, params.max_thinking_tokens)

    @property
    def tokens(self) -> list[int]:
        """The answer's tokens as they were chosen, those of a stop string too."""
        return self._text.tokens

    @property
    def text(self) -> str:
        return self._text.text

    @property
    def grammatical(self) -> bool:
        """Whether the answer follows a grammar."""
        return self._grammar is not None

    @property
    def over(self) -> bool:
        """Whether the answer has ended."""
        return self.finished is not None

    # ---- choosing

    @property
    def plain(self) -> bool:
        """Whether its next token is the most likely one, whatever came before: then rows are picked together."""
        free = self._grammar is None and self._thinking is None and not self._must_go_on
        return self._picker.sampler.plain and free

    def pick(self, logits: Tensor) -> int:
        """The next token. logits float32 `[V]`. Raises ModelError if they are not numbers."""
        if self._lost is not None:
            raise self._lost
        if self.forced:
            token, self.forced = self.forced[0], self.forced[1:]
            self._picker.take_forced(0, token)
            return token
        if (ending := self._ending(logits)) is not None:
            self._picker.take(0, ending)
            return ending
        return self._picker.pick(_without(logits, self._barred(logits))[None], [0])[0]

    def distribution(self, logits: Tensor) -> Tensor:
        """The distribution that `pick` draws from: float64 `[V]`, from logits `[V]`."""
        if self.forced:
            certain = torch.zeros(logits.shape[-1], dtype=torch.float64, device=logits.device)
            certain[self.forced[0]] = 1.0
            return certain
        return self._picker.distribution(_without(logits, self._barred(logits)), 0)

    def uniform(self) -> float:
        """A number in 0..1 from the row's random stream."""
        return self._picker.uniform(0)

    def scored(self, at: int, logits: Tensor) -> TokenLogprob:
        """The log probability of an answered token, from the logits in front of it, which were made again."""
        assert self.params.logprobs is not None
        if self.params.allowed_logprobs:
            assert not isinstance(self.params.grammar, str)
            if (grammar := self.params.grammar) is not None:
                grammar = grammar.copy()
                for token in self.tokens[:at]:
                    grammar.accept(token)
            logits = self._allowed(logits, grammar)
        return logprob(logits, self.tokens[at], self.params.logprobs)

    def chosen(self, token: int) -> None:
        """The answer goes on with this token, which `pick` did not choose."""
        self.forced = self.forced[1:]
        self._picker.take(0, token)

    def admitted(self, draft: Draft) -> Draft:
        """A draft up to the first token that may not come, with those in it that the grammar forces."""
        if self._grammar is None:
            return draft
        if self.forced:
            return Draft(self.forced)
        try:
            return admitted(self._grammar, draft, self._ends)
        except Exception as error:  # it could not be rolled back: `pick` ends the answer
            self._lost = error
            return Draft()

    # ---- going on

    def replay(self, tokens: Sequence[int]) -> None:
        """Take the tokens that this answer began with elsewhere: it goes on as it did there.

        Each uses up what it used up there: a random number, its place in the grammar and in the thinking section. The
        last one is to be read. Raises StateError for tokens that cannot be this answer's.
        """
        for token in tokens:
            if self.over:
                raise StateError(f"answered tokens go on after the answer ended ({self.finished})")
            if self.forced:
                expected, self.forced = self.forced[0], self.forced[1:]
                self._picker.take_forced(0, token)
            elif (ending := self._ending(torch.zeros(self._vocab_size))) is not None:
                expected = ending
                self._picker.take(0, token)
            else:
                expected = token
                self._picker.take_forced(0, token)
            if token != expected or token in self._ends:
                raise StateError(
                    f"token {token} was answered, which cannot come there: give the tokens as they were sent"
                )
            self._take(token, None, keep_forced=True)
        del self.feed[:-1]

    def take(self, token: int, logits: Tensor) -> str:
        """The answer goes on with `token`, chosen from `logits` float32 `[V]`. Returns the text that it grew by."""
        return self._take(token, logits, keep_forced=True)

    def force(self) -> tuple[str, list[int]]:
        """Take the tokens that the grammar leaves no choice about. Returns (text, tokens)."""
        fresh, text = self.forced, ""
        self.forced = ()
        at = len(self.tokens)
        for token in fresh:
            if self.finished is not None:
                break
            self._picker.take_forced(0, token)
            text += self._take(token, None, keep_forced=False)
        return text, self.tokens[at:]

    def end(self, why: Finish) -> str:
        """It ends here. Returns the text that was held back."""
        self.finished = why
        self.feed.clear()
        return self._text.finish()

    def end_thinking(self, format: ThinkingFormat) -> None:
        """Have its thinking section end with the next token, if it is in one, or where one begins."""
        if self._thinking is None:
            self._thinking = Thinking(format, self._before, None)
            for token in self.tokens:
                self._thinking.take(token)
        self._thinking.end()

    def take_back(self, pieces: Sequence[str]) -> None:
        """The last tokens were never given: those that returned these pieces. The answer is over."""
        without = isinstance(self.stopped_by, int) or self.finished == "capacity"  # the last piece is of no token
        count = len(pieces) - without
        self._text.take_back(pieces, count)
        del self.logprobs[len(self.tokens) :]
        self.finished = self.stopped_by = None

    def kept(self) -> int:
        """Number of tokens that are wholly before the answer's end: all, or those before a stop string."""
        return self._text.kept()

    def certain(self) -> int:
        """Number of tokens that begin in the text for certain: all of them, once it ended without a stop string."""
        return self._text.certain()

    # ---- the parts of it

    @property
    def _must_go_on(self) -> bool:
        return len(self.tokens) < self.params.min_tokens

    def _ending(self, logits: Tensor) -> int | None:
        """The token that has to come next to end the thinking section, unless it must not."""
        ending = None if self._thinking is None else self._thinking.forced()
        if ending is None or ((barred := self._barred(logits)) is not None and barred[ending]):
            return None
        return ending

    def _allowed(self, logits: Tensor, grammar: Grammar | None) -> Tensor:
        """The logits `[V]` of what may come where a grammar is, and -inf."""
        barred = None if grammar is None else forbidden(grammar, self._ends, logits.device)
        allowed = logits.clone() if barred is None else _without(logits, barred)
        self.params.bar_words(allowed)
        return allowed

    def _barred(self, logits: Tensor) -> Tensor | None:
        """bool `[V]`: what must not come next; None if anything may."""
        barred = None if self._grammar is None else forbidden(self._grammar, self._ends, logits.device)
        if self._must_go_on and self._ends:
            barred = torch.zeros_like(logits, dtype=torch.bool) if barred is None else barred
            barred[list(self._ends)] = True
        if barred is not None and bool(barred.all()):
            raise StateError(NOTHING_ALLOWED)
        return barred

    def _take(self, token: int, logits: Tensor | None, keep_forced: bool) -> str:
        if token in self._ends:
            self.finished = "eos" if token in self._eos else "stop"
            self.stopped_by = token
            return self._text.finish()
        if self.params.logprobs is not None and logits is not None:
            allowed = self._allowed(logits, self._grammar) if self.params.allowed_logprobs else logits
            self.logprobs.append(logprob(allowed, token, self.params.logprobs))
        text = self._text.take(token)
        if self._grammar is not None:
            self._grammar.accept(token)
            if keep_forced and not self.forced:
                self.forced = tuple(self._grammar.forced())
        if self._thinking is not None:
            self._thinking.take(token)
        if self._text.stop is not None:
            self.finished, self.stopped_by = "stop", self._text.stop
        elif self._grammar is not None and self._grammar.ended:
            self.finished = "stop"
            text += self._text.finish()
        elif len(self.tokens) >= self.params.max_new_tokens:
            self.finished = "length"
            text += self._text.finish()
        self.feed.append(token)
        return text


def most_likely(logits: Tensor, rows: Sequence[int]) -> list[list[int | None]]:
    """The most likely tokens of each of these rows of float32 `[R, T, V]`; None where the logits are not numbers."""
    if not rows:
        return []
    here = logits if [*rows] == [*range(len(logits))] else logits[list(rows)]
    values, ids = ops.argmax(here.flatten(0, 1))
    tokens = [token if right else None for token, right in zip(ids.tolist(), (values > -torch.inf).tolist())]
    width = here.shape[1]
    return [tokens[at : at + width] for at in range(0, len(tokens), width)]


def _without(logits: Tensor, barred: Tensor | None) -> Tensor:
    return logits if barred is None else logits.masked_fill(barred, float("-inf"))
