"""Structured output: JSON schemas, regular expressions and grammars as masks over the vocabulary, by llguidance.

Compiling is bounded in work and in memory; what a schema asks and the library lacks is an error that says so.
"""

from __future__ import annotations

import asyncio
import re
from collections import OrderedDict
from collections.abc import Sequence
from functools import cached_property
from threading import Lock
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lmstate.serve.answer.compile_check import CompileCheck, TooCostly
from lmstate.serve.answer.schema_bounds import check_pattern, check_schema
from lmstate.serve.tools import Tool, ToolFormat
from lmstate.serve.tools.base import json_term, quoted
from lmstate.serve.wire.errors import ApiError

if TYPE_CHECKING:
    import llguidance

    from lmstate.text.thinking import ThinkingMarkers
from lmstate.text.tokenizer import Tokenizer

SOURCE = 2**18  # characters of a schema or grammar
KEPT = 64  # compiled grammars
LIMITS: dict[str, Any] = {"max_grammar_size": 100_000, "max_lexer_states": 50_000, "verbose_errors": False}
ANYTHING = r"/(.|\n)*/"
# Classes of a pattern that are ASCII's in JSON schemas and in other servers, and Unicode's in llguidance; and the slash
# that would end the pattern.
ESCAPES = {
    "/": r"\/",
    r"\d": "[0-9]",
    r"\D": "[^0-9]",
    r"\w": "[0-9A-Za-z_]",
    r"\W": "[^0-9A-Za-z_]",
}


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
        return list(tokens[: self._matcher.validate_tokens(tokens)])  # see `_as_text`

    def _check(self) -> None:
        if self._matcher.is_error():
            message = f"the constraint is too complex to follow: {reason_of(self._matcher.get_error())}"
            raise ApiError(message, code="unsupported_grammar")


