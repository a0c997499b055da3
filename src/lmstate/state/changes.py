"""A change of a state as data: everything is computed first, then made so at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Hashable, Sequence
from itertools import starmap
from operator import call, setitem
from typing import Any, TypeVar

from torch import Tensor

Item = TypeVar("Item")
Call = tuple[Any, ...]
"""A function of C and its arguments."""


class Changes:
    """Assignments that an operation comes to, collected from every layer and made by one call of `apply`.

    A part that adds to it first computes and allocates all that it needs, and leaves its owner as it is: an exception
    on the way has changed nothing. `apply` then runs no line of Python, so that no signal handler comes between two
    assignments, and none of them computes, allocates or can fail. Values must be plain attributes, not properties.
    """

    def __init__(self) -> None:
        self._batches: dict[Hashable, tuple[Callable[[Sequence[Any]], Call], list[Any]]] = {}
        self._copies: list[Call] = []
        self._assignments: list[Call] = []

    def assign(self, owner: object, name: str, value: object) -> None:
        """`owner.name = value`."""
        self._assignments.append((setattr, owner, name, value))

    def put(self, items: list[Any], index: int, value: object) -> None:
        """`items[index] = value`"""
        self._assignments.append((setitem, items, index, value))

    def clear(self, items: list[Any]) -> None:
        """Empty a list."""
        self._assignments.append((list.clear, items))

    def copy(self, target: Tensor, source: Tensor) -> None:
        """Write a tensor over another of its shape: for the tensors of a static state, which never move."""
        self._copies.append((Tensor.copy_, target.detach(), source.detach().to(target)))

    def batch(self, key: Hashable, prepare: Callable[[Sequence[Item]], Call], item: Item) -> None:
        """Have the items of all layers under one key changed in place by one native call, `prepare(items)`.

        It comes before everything else: if it raises, nothing has changed.
        """
        self._batches.setdefault(key, (prepare, []))[1].append(item)

    def apply(self) -> None:
        """Make it so. A fault in the middle of copies, which may be repeated, has them made again."""
        first = [prepare(items) for prepare, items in self._batches.values()]
        rest = self._copies + self._assignments
        if not self._copies:
            _run(first + rest)
            return
        _run(first)
        try:
            _run(rest)
        except Exception:
            _run(rest)


def _run(calls: list[Call]) -> None:
    deque(starmap(call, calls), maxlen=0)  # consumed by C alone
