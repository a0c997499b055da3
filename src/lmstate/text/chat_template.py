"""Chat templates: Jinja programs that come with a checkpoint and are trusted with nothing.

They run in Jinja's sandbox with the filters, methods and functions that templates in use expect and no others, and
within a budget: steps, characters and seconds. The language can build a value of any size out of a few letters in a
dozen ways; each is charged where it is computed, so a template fails with a `ModelError` instead of filling the memory.
"""

from __future__ import annotations

import functools
import inspect
import json
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime
from time import monotonic
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.filters import do_indent, do_round
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from lmstate.errors import ModelError

MOST_SOURCE, MOST_TEXT, MOST_STEPS = 2**18, 2**24, 2 * 10**6
WIDEST_FIELD = 1000  # characters of a number or a text that a format pads
MOST_DIGITS = 100  # behind the point, of a number that is rounded
MOST_CHARACTERS = 2**27
"""Characters and bytes that one render may create, those that are thrown away included."""
SECONDS = 10.0
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


@dataclass
class _Budget:
    """Remaining budget of one render."""

    deadline: float
    steps: int = MOST_STEPS
    characters: int = MOST_CHARACTERS

    def charge(self, steps: int = 1, characters: int = 0) -> None:
        self.steps -= steps
        self.characters -= characters
        if self.steps < 0:
            raise TooMuch(f"it takes more than {MOST_STEPS} steps")
        if self.characters < 0:
            raise TooMuch(f"it creates texts of more than {MOST_CHARACTERS} characters in all")
        if monotonic() > self.deadline:
            raise TooMuch(f"it takes more than {SECONDS:g} seconds")


_budget: ContextVar[_Budget] = ContextVar("budget")


class TooMuch(jinja2.TemplateError):
    """The template asked for more than the budget."""


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
        token = _budget.set(_Budget(monotonic() + SECONDS))
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
            _budget.reset(token)
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
            trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols], finalize=_printed
        )
        given = {**self.filters, "tojson": _tojson, "indent": _indent, "round": _round}
        self.filters = {name: _bounded(given[name], name in WRITERS, name in WALKERS) for name in (*FILTERS, "tojson")}
        self.filters["format"] = _bounded_format(given["format"])
        tests: dict[str, Any] = {**self.tests}
        self.tests = {name: _bounded_test(function) for name, function in tests.items()}
        self.filters |= {
            "_counted": _counted,
            "_checked": _checked,
            "_joined": _joined,
            "_searched": _searched,
        }
        self.globals |= {"raise_exception": _refuse, "strftime_now": _strftime_now}
        del self.globals["lipsum"]

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        return _Bounds().visit(super()._parse(source, name, filename))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "**":
            raise TooMuch("it uses powers, which chat templates have no use for")
        if operator == "*":
            _check_product(left, right)
        if operator == "%" and isinstance(left, str):
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return _checked(super().call_binop(context, operator, left, right))

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        # The sandbox wraps str.format; the text that it belongs to is on the method inside.
        inner = inspect.unwrap(__obj)
        owner = getattr(inner, "__self__", None)
        _check_arguments(owner, args, kwargs)
        if isinstance(owner, str) and getattr(inner, "__name__", "") in ("format", "format_map"):
            _check_format(owner, [*args, *kwargs.values()])
        return _checked(super().call(__context, __obj, *args, **kwargs))

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
    _check_total([_written(value, _width(indent or 0) + sum(map(_width, separators or ())))])
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _indent(text: str, width: int | str = 4, first: bool = False, blank: bool = False) -> str:
    """Jinja's own, if the text that it adds to the lines is not absurdly long."""
    _check_total([len(text), _width(width) * (len(text.splitlines()) + 1)])
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


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, each charged to the budget of the render."""
    budget = _budget.get()
    for item in items:
        budget.charge()
        yield item


def _searched(value: Any) -> Any:
    """A value that another is compared with or looked for in."""
    _budget.get().charge(1 + len(value) // 64 if isinstance(value, (str, list, tuple)) else 1)
    return value


def _checked(value: Any) -> Any:
    """The value itself, charged to the budget, if its size is reasonable.

    Containers are charged for all that is in them, so that one that holds itself twice, which holds itself twice, ...
    cannot be built or printed: whatever walks through it would never end.
    """
    if value is None or isinstance(value, (jinja2.Undefined, bool, float)):
        return value
    budget = _budget.get(None)
    if budget is None:  # a constant that is folded while the template compiles
        return value
    if isinstance(value, (str, bytes)):
        budget.charge(1, len(value))
        if len(value) > MOST_TEXT:
            raise TooMuch(f"it builds a text of {len(value)} characters")
    elif isinstance(value, int):
        if value.bit_length() > 1024:
            raise TooMuch("it computes with absurdly large numbers")
    elif isinstance(value, CONTAINERS):
        open_: list[Any] = [value]
        while open_:
            inside = open_.pop()
            items = _items(inside)
            budget.charge(len(items) + 1)
            open_ += [item for item in items if isinstance(item, CONTAINERS)]
    return value


CONTAINERS = (list, tuple, dict, Namespace)


def _items(container: Any) -> list[Any]:
    if isinstance(container, Namespace):
        container = object.__getattribute__(container, "_Namespace__attrs")
    return list(container.values() if isinstance(container, dict) else container)


def _written(value: Any, indent: int = 0) -> int:
    """Characters of a value as text, at least, and no more than it takes to be too many.

    `indent`: those that stand before an item for each container around it.
    """
    budget, total, waiting = _budget.get(None), 0, [(value, 0)]
    while waiting and total <= MOST_TEXT:
        one, depth = waiting.pop()
        total += indent * depth
        if isinstance(one, CONTAINERS):
            items = _items(one)
            if budget is not None:  # else it is a constant that is folded while the template compiles
                budget.charge(len(items) + 1)
            waiting += [(item, depth + 1) for item in items]
            if isinstance(one, dict):
                waiting += [(key, 0) for key in one]
            total += 2 + indent * depth
        else:
            total += len(one) if isinstance(one, (str, bytes)) else 8
    return total


def _printed(value: Any) -> Any:
    """A value that a template prints: the text of a container is made at once."""
    if isinstance(value, CONTAINERS):
        _check_total([_written(value)])
    return _checked(value)


def _joined(parts: list[Any]) -> str:
    _check_total(map(_written, parts))
    texts = [str(_checked(part)) for part in parts]
    _check_total(map(len, texts))
    return "".join(texts)


def _bounded(function: Callable[..., Any], writes: bool = False, walks: bool = False) -> Callable[..., Any]:
    """A filter that is measured: arguments, result, items. `wraps` keeps the marks by which Jinja passes a context."""
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        if writes:
            _check_total(map(_written, args[leading:]))
        _check_arguments(args[leading] if len(args) > leading else None, args[leading + 1 :], kwargs)
        if walks and len(args) > leading and isinstance(args[leading], Iterable):
            args = (*args[:leading], _counted(args[leading]), *args[leading + 1 :])
        return _checked(function(*args, **kwargs))

    return measured


def _bounded_format(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `format`."""

    @functools.wraps(function)
    def measured(text: Any, *args: Any, **kwargs: Any) -> Any:
        _check_format(str(text), [*args, *kwargs.values()])
        return _bounded(function)(text, *args, **kwargs)

    return measured


