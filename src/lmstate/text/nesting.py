"""A bound on how deep values from outside are nested: whatever reads them recurses, and the stack has an end."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

MOST_NESTED = 256
"""Arrays and objects inside of each other in the messages of a conversation."""
SCALARS = frozenset((str, int, float, bool, type(None)))  # most of what there is, and quicker to know
NESTING = (dict, list, tuple, Mapping)


def values_in(value: Any) -> Collection[Any]:
    """The values in an array or an object."""
    return value if isinstance(value, list | tuple) else value.values()


def is_deeper(
    value: Any,
    most: int,
    nesting: tuple[type, ...] = NESTING,
    inside: Callable[[Any], Collection[Any]] = values_in,
) -> bool:
    """Whether a value is nested more than `most` deep, looked at level by level: it may be deeper than the stack.

    nesting  types of values that have others `inside`
    """
    level = [value] if isinstance(value, nesting) else []
    for _ in range(most):
        found = [
            child
            for parent in level
            for child in inside(parent)
            if type(child) not in SCALARS and isinstance(child, nesting)
        ]
        if not found:
            return False
        level = list({id(child): child for child in found}.values())  # each once: a list may hold itself twice
    return True


def refuse_deep(messages: Any, what: str = "the messages") -> None:
    """Raises ValueError for messages that are nested too deep."""
    if is_deeper(messages, MOST_NESTED):
        raise ValueError(f"{what} are nested more than {MOST_NESTED} deep, which no conversation needs")
