"""Chat templates: Jinja programs that come with a checkpoint and are trusted with nothing.

They run in Jinja's sandbox with the functions that templates in use expect, and within a budget: so many loop steps, so
many characters. The language can build a value of any size out of a few letters in a dozen ways; each is bounded where
it is computed, so a template fails with a `ModelError` instead of filling the memory.
"""

from __future__ import annotations

import functools
import inspect
import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from datetime import datetime
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from lmstate.errors import ModelError

MOST_SOURCE, MOST_TEXT, MOST_STEPS, WIDEST = 2**20, 2**24, 2 * 10**6, 10**5
_steps_left: ContextVar[int] = ContextVar("steps_left", default=MOST_STEPS)


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
        token = _steps_left.set(MOST_STEPS)
        pieces, length = [], 0
        try:
            for piece in self._template.generate(messages=[dict(message) for message in messages], **variables):
                length += len(piece)
                if length > MOST_TEXT:
                    raise TooMuch(f"it writes more than {MOST_TEXT} characters")
                pieces.append(piece)
        except (jinja2.TemplateError, ArithmeticError, LookupError, TypeError, ValueError, AttributeError) as error:
            raise ModelError(f"the model's chat template does not accept this conversation: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise ModelError("the model's chat template asks for more memory than a conversation can need") from error
        finally:
            _steps_left.reset(token)
        return "".join(pieces)


class _Environment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the globals of chat templates, and bounds on what can be computed."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols])
        self.filters = {name: _bounded(function) for name, function in self.filters.items()}
        self.filters |= {"tojson": _bounded(_tojson), "_counted": _counted, "_checked": _checked, "_joined": _joined}
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
        _check_arguments(getattr(inspect.unwrap(__obj), "__self__", None), args, kwargs)
        return _checked(super().call(__context, __obj, *args, **kwargs))


class _Bounds(NodeTransformer):
    """Routes loops, `~`, lists and captured blocks of a parsed template through the filters that count and measure."""

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
    """As JSON that is read by a model, without the HTML escapes of Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _strftime_now(format: str) -> str:
    if len(format) > 256:
        raise TooMuch("its date format is too long")
    return datetime.now().strftime(format)


def _charge(steps: int) -> None:
    left = _steps_left.get() - steps
    if left < 0:
        raise TooMuch(f"it takes more than {MOST_STEPS} steps")
    _steps_left.set(left)


def _counted(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, each charged to the budget of the render."""
    for item in items:
        _charge(1)
        yield item


def _checked(value: Any) -> Any:
    """The value itself, if its size is reasonable.

    Containers are charged for all that is in them, so that one that holds itself twice, which holds itself twice, ...
    cannot be built: whatever walks through it would never end.
    """
    if isinstance(value, (list, tuple, dict)):
        open_: list[Any] = [value]
        while open_:
            inside = open_.pop()
            _charge(len(inside) + 1)
            items = inside.values() if isinstance(inside, dict) else inside
            open_ += [item for item in items if isinstance(item, (list, tuple, dict))]
    if isinstance(value, str) and len(value) > MOST_TEXT:
        raise TooMuch(f"it builds a text of {len(value)} characters")
    if isinstance(value, int) and value.bit_length() > 1024:
        raise TooMuch("it computes with absurdly large numbers")
    return value


def _joined(parts: list[Any]) -> str:
    texts = [str(_checked(part)) for part in parts]
    _check_total(map(len, texts))
    return "".join(texts)


def _bounded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter whose arguments and result are measured. `wraps` keeps the marks by which Jinja passes a context."""
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        _check_arguments(args[leading] if len(args) > leading else None, args[leading + 1 :], kwargs)
        return _checked(function(*args, **kwargs))

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
    """Widths in formats (`%99999999d`, `{:99999999}`) allocate as many characters."""
    if re.search(r"[%{:][^\s]{0,99}?\d{6}", text) or (
        "*" in text and any(isinstance(a, int) and a > WIDEST for a in arguments)
    ):
        raise TooMuch("it formats to an absurd width")


def _check_arguments(owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of a call: no width or count beyond reason, no text that multiplies without end."""
    given = [*args, *kwargs.values()]
    if isinstance(owner, str):
        if any(isinstance(value, int) and value > WIDEST for value in given):
            raise TooMuch("it passes an absurd width to a function of texts")
        texts = [len(value) for value in given if isinstance(value, str)]
        _check_total([len(owner) + (len(owner) + 1) * longest for longest in texts[-1:]])
        if given and re.search(r"[{%]", owner):
            _check_format(owner, ())
    for value in [owner, *given]:
        if isinstance(value, (list, tuple)):
            # A join writes every item and a separator between each two.
            separator = max([len(text) for text in [owner, *given] if isinstance(text, str)], default=0)
            _check_total((len(item) if isinstance(item, str) else 1) + separator for item in value)
