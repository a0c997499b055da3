"""One answer of a request in the making: which token comes next, what text it gives, and whether it ends the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmstate.engine.options import Options
from lmstate.engine.results import Finished, Piece, TokenLogprob
from lmstate.engine.thinking import Thinking, ThinkingFormat
from lmstate.errors import StateError
from lmstate.generation.answer import Answer, NoText
from lmstate.generation.grammar import NOTHING_ALLOWED, Grammar, admitted, forbidden
from lmstate.generation.sampling import TokenPicker
from lmstate.speculation.drafter import Draft

if TYPE_CHECKING:
    from lmstate.models.model import Model


class Choice:
    """Logits in, pieces out. `feed` are the tokens given out that the model has not read yet."""

    def __init__(self, model: Model, prompt: Sequence[int], options: Options, index: int, seed: int) -> None:
        self.index = index
        self.options = options
        self.feed: list[int] = []
        self.finished: Finished | None = None
        self.stopped_by: str | int | None = None
        self.logprobs: list[TokenLogprob] = []
        self.forced: tuple[int, ...] = ()  # tokens that the grammar leaves no choice about, not yet given out
        self._lost: Exception | None = None  # of a grammar that is no longer where the answer is
        self.drafted = self.accepted = 0  # tokens of drafts that were verified, and those that held
        self.grammar: Grammar | None = None if options.grammar is None else options.grammar.copy()
        stream = model.tokenizer.stream() if model.has_tokenizer else NoText()
        self.answer = Answer(stream, options.stop, prompt, options.min_tokens, options.include_stop_str_in_output)
        sampler = replace(options.sampler, seed=seed)
        self._picker = TokenPicker(sampler, rows=1, first=index)
        self._picker.see(0, prompt)
        self._ends = (frozenset() if options.ignore_eos else model.eos_ids) | options.stop_token_ids
        self._eos = model.eos_ids
        self._prompt = prompt
        self._thinking: Thinking | None = None
        if options.thinking is not None:
            self._thinking = Thinking(options.thinking, prompt, options.max_thinking_tokens)

    @property
    def plain(self) -> bool:
        """Whether its next token is the most likely one, whatever came before: then rows are picked together."""
        free = self.grammar is None and self._thinking is None and not self._must_go_on
        return self._picker.sampler.plain and free

    def pick(self, logits: Tensor) -> int:
        """The next token. logits float32 `[V]`. Raises ModelError if they are not numbers."""
        if self._lost is not None:
            raise self._lost
        if self.forced:
            token, self.forced = self.forced[0], self.forced[1:]
            self._picker.take_forced(0, token)
            return token
        barred = self._barred(logits)
        forced = None if self._thinking is None else self._thinking.forced()
        if forced is not None and (barred is None or not barred[forced]):
            self._picker.take(0, forced)
            return forced
        if barred is not None:
            logits = logits.masked_fill(barred, float("-inf"))
        return self._picker.pick(logits[None], [0])[0]

    def take(self, token: int, logits: Tensor) -> Piece:
        """The answer goes on with `token`, picked from `logits` float32 `[V]`. Returns what its reader gets."""
        fresh: list[int] = []
        text = self._take(token, logits, fresh)
        return self._piece(text, fresh)

    def force(self) -> Piece | None:
        """Take the tokens that the grammar leaves no choice about; None if there are none."""
        if self.finished is not None or self.grammar is None or self.options.logprobs is not None:
            return None  # a log probability needs the logits before its token: then they are drafts that hold
        text = ""
        fresh: list[int] = []
        for token in self.grammar.forced():
            if self.finished is not None:
                break
            self._picker.take_forced(0, token)
            text += self._take(token, None, fresh)
        return self._piece(text, fresh) if fresh else None

    def admitted(self, draft: Draft) -> Draft:
        """A draft up to the first token that may not come, with those in it that the grammar forces."""
        if self.grammar is None:
            return draft
        if self.forced:
            return Draft(self.forced)
        try:
            return admitted(self.grammar, draft, self._ends)
        except Exception as error:  # it could not be rolled back: `pick` ends the request
            self._lost = error
            return Draft()

    def end(self, why: Finished) -> Piece:
        """It ends here. Returns the text that was held back."""
        self.finished = why
        self.feed.clear()
        return self._piece(self.answer.finish("length"), [])

    def end_thinking(self, format: ThinkingFormat) -> None:
        """Have its thinking section end with the next token, if it is in one, or where one begins."""
        if self._thinking is None:
            self._thinking = Thinking(format, self._prompt, None)
            for token in self.answer.tokens:
                self._thinking.take(token)
        self._thinking.end()

    def kept(self) -> int:
        """Number of tokens that lie wholly before the answer's end: all, or those before a stop string."""
        return self.answer.kept()

    # ---- the parts of it

    @property
    def _must_go_on(self) -> bool:
        return len(self.answer.tokens) < self.options.min_tokens

    def _barred(self, logits: Tensor) -> Tensor | None:
        """bool `[V]`: what must not come next; None if anything may."""
        barred = None if self.grammar is None else forbidden(self.grammar, self._ends, logits.device)
        if self._must_go_on and self._ends:
            barred = torch.zeros_like(logits, dtype=torch.bool) if barred is None else barred
            barred[list(self._ends)] = True
        if barred is not None and bool(barred.all()):
            raise StateError(NOTHING_ALLOWED)
        return barred

    def _take(self, token: int, logits: Tensor | None, fresh: list[int]) -> str:
        if token in self._ends:
            self.finished = "eos" if token in self._eos and not self.options.ignore_eos else "stop"
            self.stopped_by = token
            return self.answer.finish("eos")
        if self.options.logprobs is not None and logits is not None:
            self.logprobs.append(logprob(logits, token, self.options.logprobs))
        fresh.append(token)
        text = self.answer.take(token)
        if self.grammar is not None:
            self.grammar.accept(token)
            if self.options.logprobs is not None and not self.forced:
                self.forced = tuple(self.grammar.forced())
        if self._thinking is not None:
            self._thinking.take(token)
        if self.answer.finished == "stop":
            self.finished = "stop"
            self.stopped_by = self.answer.stop
        elif self.grammar is not None and self.grammar.ended:
            self.finished = "stop"
            text += self.answer.finish("stop")
        elif len(self.answer.tokens) >= self.options.max_new_tokens:
            self.finished = "length"
            text += self.answer.finish("length")
        self.feed.append(token)
        return text

    def _piece(self, text: str, fresh: list[int]) -> Piece:
        told = self.logprobs[len(self.logprobs) - len(fresh) :] if self.options.logprobs is not None else None
        return Piece(text, self.index, fresh, told, self.finished, self.answer.certain())


def logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Of a token, and of the `top` most likely ones, from logits float32 `[V]`."""
    values = logits.log_softmax(-1)
    if not top:
        return TokenLogprob(token, float(values[token]))
    best, ids = values.topk(min(top, len(values)))
    return TokenLogprob(token, float(values[token]), tuple(zip(ids.tolist(), best.tolist())))
