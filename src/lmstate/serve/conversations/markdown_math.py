r"""TeX in Markdown as MathML: between `$`, `$$`, `\(` and `\)`, `\[` and `\]`, and environments by themselves.

Dollars are mathematics as in Pandoc: no blank is at their inner side, and no digit after the second one. So prices
stay prices. A formula with an error, or without an end, is shown as it was written.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape
from typing import Any

from markdown_it import MarkdownIt
from markdown_it.rules_block import StateBlock
from markdown_it.rules_inline import StateInline
from markdown_it.token import Token

from lmstate.serve.conversations.tex import MOST_TEX, TexError, mathml

# Formulas between dollars by whether they are displayed; each pattern reads a character once. And pairs of marks.
DOLLARS = (
    (re.compile(rf"\$\$((?:[^\\$]|\\.|\$(?!\$)){{1,{MOST_TEX}}}+)\$\$", re.DOTALL), True),
    (re.compile(rf"\$(?!\s)((?:[^\\$]|\\.){{1,{MOST_TEX}}}+)(?<!\s)\$(?!\d)", re.DOTALL), False),
)
PAIRS = {"\\(": "\\)", "\\[": "\\]"}
BLOCK = re.compile(r"\$\$|\\\[|\\begin\{((?:align|alignat|equation|gather|multline|eqnarray|flalign)\*?)\}")


def use_math(parser: MarkdownIt) -> MarkdownIt:
    """The parser with rules for mathematics, in lines and as blocks."""
    parser.inline.ruler.before("escape", "math_inline", _inline)
    parser.block.ruler.before("fence", "math_block", _block, {"alt": ["paragraph", "reference", "blockquote", "list"]})
    parser.add_render_rule("math_inline", _rendered)
    parser.add_render_rule("math_block", _rendered)
    return parser


def _inline(state: StateInline, silent: bool) -> bool:
    source, at = state.src, state.pos
    tex, end, display = "", at, False
    if source[at] == "$":
        for pattern, displayed in DOLLARS:
            if found := pattern.match(source, at, state.posMax):
                tex, end, display = found[1], found.end(), displayed
                break
    elif (closing := PAIRS.get(source[at : at + 2])) is not None:
        close = source.find(closing, at + 2, min(state.posMax, at + 2 + MOST_TEX))
        tex, end, display = source[at + 2 : max(close, at + 2)], close + 2, closing == "\\]"
    if not tex.strip():
        return False
    if not silent:
        _push(state, "math_inline", tex, source[at:end], display)
    state.pos = end
    return True


def _block(state: StateBlock, line: int, last: int, silent: bool) -> bool:
    """A line that begins with a mark of displayed mathematics: up to the mark that ends it, or to a blank line.

    The first line decides, so that blocks of a text that grows end as those of the whole text.
    """
    start = state.bMarks[line] + state.tShift[line]
    opened = None if state.is_code_block(line) else BLOCK.match(state.src, start, state.eMarks[line])
    if opened is None:
        return False
    if silent:
        return True
    closing = f"\\end{{{opened[1]}}}" if opened[1] else PAIRS.get(opened[0], opened[0])
    after, found = opened.end(), -1
    for end in range(line, last):
        if end > line and (state.isEmpty(end) or state.sCount[end] < state.blkIndent):
            break
        found = state.src.find(closing, max(after, state.bMarks[end]), state.eMarks[end])
        state.line = end + 1
        if found >= 0:
            break
    text = state.getLines(line, state.line, state.blkIndent, False).strip()
    if found < 0:
        _paragraph(state, text, [line, state.line])
        return True
    cut = len(text) - len(state.src[found + len(closing) : state.eMarks[state.line - 1]].rstrip())
    tex = text[:cut] if opened[1] else text[len(opened[0]) : cut - len(closing)]
    _push(state, "math_block", tex, text[:cut], True).map = [line, state.line]
    if rest := text[cut:].strip():
        _paragraph(state, rest, None)
    return True


def _push(state: StateBlock | StateInline, kind: str, tex: str, source: str, display: bool) -> Token:
    token = state.push(kind, "math", 0)
    token.content, token.meta = tex, {"source": source, "display": display}
    return token


def _paragraph(state: StateBlock, text: str, lines: list[int] | None) -> None:
    state.push("paragraph_open", "p", 1).map = lines
    inline = state.push("inline", "", 0)
    inline.content, inline.map, inline.children = text, lines, []
    state.push("paragraph_close", "p", -1)


def _rendered(_: Any, tokens: Sequence[Token], index: int, options: Any, env: Any) -> str:
    token = tokens[index]
    try:
        shown = mathml(token.content, token.meta["display"])
    except TexError:
        shown = f"<code>{escape(token.meta['source'])}</code>"
    return f'<div class="math">{shown}</div>\n' if token.type == "math_block" else shown
