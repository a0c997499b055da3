"""TeX to MathML: the commands that models write, errors instead of guesses, and bounds on hostile formulas."""

from __future__ import annotations

import re
from contextlib import suppress
from time import process_time
from xml.etree import ElementTree

import pytest

from lmstate.serve.conversations.tex import ATTRIBUTES, MOST_TEX, TABLES, TAGS, TexError, mathml
from lmstate.serve.conversations.tex_symbols import (
    ACCENTS,
    ALPHABETS,
    DELIMITERS,
    FUNCTIONS,
    IDENTIFIERS,
    INTEGRALS,
    LARGE,
    LIMITS,
    OPERATORS,
    SPACES,
    STRETCHED,
    UNDER,
)

# The number of children of elements that have to have so many (MathML Core, section 3).
CHILDREN = {"mfrac": 2, "msup": 2, "msub": 2, "mover": 2, "munder": 2, "mroot": 2, "msubsup": 3, "munderover": 3}
FORMULAS = (
    r"x^2+y^2=z^2", r"\sum_{i=1}^n i = \frac{n(n+1)}{2}", r"\int_0^\infty e^{-x^2}\,dx=\frac{\sqrt{\pi}}{2}",
    r"\begin{pmatrix}a&b\\c&d\end{pmatrix}", r"\begin{aligned}a&=b\\[2pt]c&=d\\\end{aligned}", r"\sqrt[3]{x}",
    r"\left.\frac{df}{dx}\right|_{x=0}", r"\begin{cases}1&x>0\\0&\text{else}\end{cases}", r"\underbrace{a+b}_{c}",
    r"\mathbf{x}^\top\mathbf{A}\boldsymbol{\theta}", r"{n \choose k}", r"\overset{*}{=}", r"\xrightarrow[a]{b}",
    r"a \equiv b \pmod{n}", r"f'(x)=\lim_{h\to0}\frac{f(x+h)-f(x)}{h}", r"\boxed{\bigl(42\bigr)}", r"\not\in",
    r"\left\{x\middle|y\right\}", r"\begin{array}{c|c}1&2\\\hline3&4\end{array}", r"\operatorname*{arg\,max}_x",
    r"\|x\|_2 \tag{1}", r"a'_i{}^2", r"\displaystyle\prod\limits_i x_i", r"\dfrac12", "日本", "",
)  # fmt: skip


def tree(tex: str) -> ElementTree.Element:
    """A formula as a tree, which a browser reads as it is written."""
    found = ElementTree.fromstring(mathml(tex, display=True))
    for element in found.iter():
        assert element.tag in TAGS and {*element.keys()} <= ATTRIBUTES.get(element.tag, set())
        assert len(element) == CHILDREN.get(element.tag, len(element)), (tex, element.tag)
    return found


@pytest.mark.parametrize("tex", FORMULAS)
def test_formulas_become_the_elements_of_mathml_core(tex: str) -> None:
    assert not [text for text in tree(tex).itertext() if "\\" in text]


def test_every_command_of_the_tables_is_known() -> None:
    plain = {*IDENTIFIERS, *OPERATORS, *LARGE, *INTEGRALS, *FUNCTIONS, *LIMITS} - {"backslash"}
    formulas = [rf"\{name}" for name in plain] + [rf"a\{name} b" for name in SPACES]
    formulas += [rf"\{name}{{x}}" for name in (*ACCENTS, *STRETCHED, *UNDER, *ALPHABETS)]
    formulas += [rf"\left\{name} x \right\{name}" for name in DELIMITERS]
    formulas += [rf"\begin{{{name}}}a&b\\c&d\end{{{name}}}" for name in TABLES]
    for tex in formulas:
        shown = "".join(tree(tex).itertext())
        assert not re.search(r"\\[A-Za-z]{2}", shown), tex


def test_scripts_take_one_digit_and_numbers_all() -> None:
    assert "".join(tree("x^12").find(".//msup").itertext()) == "x1"  # type: ignore[union-attr]
    assert [number.text for number in tree("3.14+1000.").iter("mn")] == ["3.14", "1000"]
    assert [letter.text for letter in tree(r"\mathbb{R}\mathcal{L}\mathbf{x1}").iter("mi")] == ["ℝ", "ℒ", "𝐱", "𝟏"]


@pytest.mark.parametrize(
    "tex",
    [
        *(
            "x_",
            "^",
            "{",
            "}",
            r"\frac{",
            r"\left(",
            r"\begin{matrix}",
            r"\begin{x}\end{x}",
            r"\end{x}",
            "x^1^2",
            "x'^1^2",
            "x'^1'^2",
            "a&b",
        ),
        *(r"\begin{matrix}\end{cases}", r"\left x", "x" * (MOST_TEX + 1)),
    ],
)
def test_what_is_not_tex_is_an_error(tex: str) -> None:
    with pytest.raises(TexError):
        mathml(tex, display=False)


def test_macros_and_commands_that_are_not_known_are_shown_by_name() -> None:
    shown = "".join(tree(r"\def\a{\b\b}\a\href{javascript:x}{y}\style{color:red}").itertext())
    assert shown == r"\def\a\b\b\a\hrefjavascript:xy\stylecolor:red"


@pytest.mark.parametrize(
    "tex",
    [
        *(
            "{",
            r"\frac",
            "x^",
            r"\sqrt{",
            r"\left(",
            r"\begin{matrix}",
            "1",
            "'",
            "x'",
            r"\text{a",
            r"\mathbf{",
            r"\not",
        ),
        *(r"\mathbf{\alpha", "&", r"\mathrm{", "[", r"\sqrt[", r"x\over ", r"\begin{array}", r"\middle", r"\bigl", "%"),
        *("\\\\", r"\displaystyle "),
    ],
)
def test_hostile_formulas_are_read_or_refused_at_once(tex: str) -> None:
    began = process_time()
    with suppress(TexError):
        assert len(mathml((tex * MOST_TEX)[:MOST_TEX], display=True)) < 64 * MOST_TEX
    assert process_time() - began < 0.5