class Grammars:
    """Compiles grammars for one tokenizer. Thread-safe; what was compiled is kept for the next request.

    Raises `ApiError` for a grammar that is wrong, unsupported or too large.
    """

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self._tokenizer = tokenizer
        self._vocab = vocab_size
        self._special = tokenizer.special_ids
        self._compiled: OrderedDict[str, llguidance.LLMatcher] = OrderedDict()
        self._lock = Lock()
        self._costs = CompileCheck(self._helper_settings)

    def json_object(self) -> str:
        return self.json_schema({"type": "object"}, "response_format")

    def json_schema(self, schema: Any, param: str, strict: bool = True) -> str:
        """The grammar of JSON that fits a schema; unless `strict`, as far as it can be followed."""
        check_schema(schema, param, strict)
        return f"start: {json_term(schema, strict)}"

    def regex(self, pattern: str, param: str) -> str:
        check_pattern(pattern, param)
        # A slash may come escaped already, as in patterns of JavaScript.
        escaped = re.sub(r"\\.|/", lambda found: ESCAPES.get(found[0], found[0]), pattern, flags=re.DOTALL)
        return f"start: /{escaped}/"

    def words(self, words: Sequence[str]) -> str:
        """One of several texts."""
        return "start: " + " | ".join(map(quoted, words))

    def calls(self, format: ToolFormat, tools: Sequence[Tool], *, required: bool, parallel: bool) -> str | None:
        """The grammar of an answer with calls: at least one if `required`, else text and perhaps calls after it (or
        instead of it, in formats whose answers are one or the other).

        None for the second where the format has no marker that tells the two apart.
        """
        for tool in tools:
            check_schema(tool.schema, tool.param, tool.strict)
        rules = format.rules(tools, self.literal)
        more = f"({rules.between} call)*" if parallel else ""
        if required:
            return "\n".join((f"start: {rules.begin} call {more} {rules.end}", *rules.lines))
        if rules.text:
            start = f"start: {format.head(self.literal)} TEXT | {rules.begin} call {more} {rules.end}"
            return "\n".join((start, f"TEXT: {rules.text}", *rules.lines))
        trigger = self.literal(rules.trigger)
        if trigger.startswith("<["):
            calls = f"calls: {rules.begin} call {more} {rules.end}"
            return "\n".join(("start: TEXT? calls?", f"TEXT: {ANYTHING}", calls, *rules.lines))
        # Text runs up to the trigger and takes it along: the first call goes on from there.
        call = next(line for line in rules.lines if line.startswith("call: "))
        if rules.begin.startswith(trigger):
            first = f"first: {rules.begin.removeprefix(trigger)} call"
        elif call.startswith(f"call: {trigger} "):
            first = call.replace(f"call: {trigger}", "first:", 1)
        else:
            return None
        lead = f"lead[lazy]: TEXT {trigger}"
        start = f"start: TEXT | lead first {more} {rules.end}"
        return "\n".join((start, f"TEXT: {ANYTHING}", lead, first, *rules.lines))

    def no_calls(self, format: ToolFormat, tools: Sequence[Tool]) -> str:
        """The grammar of an answer that is text, though the model was shown these tools."""
        rules = format.rules(tools, self.literal)
        text = rules.text
        if not text:
            marker = re.escape(rules.trigger).replace("/", r"\/")
            # A special token is in no text.
            special = self.literal(rules.trigger).startswith("<[")
            text = ANYTHING if special else f"{ANYTHING} & ~/(.|\\n)*{marker}(.|\\n)*/"
        return f"start: {format.head(self.literal)} TEXT?\nTEXT: {text}"

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

    async def compile_checked(self, lark: str, param: str, tools: Sequence[Tool] = ()) -> TokenGrammar:
        """The grammar at its beginning, compiled off the loop, after a trial where its cost may be large.

        Cancelling it ends the trial.
        """
        check_length(lark, param)
        with self._lock:
            known = lark in self._compiled
        if not known:
            try:
                await self._costs.check(lark, own=not param.endswith(("regex", "pattern")))
            except TooCostly:
                raise ApiError(
                    f"{param} takes too much time or memory to be compiled as a constraint: make it simpler",
                    param=param,
                    code="unsupported_grammar",
                ) from None
        return await asyncio.to_thread(self.compile, lark, param, tools)

    async def close(self) -> None:
        await self._costs.close()

    def _helper_settings(self) -> dict[str, Any]:
        ends = sorted(self._tokenizer.eos_ids)
        return {"tokenizer": self._tokenizer.to_json(), "vocab": self._vocab, "ends": ends, "limits": LIMITS}

    def compile(self, lark: str, param: str, tools: Sequence[Tool] = ()) -> TokenGrammar:
        """The grammar at its beginning. Takes milliseconds; seconds at most for what the limits just allow.

        An error names `param`, or the schema that is at fault of one of the `tools` in the grammar.
        """
        check_length(lark, param)
        with self._lock:
            if (known := self._compiled.get(lark)) is not None:
                self._compiled.move_to_end(lark)
                return TokenGrammar(known.deep_copy(), self._inner, self._vocab, lark)
        matcher = self._matcher(lark)
        if matcher.is_error():
            for tool in tools:
                if (alone := self._matcher(self.json_schema(tool.schema, tool.param, tool.strict))).is_error():
                    matcher, param = alone, tool.param
                    break
            message = reason_of(matcher.get_error())
            raise ApiError(
                f"{param} cannot be used as a constraint: {message}", param=param, code="unsupported_grammar"
            )
        with self._lock:
            self._compiled[lark] = matcher.deep_copy()
            while len(self._compiled) > KEPT:
                self._compiled.popitem(last=False)
        return TokenGrammar(matcher, self._inner, self._vocab, lark)

    def _matcher(self, lark: str) -> llguidance.LLMatcher:
        from llguidance import LLMatcher, LLParserLimits

        limits = LLParserLimits(**LIMITS)
        return LLMatcher(self._inner, LLMatcher.grammar_from_lark(lark), log_level=0, limits=limits)

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token, special ones as their text."""
        return self._inner.decode_bytes([token])

    @cached_property
    def _inner(self) -> llguidance.LLTokenizer:
        from llguidance import LLTokenizer

        ends = sorted(self._tokenizer.eos_ids) or None
        return LLTokenizer(self._tokenizer.to_json(), n_vocab=self._vocab, eos_token=ends)


def check_length(lark: str, param: str) -> None:
    if len(lark) > SOURCE:
        raise ApiError(f"{param} has {len(lark)} characters; at most {SOURCE} are compiled", param=param)


def reason_of(message: str) -> str:
    """The reason in an error of llguidance, in one line: without the grammar and the marks below it."""
    lines = (line.strip() for line in re.split(r"\n +\d+ \| ", message)[0].splitlines())
    return " ".join(line for line in lines if line.strip("^"))[:500]
