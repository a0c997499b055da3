"""A docstring's first line names the thing, or says what to do: an index of them must tell a reader something.

That of a family's file has its forward in pseudo-code too.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmstate

SOURCES = Path(lmstate.__file__).parent
FORMULA = re.compile(r"\s*[a-z]\S* = \S")
QUESTION = re.compile(r"\s*(What|How|Where|When|Why|Who|Which|Whose|That)\b")


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and texts of every string that stands as a statement: docstrings, and those that describe a constant."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            yield node.lineno, node.value.value


def wrong(source: str) -> list[int]:
    return [line for line, text in docstrings(ast.parse(source)) if QUESTION.match(text)]


def test_no_docstring_begins_with_a_question_word() -> None:
    found = {
        f"{path.relative_to(SOURCES)}:{line}"
        for path in SOURCES.rglob("*.py")
        for line in wrong(path.read_text(encoding="utf-8"))
    }
    assert not found, f"begin with a noun phrase or an imperative: {sorted(found)}"


@pytest.mark.parametrize(
    ("source", "lines"),
    [
        ('"""What a module holds."""', [1]),
        ('class A:\n    """Which of them."""', [2]),
        ('x = 1\n"""\nHow many."""', [2]),
        ('"""Whatever."""\nx = "What is no docstring"', []),
    ],
)
def test_docstrings_of_every_kind_are_read(source: str, lines: list[int]) -> None:
    assert wrong(source) == lines


def forward(source: str) -> list[str]:
    """The formulas of a module's docstring."""
    lines = (ast.get_docstring(ast.parse(source)) or "").splitlines()
    return [line.strip() for line in lines if FORMULA.match(line)]


def test_every_family_file_begins_with_its_forward() -> None:
    paths = sorted((SOURCES / "models" / "families").glob("[!_]*.py"))
    assert len(paths) > 50
    for path in paths:
        formulas = forward(path.read_text(encoding="utf-8"))
        ends = next((at for at, formula in enumerate(formulas) if formula.startswith("logits = ")), 0)
        assert ends >= 2, f"{path.name}: its docstring has no lines from the tokens over the stream to the logits"
        assert "embed(" in formulas[0] or "conv(" in formulas[0], f"{path.name}: begins with {formulas[0]!r}"
