"""Grammars of the server's answers: tool calls, and what clients ask for, compiled in a helper process first."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from lmstate.errors import GrammarError
from lmstate.serve.answer.compile_check import CompileCheck, TooCostly
from lmstate.serve.tools import Tool, ToolFormat
from lmstate.text.grammars.compiler import LIMITS, GrammarCompiler, TokenGrammar, check_length
from lmstate.text.grammars.lark import ANYTHING, of_schema
from lmstate.text.grammars.schema_bounds import check_schema
from lmstate.text.tokenizer import Tokenizer


class Grammars(GrammarCompiler):
    """A compiler of grammars that clients send, with those of tool calls around them."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        super().__init__(tokenizer, vocab_size)
        self._costs = CompileCheck(self._helper_settings)

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

    async def compile_checked(self, lark: str, param: str, tools: Sequence[Tool] = ()) -> TokenGrammar:
        """The grammar at its beginning, compiled off the loop, after a trial where its cost may be large.

        An error names `param`, or the schema that is at fault of one of the `tools` in the grammar. Cancelling it ends
        the trial.
        """
        check_length(lark, param)
        if not self.knows(lark):
            try:
                await self._costs.check(lark, own=not param.endswith(("regex", "pattern")))
            except TooCostly:
                raise GrammarError(
                    f"{param} takes too much time or memory to be compiled as a constraint: make it simpler", param
                ) from None
        return await asyncio.to_thread(self._compile, lark, param, tools)

    def _compile(self, lark: str, param: str, tools: Sequence[Tool]) -> TokenGrammar:
        try:
            return self.compile(lark, param)
        except GrammarError:
            for tool in tools:
                self.compile(of_schema(tool.schema, tool.param, tool.strict), tool.param)
            raise

    async def close(self) -> None:
        await self._costs.close()

    def _helper_settings(self) -> dict[str, Any]:
        ends = sorted(self._tokenizer.eos_ids)
        return {"tokenizer": self._tokenizer.to_json(), "vocab": self._ids, "ends": ends, "limits": LIMITS}
