"""Markdown to HTML that is safe to show, block by block: what a growing text adds leaves earlier blocks as they are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from html import escape
from itertools import pairwise
from time import perf_counter
from typing import Any

import nh3
import pygments
from markdown_it import MarkdownIt
from pygments.formatters import HtmlFormatter
from pygments.lexer import Lexer
from pygments.lexers import get_lexer_by_name
from pygments.util import ClassNotFound

from lmstate.serve.conversations import tex
from lmstate.serve.conversations.markdown_math import use_math

# Headings are shown one level below those of the page; images would be requests to other origins, so there are none.
TAGS = {
    *("p", "h2", "h3", "h4", "h5", "h6", "ul", "ol", "li", "blockquote", "hr", "br", "pre", "code", "span"),
    *("em", "strong", "s", "a", "table", "thead", "tbody", "tr", "th", "td", "div"),
    *tex.TAGS,
}
ATTRIBUTES = {
    "a": {"href", "title"}, "ol": {"start"}, **{tag: {"class"} for tag in ("span", "code", "pre", "div")},
    **tex.ATTRIBUTES,
}  # fmt: skip
# Characters of a code block and of a line in one that is highlighted, and seconds that it may take: many lexers need
# time that grows with the square of a line. Code that is longer, or takes longer, is shown plain.
MOST_HIGHLIGHTED, LONGEST_LINE, HIGHLIGHT_SECONDS = 50_000, 1_000, 0.5
LANGUAGE = re.compile(r"[A-Za-z0-9+#._-]{1,30}")  # that a block of code may say it is in
INTERVAL, SHARE = 0.06, 8  # seconds between two renderings of a growing text, and how many times their own cost


@cache
def _parser() -> MarkdownIt:
    parser = MarkdownIt("commonmark", {"html": False, "highlight": _highlighted}).enable(["table", "strikethrough"])
    return use_math(parser.disable("image"))


def _highlighted(code: str, language: str, _: str) -> str:
    inside = escape(code)
    language = language if LANGUAGE.fullmatch(language) else ""
    if language and len(code) <= MOST_HIGHLIGHTED and all(len(line) <= LONGEST_LINE for line in code.splitlines()):
        with suppress(ClassNotFound, TimeoutError):
            inside = pygments.format(_tokens(code, get_lexer_by_name(language)), HtmlFormatter(nowrap=True))
    named = f" language-{language}" if language else ""
    return f'<pre class="code{named}"><code>{inside}</code></pre>'


def _tokens(code: str, lexer: Lexer) -> Iterator[tuple[Any, str]]:
    """Tokens of code. Raises `TimeoutError` where they take too long."""
    until = perf_counter() + HIGHLIGHT_SECONDS
    for token in lexer.get_tokens(code):
        if perf_counter() > until:
            raise TimeoutError
        yield token


def split_blocks(text: str) -> list[str]:
    """The top-level blocks of a text in Markdown, as they are in it."""
    lines = [f"{line}\n" for line in text.replace("\r\n", "\n").replace("\r", "\n").split("\n")]
    starts = [token.map[0] for token in _parser().parse(text) if token.level == 0 and token.nesting >= 0 and token.map]
    cuts = [0, *starts[1:], len(lines)] if starts else [0, len(lines)]
    lines[-1] = lines[-1][:-1]
    return ["".join(lines[start:stop]) for start, stop in pairwise(cuts) if stop > start]


def render(text: str) -> str:
    """Sanitized HTML: no scripts, no styles, no images; links to http, https and mailto only."""
    parser = _parser()
    tokens = parser.parse(text)
    for token in tokens:
        if token.type in ("heading_open", "heading_close"):
            token.tag = f"h{min(int(token.tag[1]) + 1, 6)}"
    html = parser.renderer.render(tokens, parser.options, {})
    return nh3.clean(
        html,
        tags=TAGS,
        attributes=ATTRIBUTES,
        url_schemes={"http", "https", "mailto"},
        link_rel="noopener noreferrer nofollow",
        set_tag_attribute_values={"a": {"target": "_blank"}},
    )


def render_blocks(text: str) -> list[str]:
    return [render(block) for block in split_blocks(text)]


def typed_blocks(text: str) -> list[str]:
    """A text as it was typed, as one block."""
    return [f'<div class="typed">{escape(text)}</div>'] if text else []


class GrowingMarkdown:
    """A text that grows, as HTML blocks. Only the last block is rendered again, and not more often than is cheap."""

    def __init__(self) -> None:
        self.blocks: list[str] = []
        self._tail = ""  # the source of the last block
        self._next = 0.0

    @property
    def wait(self) -> float | None:
        """Seconds until its last block may be rendered again; None if there is none."""
        return max(self._next - perf_counter(), 0.0) if self._tail else None

    def push(self, text: str, *, end: bool = False) -> int | None:
        """Add text. Returns the first block that changed; None if nothing was rendered now."""
        self._tail += text
        began = perf_counter()
        if not self._tail or (began < self._next and not end):
            return None
        first = max(len(self.blocks) - 1, 0)
        parts = split_blocks(self._tail)
        self.blocks[first:] = [render(part) for part in parts]
        self._tail = parts[-1] if parts else ""
        cost = perf_counter() - began
        self._next = began + max(INTERVAL, SHARE * cost)
        return first
