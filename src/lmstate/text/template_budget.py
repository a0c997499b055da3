"""The budget of a chat template's render: steps, characters and seconds, charged by whatever makes or reads a value."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from time import monotonic
from typing import Any

import jinja2
from jinja2.utils import Namespace

MOST_TEXT, MOST_STEPS = 2**24, 2 * 10**6
WIDEST_FIELD = 1000  # characters of a number or a text that a format pads
MOST_DIGITS = 100  # after the point, of a number that is rounded
MOST_CHARACTERS = 2**27
"""Characters and bytes that one render may create, those that are thrown away included."""
SECONDS = 10.0


@dataclass
class RenderBudget:
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


BUDGET: ContextVar[RenderBudget] = ContextVar("budget")


class TooMuch(jinja2.TemplateError):
    """The template asked for more than the budget."""


def counted(items: Iterable[Any]) -> Iterator[Any]:
    """The items of a loop, each charged to the budget of the render."""
    budget = BUDGET.get()
    for item in items:
        budget.charge()
        yield item


def searched(value: Any) -> Any:
    """A value that another is compared with or looked for in."""
    BUDGET.get().charge(1 + len(value) // 64 if isinstance(value, (str, list, tuple)) else 1)
    return value


def checked(value: Any) -> Any:
    """The value itself, charged to the budget, if its size is reasonable.

    Containers are charged for all that is in them, so that one that holds itself twice, which holds itself twice, ...
    cannot be built or printed: whatever walks through it would never end.
    """
    if value is None or isinstance(value, (jinja2.Undefined, bool, float)):
        return value
    budget = BUDGET.get(None)
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


def written_length(value: Any, indent: int = 0) -> int:
    """Characters of a value as text, at least, and no more than it takes to be too many.

    `indent`: those that are before an item for each container around it.
    """
    budget, total, waiting = BUDGET.get(None), 0, [(value, 0)]
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


def printed(value: Any) -> Any:
    """A value that a template prints: the text of a container is made at once."""
    if isinstance(value, CONTAINERS):
        check_total([written_length(value)])
    return checked(value)


def joined(parts: list[Any]) -> str:
    check_total(map(written_length, parts))
    texts = [str(checked(part)) for part in parts]
    check_total(map(len, texts))
    return "".join(texts)


def bounded(function: Callable[..., Any], writes: bool = False, walks: bool = False) -> Callable[..., Any]:
    """A filter that is measured: arguments, result, items. `wraps` keeps the marks by which Jinja passes a context."""
    leading = 1 if hasattr(function, "jinja_pass_arg") else 0

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        if writes:
            check_total(map(written_length, args[leading:]))
        check_arguments(args[leading] if len(args) > leading else None, args[leading + 1 :], kwargs)
        if walks and len(args) > leading and isinstance(args[leading], Iterable):
            args = (*args[:leading], counted(args[leading]), *args[leading + 1 :])
        return checked(function(*args, **kwargs))

    return measured


def bounded_format(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter `format`."""

    @functools.wraps(function)
    def measured(text: Any, *args: Any, **kwargs: Any) -> Any:
        check_format(str(text), [*args, *kwargs.values()])
        return bounded(function)(text, *args, **kwargs)

    return measured


def bounded_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """A test that charges for what it compares or looks through: `select` and `reject` call it for each item."""

    @functools.wraps(function)
    def measured(*args: Any, **kwargs: Any) -> Any:
        if BUDGET.get(None) is not None:
            for value in args:
                searched(value)
        return function(*args, **kwargs)

    return measured


def check_total(lengths: Iterable[int]) -> None:
    if sum(lengths) > MOST_TEXT:
        raise TooMuch(f"it builds a text of more than {MOST_TEXT} characters")


def check_product(left: Any, right: Any) -> None:
    for value, times in ((left, right), (right, left)):
        if isinstance(value, (str, list, tuple)) and isinstance(times, int):
            check_total([len(value) * max(times, 0)])
    checked(left)
    checked(right)


def check_format(text: str, arguments: Sequence[Any]) -> None:
    """Check a text that is a format: a width (`%99999999d`, `{:99999999}`) allocates as much in each field."""
    # Widths of `%` are before and after a point, those of `{}` after a colon; both may be arguments (`*`, `{:{}}`).
    widths = re.findall(r"%(?:\([^)]*\))?[#0 +-]*(\d*)\.?(\d*)|\{[^{}:]*:[^{}\d]*(\d*)\.?(\d*)", text)
    inside = re.search(r"%[^%a-zA-Z]*\*", text) or re.search(r"\{[^{}:]*:[^{}]*\{", text.replace("{{", ""))
    given = [value for value in arguments if isinstance(value, int)] if inside else []
    if any(len(width) > 3 for field in widths for width in field) or any(value > WIDEST_FIELD for value in given):
        raise TooMuch("it formats to an absurd width")
    fields = text.count("%") + text.count("{")
    check_total([len(text), fields * (WIDEST_FIELD + max(map(written_length, arguments), default=0))])


def check_arguments(owner: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Check the arguments of a call: no text that multiplies without end."""
    given = [*args, *kwargs.values()]
    for value in given:
        searched(checked(value))
    if isinstance(owner, str):
        searched(owner)
        texts = [len(value) for value in given if isinstance(value, str)]
        check_total([len(owner) + (len(owner) + 1) * longest for longest in texts[-1:]])
    for value in [owner, *given]:
        if isinstance(value, (list, tuple)):
            # A join writes every item and a separator between each two.
            separator = max([len(text) for text in [owner, *given] if isinstance(text, str)], default=0)
            check_total((len(item) if isinstance(item, str) else 1) + separator for item in value)
