"""A bound on how deep values from outside are nested: whatever reads them recurses, and the stack has an end."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

MOST_NESTED = 256
"""Arrays and objects inside of each other in the messages of a conversation."""
SCALARS = frozenset((str, int, float, bool, type(None)))  # most of what there is, and quicker to know
NESTING = (dict, list, tuple, Mapping)


def is_deeper(value: Any, most: int) -> bool:
    """Whether a value is nested more than `most` deep, looked at level by level: it may be deeper than the stack."""
    level = [value] if isinstance(value, NESTING) else []
    for _ in range(most):
        inside = [
            child
            for parent in level
            for child in (parent if isinstance(parent, list | tuple) else parent.values())
            if type(child) not in SCALARS and isinstance(child, NESTING)
        ]
        if not inside:
            return False
        level = list({id(child): child for child in inside}.values())  # each once: a list may hold itself twice
    return True


def refuse_deep(messages: Any, what: str = "the messages") -> None:
    """Raises ValueError for messages that are nested too deep."""
    if is_deeper(messages, MOST_NESTED):
        raise ValueError(f"{what} are nested more than {MOST_NESTED} deep, which no conversation needs")
