"""One answer of a request in the making: which token comes next, what text it gives, and whether it ends the answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmstate.engine.options import Grammar, Options
from lmstate.engine.results import Finished, Piece, TokenLogprob
from lmstate.errors import StateError
from lmstate.generation.answer import Answer, NoText
from lmstate.generation.sampling import TokenPicker

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
        self.grammar: Grammar | None = None if options.grammar is None else options.grammar.copy()
        self.answer = Answer(model.tokenizer.stream() if model.has_tokenizer else NoText(), options.stop, prompt)
        sampler = replace(options.sampler, seed=seed)
        self._picker = TokenPicker(sampler, rows=1, first=index)
        self._picker.see(0, prompt)
        self._ends = (frozenset() if options.ignore_eos else model.eos_ids) | options.stop_token_ids
        self._eos = model.eos_ids

    @property
    def plain(self) -> bool:
        """Whether its next token is the most likely one, whatever came before: then rows are picked together."""
        return self._picker.sampler.plain and self.grammar is None and not self._must_go_on

    def pick(self, logits: Tensor) -> int:
        """The next token. logits float32 `[V]`. Raises ModelError if they are not numbers."""
        barred = self._barred(logits)
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
            return None  # a log probability needs the logits before its token: then they come one by one
        text = ""
        fresh: list[int] = []
        for token in self.grammar.forced():
            if self.finished is not None:
                break
            self._picker.take(0, token)
            text += self._take(token, None, fresh)
        return self._piece(text, fresh) if fresh else None

    def end(self, why: Finished) -> Piece:
        """It ends here. Returns the text that was held back."""
        self.finished = why
        self.feed.clear()
        return self._piece(self.answer.finish("length"), [])

    def kept(self) -> int:
        """Number of tokens that lie wholly before the answer's end: all, or those before a stop string."""
        return self.answer.kept()

    # ---- the parts of it

    @property
    def _must_go_on(self) -> bool:
        return len(self.answer.tokens) < self.options.min_tokens

    def _barred(self, logits: Tensor) -> Tensor | None:
        """bool `[V]`: what must not come next; None if anything may."""
        allowed = None if self.grammar is None else self.grammar.allowed()
        barred = None if allowed is None else ~allowed.to(logits.device)
        if barred is not None and self.grammar is not None:
            barred[list(self._ends)] = not self.grammar.complete
        if self._must_go_on and self._ends:
            barred = torch.zeros_like(logits, dtype=torch.bool) if barred is None else barred
            barred[list(self._ends)] = True
        if barred is not None and bool(barred.all()):
            raise StateError("the grammar allows no token here: it is of another vocabulary, or at its end")
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
        if self.answer.finished == "stop":
            self.finished = "stop"
            self.stopped_by = self._stop_string()
        elif self.grammar is not None and self.grammar.ended:
            self.finished = "stop"
            text += self.answer.finish("stop")
        elif len(self.answer.tokens) >= self.options.max_new_tokens:
            self.finished = "length"
            text += self.answer.finish("length")
        self.feed.append(token)
        return text

    def _stop_string(self) -> str | None:
        scanner = self.answer._scanner
        ended = [stop for stop, matched in zip(scanner.stops, scanner._matched) if matched == len(stop)]
        return max(ended, key=len, default=None)

    def _piece(self, text: str, fresh: list[int]) -> Piece:
        told = self.logprobs[len(self.logprobs) - len(fresh) :] if self.options.logprobs is not None else None
        return Piece(text, self.index, fresh, told, self.finished)


def logprob(logits: Tensor, token: int, top: int) -> TokenLogprob:
    """Of a token, and of the `top` most likely ones, from logits float32 `[V]`."""
    values = logits.log_softmax(-1)
    if not top:
        return TokenLogprob(token, float(values[token]))
    best, ids = values.topk(min(top, len(values)))
    return TokenLogprob(token, float(values[token]), tuple(zip(ids.tolist(), best.tolist())))
