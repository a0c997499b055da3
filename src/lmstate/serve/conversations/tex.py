"""TeX's mathematics to MathML Core: the commands that models write, within bounds, and no macros.

A formula is read once from left to right, so the time grows with its length. Elements and attributes come from here
alone, and everything of the formula is escaped. A command that is not known is shown by its name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from html import escape

from lmstate.serve.conversations.tex_symbols import (
    ACCENTS,
    ALIKE,
    ALPHABETS,
    DELIMITERS,
    FUNCTIONS,
    IDENTIFIERS,
    INTEGRALS,
    LARGE,
    LIMITS,
    MARKS,
    OPERATORS,
    SPACES,
    STRETCHED,
    UNDER,
)

MOST_TEX, MOST_DEPTH = 4_000, 40  # characters of a formula, and groups inside one another
TOKEN = re.compile(r"\\[A-Za-z]+\*?|\\(?s:.)|%[^\n]*|\s+|.", re.DOTALL)
TAGS = frozenset(
    ("math", "mrow", "mi", "mo", "mn", "mtext", "mspace", "msup", "msub", "msubsup", "mover", "munder", "munderover",
     "mfrac", "msqrt", "mroot", "mtable", "mtr", "mtd", "mphantom", "mstyle")
)  # fmt: skip
ATTRIBUTES = {
    "math": {"display"}, "mi": {"mathvariant"}, "mo": {"stretchy", "movablelimits", "minsize", "maxsize"},
    "mspace": {"width"}, "mfrac": {"linethickness"}, "mrow": {"class"}, "mtable": {"class"}, "mover": {"accent"},
    "munder": {"accentunder"}, "mstyle": {"displaystyle"},
}  # fmt: skip
FENCES = {
    "pmatrix": "()",
    "bmatrix": "[]",
    "Bmatrix": "{}",
    "vmatrix": "||",
    "Vmatrix": "‖‖",
    "cases": "{ ",
    "rcases": " }",
}
# Environments by the class of their table, which says how cells are aligned.
TABLES = {
    **dict.fromkeys(("matrix", "smallmatrix", "array", *FENCES), "matrix"), "cases": "cases", "rcases": "cases",
    **dict.fromkeys(("aligned", "align", "alignedat", "alignat", "split", "eqnarray", "flalign"), "aligned"),
    **dict.fromkeys(("gathered", "gather", "multline", "equation", "displaymath"), "gathered"),
}  # fmt: skip
WITH_COLUMNS = frozenset(("array", "alignedat", "alignat"))  # an argument about their columns comes first
SIZES = {"big": "1.2em", "Big": "1.8em", "bigg": "2.4em", "Bigg": "3em"}
BIG = re.compile(r"(big|Big|bigg|Bigg)[lrm]?")
TEXT = {"text": "", "textrm": "", "textup": "", "mbox": "", "hbox": "", "textbf": "mathbf", "textit": "mathit"}
TEXT |= {"textsf": "mathsf", "texttt": "mathtt", "textnormal": ""}
# Commands about the type or the place of what follows, which MathML decides by itself; and such with an argument.
PASSED = frozenset(
    ("limits", "nolimits", "displaylimits", "textstyle", "scriptstyle", "nonumber", "notag", "hline", "hfill")
)
PASSED_WITH_ARGUMENT = frozenset(("label", "color", "hspace", "vspace", "cline", "require"))
PRIMES = re.compile("<mo>′+</mo>")
RELATIONS = {"-": "−", "*": "∗", ":": ":", "'": "′"}


class TexError(ValueError):
    """A formula that is not TeX, or too large."""


def mathml(tex: str, display: bool) -> str:
    """A formula as a `math` element. Raises `TexError`."""
    if len(tex) > MOST_TEX:
        raise TexError(f"the formula has {len(tex)} characters; at most {MOST_TEX} are shown as one")
    reader = _Reader(tex)
    inside = reader.row(lambda token: False)
    return f'<math display="{"block" if display else "inline"}">{_row(inside)}</math>'


def _element(tag: str, text: str, **attributes: str) -> str:
    named = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f"<{tag}{named}>{escape(text)}</{tag}>"


def _around(tag: str, *inside: str, **attributes: str) -> str:
    named = "".join(f' {name}="{value}"' for name, value in attributes.items())
    return f"<{tag}{named}>{''.join(inside)}</{tag}>"


def _row(items: Iterable[str]) -> str:
    """One element of several."""
    found = list(items)
    return found[0] if len(found) == 1 else _around("mrow", *found)


def _letter(letter: str, alphabet: str) -> str:
    """A letter or a digit of an alphabet, as Unicode has it."""
    capital, small, digit, elsewhere = ALPHABETS[alphabet]
    if letter in elsewhere:
        return elsewhere[letter]
    for first, last, begin in (("A", "Z", capital), ("a", "z", small), ("0", "9", digit)):
        if first <= letter <= last and begin:
            return chr(begin + ord(letter) - ord(first))
    if alphabet in ("mathbf", "boldsymbol") and "α" <= letter <= "ω":
        return chr(0x1D6C2 + ord(letter) - ord("α"))
    return letter


class _Reader:
    """The tokens of a formula, and the place of the next."""

    def __init__(self, tex: str) -> None:
        self._tokens = [token for token in TOKEN.findall(tex) if token[0] != "%"]
        self._at = self._depth = 0

    def _next(self, spaces: bool = False) -> str | None:
        """The next token, which stays; None at the end."""
        while not spaces and self._at < len(self._tokens) and self._tokens[self._at].isspace():
            self._at += 1
        return self._tokens[self._at] if self._at < len(self._tokens) else None

    def _take(self) -> str:
        token = self._next()
        if token is None:
            raise TexError("the formula ends before its last group does")
        self._at += 1
        return token

    def row(self, ends: Callable[[str], bool]) -> list[str]:
        """Elements up to a token that ends them, which stays."""
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise TexError(f"groups stand more than {MOST_DEPTH} deep in one another")
        found: list[str] = []
        while (token := self._next()) is not None and not ends(token):
            if token in ("\\displaystyle", "\\over", "\\choose", "\\atop"):
                self._at += 1
                rest = _row(self.row(ends))
                if token == "\\displaystyle":
                    found.append(_around("mstyle", rest, displaystyle="true"))
                else:
                    found = [_fraction(_row(found), rest, bar=token == "\\over", round_it=token == "\\choose")]
                break
            found.append(self._with_scripts(self._atom(numbers=True)))
        self._depth -= 1
        return found

    # ---- an atom and what is set at it

    def _with_scripts(self, base: str) -> str:
        limits = base.startswith(("<mo movablelimits", "<munder", "<mover>", '<mover accent="false"'))
        scripts: dict[str, str] = {}
        while (token := self._next()) in ("^", "_", "'", "\\limits", "\\nolimits"):
            if token == "'":
                found, kind = "", "^"
                while self._next() == "'":
                    self._at += 1
                    found += "′"
                script = _element("mo", found)
            elif token in ("\\limits", "\\nolimits"):
                self._at += 1
                limits = token == "\\limits"
                continue
            else:
                kind = self._take()
                script = self._argument()
            if kind == "^" and PRIMES.fullmatch(scripts.get(kind, "")):
                script = _row((scripts.pop(kind), script))
            if kind in scripts:
                raise TexError("two scripts stand at one place")
            scripts[kind] = script
        if not scripts:
            return base
        below, above = scripts.get("_"), scripts.get("^")
        if below is not None and above is not None:
            return _around("munderover" if limits else "msubsup", base, below, above)
        if below is not None:
            return _around("munder" if limits else "msub", base, below)
        return _around("mover" if limits else "msup", base, above or "")

    def _argument(self) -> str:
        """The argument of a command: a group, or one atom."""
        self._depth += 1
        if self._depth > MOST_DEPTH:
            raise TexError(f"commands stand more than {MOST_DEPTH} deep in one another")
        found = self._atom(numbers=False)
        self._depth -= 1
        return found

    def _optional(self) -> str | None:
        """The argument in brackets, if there is one."""
        if self._next() != "[":
            return None
        self._at += 1
        found = _row(self.row(lambda token: token == "]"))
        self._take()
        return found

    def _raw(self) -> str:
        """The text of a group, as it is there."""
        if self._next() != "{":
            return self._take()
        self._at += 1
        begin, depth = self._at, 1
        while depth:
            if (token := self._next(spaces=True)) is None:
                raise TexError("a group does not end")
            depth += (token == "{") - (token == "}")
            self._at += 1
        return "".join(self._tokens[begin : self._at - 1])

    def _atom(self, numbers: bool) -> str:
        """One element. numbers: all digits of a number belong to it."""
        token = self._take()
        if token == "{":
            found = self.row(lambda token: token == "}")
            self._take()
            return _row(found)
        if token in ("}", "&", "^", "_"):
            raise TexError(f"{token} stands where nothing is open for it")
        if token[0] == "\\" and len(token) > 1:
            return self._command(token[1:])
        if token.isdigit():
            while numbers and (more := self._next(spaces=True)) is not None and (more.isdigit() or more == "."):
                if more == "." and not "".join(self._tokens[self._at + 1 : self._at + 2]).isdigit():
                    break
                token += more
                self._at += 1
            return _element("mn", token)
        if token == "~":
            return _around("mspace", width="0.333em")
        if token.isalpha():
            return _element("mi", token)
        if token in "()[]|/":
            return _element("mo", token, stretchy="false")
        return _element("mo", RELATIONS.get(token, token))

    def _command(self, name: str) -> str:
        name = name if name in SPACES else name.removesuffix("*")
        if (letter := IDENTIFIERS.get(name)) is not None:
            return _element("mi", letter, mathvariant="normal") if letter.isupper() else _element("mi", letter)
        if (sign := OPERATORS.get(name)) is not None:
            return _element("mo", sign, stretchy="false")
        if (sign := LARGE.get(name)) is not None:
            return _element("mo", sign, movablelimits="true")
        if (sign := INTEGRALS.get(name)) is not None:
            return _element("mo", sign)
        if name in FUNCTIONS:
            return _element("mi", name)
        if name in LIMITS:
            return _element("mo", LIMITS[name], movablelimits="true")
        if (width := SPACES.get(name)) is not None:
            return _around("mspace", width=width)
        if big := BIG.fullmatch(name):
            size = SIZES[big[1]]
            return _element("mo", self._delimiter(), minsize=size, maxsize=size)
        if name in TEXT:
            return self._text(TEXT[name])
        if (name := ALIKE.get(name, name)) in ALPHABETS:
            return self._lettered(name)
        if name in ACCENTS:
            return _around("mover", self._argument(), _element("mo", ACCENTS[name], stretchy="false"), accent="true")
        if name in STRETCHED:
            marked = "false" if name == "overbrace" else "true"
            return _around("mover", self._argument(), _element("mo", STRETCHED[name], stretchy="true"), accent=marked)
        if name in UNDER:
            return _around("munder", self._argument(), _element("mo", UNDER[name], stretchy="true"))
        return self._structure(name)

    def _structure(self, name: str) -> str:
        match name:
            case "frac" | "dfrac" | "tfrac" | "cfrac":
                found = _fraction(self._argument(), self._argument())
                return _around("mstyle", found, displaystyle="true") if name in ("dfrac", "cfrac") else found
            case "binom" | "dbinom" | "tbinom":
                return _fraction(self._argument(), self._argument(), bar=False, round_it=True)
            case "sqrt":
                index = self._optional()
                inside = self._argument()
                return _around("msqrt", inside) if index is None else _around("mroot", inside, index)
            case "left":
                return self._fenced()
            case "begin":
                return self._environment()
            case "mathrm" | "operatorname" | "mathop" | "rm" | "operatornamewithlimits":
                if not self._plain_group():
                    return self._argument()
                text = "".join(self._raw().split()).replace("\\,", " ")
                return _element("mi", text, mathvariant="normal")
            case "mathbin" | "mathrel" | "mathord" | "mathopen" | "mathclose" | "mathinner" | "smash" | "ensuremath":
                return self._argument()
            case "overset" | "stackrel":
                above = self._argument()
                return _around("mover", self._argument(), above)
            case "underset":
                below = self._argument()
                return _around("munder", self._argument(), below)
            case "xrightarrow" | "xleftarrow":
                under, over = self._optional(), self._argument()
                arrow = _element("mo", "→" if name == "xrightarrow" else "←", stretchy="true")
                return _around("mover", arrow, over) if under is None else _around("munderover", arrow, under, over)
            case "not":
                return re.sub(r"(?=</m[oi]>$)", "\u0338", self._argument())
            case "bmod" | "mod":
                return _element("mo", "mod")
            case "pmod" | "pod":
                mark = _element("mi", "mod") + _around("mspace", width="0.333em") if name == "pmod" else ""
                return _around("mrow", _around("mspace", width="0.5em"), _open("("), mark, self._argument(), _open(")"))
            case "boxed" | "fbox":
                return _around("mrow", self._argument(), **{"class": "boxed"})
            case "textcolor" | "colorbox":
                self._raw()
                return self._argument()
            case "phantom":
                return _around("mphantom", self._argument())
            case "tag":
                return _around("mrow", _around("mspace", width="2em"), _element("mtext", f"({self._raw()})"))
            case "\\" | "newline":
                return _around("mspace", width="1em")
            case _ if name in PASSED:
                return _around("mrow")
            case _ if name in PASSED_WITH_ARGUMENT:
                self._raw()
                return _around("mrow")
            case _ if name in DELIMITERS:
                return _element("mo", DELIMITERS[name], stretchy="false")
            case _ if name in ("right", "end", "middle"):
                raise TexError(f"\\{name} stands where nothing is open for it")
            case _ if len(name) == 1 and not name.isalpha():
                return _element("mo" if name in "%&#_" else "mi", name)
            case _:
                return _element("mtext", f"\\{name}")

    # ---- letters and text

    def _plain_group(self) -> bool:
        """Whether letters and digits alone come next, in a group or one of them."""
        at = self._at
        try:
            return bool(re.fullmatch(r"(?:[\w\s.-]|\\,)*", self._raw()))
        finally:
            self._at = at

    def _text(self, alphabet: str) -> str:
        text = re.sub(r"\\([ ,;$%&#_{}])", r"\1", self._raw()).replace("$", "").replace("~", "\u00a0")
        text = re.sub(r"^\s|\s$", "\u00a0", " ".join(re.split(r"\s+", text)))
        return _element("mtext", "".join(_letter(letter, alphabet) for letter in text) if alphabet else text)

    def _lettered(self, alphabet: str) -> str:
        if self._plain_group():
            return _row(_element("mi", _letter(letter, alphabet)) for letter in "".join(self._raw().split()))
        inside = self._argument()
        return re.sub(r"(?<=<m[in]>)(\w)(?=</m[in]>)", lambda found: _letter(found[1], alphabet), inside)

    # ---- fences and tables

    def _delimiter(self) -> str:
        token = self._take()
        found = MARKS.get(token) if token[0] != "\\" else DELIMITERS.get(token[1:])
        if found is None:
            raise TexError(f"unknown delimiter {token[:20]}")
        return found

    def _fenced(self) -> str:
        parts = [_open(self._delimiter(), stretchy="true")]
        while True:
            parts += self.row(lambda token: token in ("\\right", "\\middle"))
            token = self._take()
            parts.append(_open(self._delimiter(), stretchy="true"))
            if token == "\\right":
                return _around("mrow", *parts)

    def _environment(self) -> str:
        name = self._raw().strip().removesuffix("*")
        if name not in TABLES:
            raise TexError(f"the environment {name[:20]} is not known")
        if name in WITH_COLUMNS and self._next() == "{":
            self._raw()
        rows: list[list[str]] = [[]]
        while True:
            rows[-1].append(_around("mtd", *self.row(lambda token: token in ("&", "\\\\", "\\\\*", "\\end", "\\cr"))))
            token = self._take()
            if token == "\\end":
                break
            if token != "&":
                rows.append([])
                if self._next() == "[":  # more room between two rows
                    self._optional()
        if (ended := self._raw().strip().removesuffix("*")) != name:
            raise TexError(f"\\begin{{{name}}} ends as {ended[:20]}")
        if rows[-1] == ["<mtd></mtd>"] and len(rows) > 1:  # after the last \\
            rows.pop()
        table = _around("mtable", *(_around("mtr", *row) for row in rows), **{"class": TABLES[name]})
        if (fences := FENCES.get(name)) is None:
            return table
        left, right = (_open(fence.strip(), stretchy="true") for fence in fences)
        return _around("mrow", left, table, right)


def _open(fence: str, stretchy: str = "false") -> str:
    return _element("mo", fence, stretchy=stretchy) if fence else ""


def _fraction(over: str, under: str, bar: bool = True, round_it: bool = False) -> str:
    found = _around("mfrac", over, under) if bar else _around("mfrac", over, under, linethickness="0")
    return _around("mrow", _open("(", "true"), found, _open(")", "true")) if round_it else found