def _bounded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test that charges for what it compares or looks through: `select` and `reject` call it for each item."""

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        if _budget.get(None) is not None:
            for value in args:
                _searched(value)
        return function(*args, **kwargs)

    return measured


def _check_total(lengths: Iterable[int]) -> None:
    if sum(lengths) > MOST_TEXT:
        raise TooMuch(f"it builds a text of more than {MOST_TEXT} characters")


def _check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            _check_total([len(value) * max(times, 0)])
    _checked(left)
    _checked(right)


def _check_format(text: str, arguments: Sequence[Any]) -> None:
    """Check a text that is a format: a width (`%99999999d`, `{:99999999}`) allocates as much in each field."""
    # Widths of `%` stand before and behind a point, those of `{}` behind a colon; both may be arguments (`*`, `{:{}}`).
    widths = re.findall(r"%(?:\([^)]*\))?[#0 +-]*(\d*)\.?(\d*)|\{[^{}:]*:[^{}\d]*(\d*)\.?(\d*)", text)
    inside = re.search(r"%[^%a-zA-Z]*\*", text) or re.search(r"\{[^{}:]*:[^{}]*\{", text.replace("{{", ""))
    given = [value for value in arguments if isinstance(value, int)] if inside else []
    if any(len(width) > 3 for field in widths for width in field) or any(value > WIDEST_FIELD for value in given):
        raise TooMuch("it formats to an absurd width")
    fields = text.count("%") + text.count("{")
    _check_total([len(text), fields * (WIDEST_FIELD + max(map(_written, arguments), default=0))])


def _check_arguments(owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of a call: no text that multiplies without end."""
    given = [*args, *kwargs.values()]
    for value in given:
        _searched(_checked(value))
    if isinstance(owner, str):
        _searched(owner)
        texts = [len(value) for value in given if isinstance(value, str)]
        _check_total([len(owner) + (len(owner) + 1) * longest for longest in texts[-1:]])
    for value in [owner, *given]:
        if isinstance(value, (list, tuple)):
            # A join writes every item and a separator between each two.
            separator = max([len(text) for text in [owner, *given] if isinstance(text, str)], default=0)
            _check_total((len(item) if isinstance(item, str) else 1) + separator for item in value)
