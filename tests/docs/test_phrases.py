"""Plain English in what users and readers see: phrases that read as translated, and sentences that are too long."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmstate

SOURCES = Path(lmstate.__file__).parent
ROOT = SOURCES.parents[1]
STRINGS, DOCSTRINGS, COMMENTS, PAGES = ALL = "strings", "docstrings", "comments", "pages"
NEGATED = r"(?<!\bthere )(?<!\bThere )\b(is|are|was|were) (no|none)\b(?! (longer|more|other)\b)"
PHRASES = {
    r"(?i)\b(nobody|somebody|whoever|nowhere)\b": ALL,
    NEGATED: ALL,
    r"(?i)\bso many\b": ALL,
    r"\bis what\b": ALL,
    r"\banew\b": ALL,
    r"(?:^|(?<=[-*|.:;] ))What\b(?![^.:;]*\?)": (DOCSTRINGS, COMMENTS, PAGES),
}
"""What is not written, and the kinds of text in which it is not: a kind is added once it has none left."""
MAX_WORDS = {PAGES: 40, DOCSTRINGS: 40}
"""The longest sentence of a kind of text, in words."""
Text = tuple[str, int, str, str]


def of_source(name: str, source: str) -> Iterator[Text]:
    """(file, line, kind, text) of docstrings, other strings and comments; a docstring also is one below a constant."""
    tree = ast.parse(source)
    docs = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            for start, part in parts(node.value):
                yield name, node.lineno + start, DOCSTRINGS if id(node) in docs else STRINGS, part
    for line, text in comments(source):
        yield name, line, COMMENTS, text


def comments(source: str) -> Iterator[tuple[int, str]]:
    """Comments, each with the line it begins at; one of several lines is one text."""
    at, lines = 0, list[str]()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            line = token.start[0]
            if lines and (line != at + len(lines) or not token.line.lstrip().startswith("#")):
                yield at, " ".join(lines)
                lines = []
            at = at if lines else line
            lines.append(token.string.lstrip("# "))
    if lines:
        yield at, " ".join(lines)


def of_page(name: str, page: str) -> Iterator[Text]:
    """The paragraphs of a page, without its blocks and spans of code."""
    page = re.sub(r"```.*?```", lambda block: "\n" * block[0].count("\n"), page, flags=re.DOTALL)
    page = re.sub(r"(?m)^ {4,}.*$", "", page)
    page = re.sub(r"(?m)^(#.*)$", r"\1.", page)  # a heading ends a sentence
    for start, part in parts(re.sub(r"`[^`\n]*`", "`x`", page)):
        yield name, 1 + start, PAGES, part


def parts(text: str) -> Iterator[tuple[int, str]]:
    """Paragraphs, items of lists and entries of tables (`name  text`), each with the line it begins at."""
    at = 0
    for part in re.split(r"(\n\s*\n|\n(?=\s*(?:[-*#|]|\d+\.)\s?|[^\n]*\S {2,}\S))", text):
        yield at, " ".join(part.split())
        at += part.count("\n")


def wrong(texts: Iterator[Text]) -> list[str]:
    found = []
    for name, line, kind, text in texts:
        for phrase, kinds in PHRASES.items():
            found += [f"{name}:{line}: {match[0]!r}" for match in re.finditer(phrase, text) if kind in kinds]
        longest = MAX_WORDS.get(kind)
        for sentence in re.split(r"(?<=[.!?])\s|(?<=[.!?]\))\s", text) if longest and "|" not in text else ():
            if (words := len(sentence.split())) > longest:
                found.append(f"{name}:{line}: a sentence of {words} words: {sentence[:60]}...")
    return found


def test_what_is_read_has_no_phrase_of_the_list_and_no_sentence_too_long() -> None:
    found = []
    for path in sorted(SOURCES.rglob("*.py")):
        name = path.relative_to(ROOT).as_posix()
        found += wrong(of_source(name, path.read_text(encoding="utf-8")))
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        found += wrong(of_page(str(path.relative_to(ROOT)), path.read_text(encoding="utf-8")))
    assert not found, "write it plainly (shorter, or with another phrase):\n" + "\n".join(found)


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ('raise E("x is no size")', ["a.py:1: 'is no'"]),
        ('x = 1\ny = f"{x} is none: make it anew"', ["a.py:2: 'is none'", "a.py:2: 'anew'"]),
        ('x = "there is no room, and it is no longer open"', []),
        ("x = 1  # it is no\n# size", ["a.py:1: 'is no'"]),
        ('"""A.\n\nB. What was computed stays. What is C?"""', ["a.py:3: 'What'"]),
        ('"""\n\nNobody holds it."""', ["a.py:3: 'Nobody'"]),
        (f'"""{"word " * 41}."""', ["a.py:1: a sentence of 42 words: " + "word " * 12 + "..."]),
        (f'"""{"word " * 30}\n\nname  {"word " * 30}."""', []),
    ],
)
def test_phrases_are_found_where_they_are_written(source: str, found: list[str]) -> None:
    assert wrong(of_source("a.py", source)) == found
