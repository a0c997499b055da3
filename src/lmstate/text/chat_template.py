"""Chat templates: Jinja programs that come with a checkpoint and are trusted with nothing.

They run in Jinja's sandbox with the filters, methods and functions that templates in use expect and no others, and
within a budget: steps, characters and seconds. The language can build a value of any size out of a few letters in a
dozen ways; each is charged where it is computed, so a template fails with a `ModelError` instead of filling the memory.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from time import monotonic
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_round
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from lmstate.errors import ModelError
from lmstate.text.template_budget import (
    BUDGET,
    MOST_DIGITS,
    MOST_TEXT,
    SECONDS,
    RenderBudget,
    TooMuch,
    bounded,
    bounded_format,
    bounded_test,
    check_arguments,
    check_format,
    check_product,
    check_total,
    checked,
    counted,
    joined,
    printed,
    searched,
    written_length,
)

MOST_SOURCE = 2**18
_FILTERS = """
abs attr capitalize count d default dictsort e escape first float forceescape format groupby indent int items join last
length list lower map max min reject rejectattr replace reverse round safe select selectattr sort string striptags sum
title trim truncate unique upper wordcount
"""
_STR_METHODS = """
capitalize casefold count endswith find format index isalnum isalpha isascii isdecimal isdigit islower isnumeric isspace
istitle isupper join lower lstrip partition removeprefix removesuffix replace rfind rindex rpartition rsplit rstrip
split splitlines startswith strip swapcase title upper
"""
FILTERS = frozenset(_FILTERS.split())
_WRITERS = "e escape forceescape groupby join max min sort string unique"  # and tojson, which counts by itself
WRITERS = frozenset(_WRITERS.split())
"""Filters that write, or compare, all the text inside of a value."""
WALKERS = frozenset(["first", "list", "map", "reject", "rejectattr", "select", "selectattr"])
"""Filters that go through their input item by item, some of them lazily."""
METHODS: dict[type, frozenset[str]] = {
    str: frozenset(_STR_METHODS.split()),
    dict: frozenset(["copy", "get", "items", "keys", "values"]),
    list: frozenset(["copy", "count", "index"]),
    tuple: frozenset(["count", "index"]),
}
"""Methods that a template may call; other types of values have none but those of Jinja's own objects."""


class ChatTemplate:
    """One template. `render` is the text of a conversation; `ModelError` if the template refuses it or misbehaves."""

    def __init__(self, source: str) -> None:
        if len(source) > MOST_SOURCE:
            raise ModelError(f"the chat template has {len(source)} characters; at most {MOST_SOURCE} are expected")
        try:
            self._template = _Environment().from_string(source)
        except (jinja2.TemplateError, RecursionError, ValueError, SyntaxError, MemoryError) as error:
            raise ModelError(f"the chat template is not valid Jinja: {error}") from error

    def render(self, messages: Sequence[Mapping[str, Any]], **variables: Any) -> str:
        token = BUDGET.set(RenderBudget(monotonic() + SECONDS))
        pieces, length = [], 0
        try:
            for piece in self._template.generate(messages=[dict(message) for message in messages], **variables):
                length += len(piece)
                if length > MOST_TEXT:
                    raise TooMuch(f"it writes more than {MOST_TEXT} characters")
                pieces.append(piece)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(
                f"the model's chat template does not accept this conversation: {error}{_without_text(messages)}"
            ) from error
        except (RecursionError, MemoryError) as error:
            raise ModelError("the model's chat template asks for more memory than a conversation can need") from error
        finally:
            BUDGET.reset(token)
        text = "".join(pieces)
        if not _is_unicode(text) and _is_unicode(json.dumps([messages, variables], ensure_ascii=False, default=str)):
            raise ModelError("the model's chat template writes half a surrogate pair, which is not Unicode")
        return text


