"""Compilation of grammars to masks over a vocabulary, by llguidance. It is bounded in work and in memory."""

from __future__ import annotations

import re
from collections import OrderedDict
from functools import cached_property
from itertools import takewhile
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmstate.errors import GrammarError
from lmstate.text.grammars.lark import ANYTHING, MISSING, quoted

if TYPE_CHECKING:
    import llguidance

    from lmstate.text.thinking import ThinkingMarkers
    from lmstate.text.tokenizer import Tokenizer

MAX_SOURCE = 2**18  # characters of a schema or grammar
MAX_COMPILED = 64  # grammars that are kept
LIMITS: dict[str, Any] = {"max_grammar_size": 100_000, "max_lexer_states": 50_000, "verbose_errors": False}


class TokenGrammar:
    """One answer's place in a grammar, as the engine asks for it. `lark`: the text that it was compiled from."""

    def __init__(
        self, matcher: llguidance.LLMatcher, tokenizer: llguidance.LLTokenizer, vocab_size: int, lark: str
    ) -> None:
        self._matcher, self._tokenizer = matcher, tokenizer
        self._vocab, self.lark = vocab_size, lark

    def allowed(self) -> Tensor | None:
        """Bool `[V]`: the tokens that may come next."""
        packed = torch.frombuffer(bytearray(self._matcher.compute_bitmask()), dtype=torch.uint8)  # [ceil(V / 8)]
        self._check()
        bits = (packed[:, None] >> torch.arange(8, dtype=torch.uint8)) & 1
        return self._as_text(bits.flatten()[: self._vocab].bool())

    def _as_text(self, allowed: Tensor) -> Tensor:
        """`allowed`, or where the only token in it is wrong, the one that begins the text that must come.

        llguidance encodes such a text by itself: one that is written like a control token becomes that token, which its
        grammar has no place for.
        """
        if allowed.count_nonzero() != 1 or self._matcher.validate_tokens([int(allowed.int().argmax())]):
            return allowed
        begin = self._tokenizer.tokenize_bytes(self._matcher.compute_ff_bytes()[:1])
        if self._matcher.validate_tokens(begin):
            allowed = torch.zeros_like(allowed)
            allowed[begin[0]] = True
        return allowed

    def accept(self, token: int) -> None:
        if not self._matcher.consume_token(token):
            self._check()

    def rollback(self, count: int) -> None:
        if count and not self._matcher.rollback(count):
            self._check()

    def copy(self) -> TokenGrammar:
        return TokenGrammar(self._matcher.deep_copy(), self._tokenizer, self._vocab, self.lark)

    @property
    def complete(self) -> bool:
        """Whether the text may end here."""
        return self._matcher.is_accepting()

    @property
    def ended(self) -> bool:
        """Whether nothing may follow but the end."""
        return self._matcher.is_stopped()

    def forced(self) -> list[int]:
        """Tokens that must come now, for there is no choice."""
        tokens = self._matcher.compute_ff_tokens()
        valid = tokens[: self._matcher.validate_tokens(tokens)]  # see `_as_text`
        return list(takewhile(lambda token: token < self._vocab, valid))

    def _check(self) -> None:
        if self._matcher.is_error():
            message = f"the constraint is too complex to follow: {reason_of(self._matcher.get_error())}"
            raise GrammarError(message)


class GrammarCompiler:
    """Compiles grammars for one tokenizer. Thread-safe; compiled grammars are kept for the next request.

    Raises `GrammarError` for a grammar that is wrong, unsupported or too large.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab_size
        self._special = tokenizer.special_ids
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()

    def with_reasoning(self, lark: str, markers: ThinkingMarkers, opened: bool) -> str:
        """A grammar after reasoning: `opened` if the prompt began it, else it may come or not."""
        closing = self.literal(markers.end)
        if closing.startswith("<["):
            think = f"reasoning: {ANYTHING} {closing} SPACE?"
        else:
            think = f"reasoning: thinking SPACE?\nthinking[suffix={quoted(markers.end)}]: {ANYTHING}"
        start = self.literal(markers.token or markers.start)
        if markers.token:
            start += f" {quoted(markers.start.removeprefix(markers.token))}"
        first = "reasoning" if opened else f"({start} reasoning)?"
        answer = lark.replace("start:", "answer:", 1)
        return f"start: {first} answer\n{think}\nSPACE: /[ \\n]+/\n{answer}"

    def literal(self, text: str) -> str:
        """A marker as a term of Lark: a special token by its number, else its text."""
        token = self._tokenizer.id_of(text)
        return f"<[{token}]>" if token is not None and token in self._special else quoted(text)

    def knows(self, lark: str) -> bool:
        """Whether a grammar was compiled already, and is kept."""
        with self._lock:
            return lark in self._compiled

    def compile(self, lark: str, param: str) -> TokenGrammar:
        """The grammar at its beginning. Takes milliseconds; seconds at most for what the limits just allow."""
        check_length(lark, param)
        with self._lock:
            if (known := self._compiled.get(lark)) is not None:
                self._compiled.move_to_end(lark)
                return TokenGrammar(known.deep_copy(), self._inner, self._vocab, lark)
        matcher = self._matcher(lark)
        if matcher.is_error():
            raise GrammarError(f"{param} cannot be used as a constraint: {reason_of(matcher.get_error())}", param)
        with self._lock:
            self._compiled[lark] = matcher.deep_copy()
            while len(self._compiled) > MAX_COMPILED:
                self._compiled.popitem(last=False)
        return TokenGrammar(matcher, self._inner, self._vocab, lark)

    def _matcher(self, lark: str) -> llguidance.LLMatcher:
        tokenizer = self._inner
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS)
        return LLMatcher(tokenizer, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, special ones as their text."""
        return self._inner.decode_bytes([token])

    @property
    def _ids(self) -> int:
        """Number of token ids: some tokenizers have marks past the vocabulary, which no answer has."""
        return max(self._vocab, self._tokenizer.vocab_size)

    @cached_property
    def _inner(self) -> llguidance.LLTokenizer:
        try:
            from llguidance import LLTokenizer
        except ModuleNotFoundError:
            raise ImportError(MISSING) from None
        ends = sorted(self._tokenizer.eos_ids) or None
        return LLTokenizer(self._tokenizer.to_json(), n_vocab=self._ids, eos_token=ends)


def check_length(lark: str, param: str) -> None:
    if len(lark) > MAX_SOURCE:
        raise GrammarError(f"{param} has {len(lark)} characters; at most {MAX_SOURCE} are compiled", param)


def reason_of(message: str) -> str:
    """The reason in an error of llguidance, in one line: without the grammar and the marks below it."""
    lines = (line.strip() for line in re.split(r"\n +\d+ \| ", message)[0].splitlines())
    return " ".join(line for line in lines if line.strip("^"))[:500]