def _without_text(messages: Sequence[Mapping[str, Any]]) -> str:
    """The first message whose content is not text, since many templates take only text; "" if all are texts."""
    for index, message in enumerate(messages):
        if not isinstance(content := message.get("content"), str):
            return f' (message {index} has {content!r:.80} for its "content", and no text)'
    return ""


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the globals of chat templates, and bounds on what can be computed."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=printed
        )
        given = {**self.filters, "tojson": _tojson, "indent": _indent, "round": _round}
        self.filters = {name: bounded(given[name], name in WRITERS, name in WALKERS) for name in (*FILTERS, "tojson")}
        self.filters["format"] = bounded_format(given["format"])
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: bounded_test(function) for name, function in tests.items()}
        self.filters |= {
            "_counted": counted,
            "_checked": checked,
            "_joined": joined,
            "_searched": searched,
        }
        self.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TooMuch("it uses powers, which chat templates have no use for")
        if operator == "*":
            check_product(left, right)
        if operator == "%" and isinstance(left, str):
            check_format(left, right if isinstance(right, tuple) else (right,))
        return checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps str.format; the text that it belongs to is on the method inside.
        inner = inspect.unwrap(__obj)
        owner = getattr(inner, "__self__", None)
        check_arguments(owner, args, kwargs)
        if isinstance(owner, str) and getattr(inner, "__name__", "") in ("format", "format_map"):
            check_format(owner, [*args, *kwargs.values()])
        return checked(super().call(__context, __obj, *args, **kwargs))

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        if callable(value):
            allowed = next((names for kind, names in METHODS.items() if isinstance(obj, kind)), None)
            if attr not in allowed if allowed is not None else isinstance(obj, (bytes, int, float)):
                return False
        return bool(super().is_safe_attribute(obj, attr, value))


class _Bounds(NodeTransformer):
    """Route loops, `~`, comparisons, containers and captured blocks of a template through filters that charge."""

    def visit_Const(self, node: nodes.Const) -> nodes.Const:
        if isinstance(node.value, float) and not math.isfinite(node.value):
            raise TooMuch("it has a number that is beyond any float")
        return node

    def visit_For(self, node: nodes.For) -> nodes.For:
        self.generic_visit(node)
        node.iter = nodes.Filter(node.iter, "_counted", [], [], None, None)
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Filter:
        self.generic_visit(node)
        return nodes.Filter(nodes.List(node.nodes), "_joined", [], [], None, None)

    def visit_List(self, node: nodes.List) -> nodes.Filter:
        self.generic_visit(node)
        return nodes.Filter(node, "_checked", [], [], None, None)

    visit_Dict = visit_List

    def visit_Tuple(self, node: nodes.Tuple) -> nodes.Node:
        if node.ctx != "load":
            return node
        self.generic_visit(node)
        return nodes.Filter(node, "_checked", [], [], None, None)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):  # which compiled templates take without asking the environment
            return nodes.Filter(node, "_checked", [], [], None, None)
        return node

    def visit_Operand(self, node: nodes.Operand) -> nodes.Operand:
        self.generic_visit(node)
        node.expr = nodes.Filter(node.expr, "_searched", [], [], None, None)
        return node

    def visit_AssignBlock(self, node: nodes.AssignBlock) -> nodes.AssignBlock:
        self.generic_visit(node)
        node.filter = nodes.Filter(node.filter, "_checked", [], [], None, None)
        return node


class _GenerationTag(Extension):
    """`{% generation %} ... {% endgeneration %}` marks an answer for training; the text is that of its body."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> str:
    raise jinja2.TemplateError(str(message)[:2000])


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON for a model to read, without the HTML escapes of Jinja's own filter."""
    check_total([written_length(value, _width(indent or 0) + sum(map(_width, separators or ())))])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's own, if the text that it adds to the lines is not absurdly long."""
    check_total([len(text), _width(width) * (len(text.splitlines()) + 1)])
    return do_indent(text, width, first, blank)


def _round(value: float, precision: int = 0, method: Any = "common") -> float:
    """Jinja's own, which computes ten to the power of the precision."""
    if abs(precision) > MOST_DIGITS:
        raise TooMuch(f"it rounds to more than {MOST_DIGITS} digits")
    return do_round(value, precision, method)


def _width(width: int | str) -> int:
    return len(width) if isinstance(width, str) else max(int(width), 0)


def _strftime_now(format: str) -> str:
    if len(format) > 256:
        raise TooMuch("its date format is too long")
    return datetime.now().strftime(format)


def _is_unicode(text: str) -> bool:
    """Whether UTF-8 can write a text: it has no half of a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True
