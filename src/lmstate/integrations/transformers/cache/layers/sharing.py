"""Memory that a cache and its forks share until one of them writes."""

from __future__ import annotations

import threading
from typing import Any
from weakref import WeakSet

_LOCK = threading.Lock()  # forks may go on in threads of their own


class _Group:
    """All holders of the same memory, and how many of its positions any of them has written."""

    def __init__(self, first: Sharing) -> None:
        self.holders: WeakSet[Sharing] = WeakSet((first,))
        self.written = 0


class Sharing:
    """One holder's part in memory that its deep copies hold too.

    The memory itself is the owner's business: it is written only where `alone` or `claim` allows that, and after
    `leave` the owner writes into memory of its own.
    """

    def __init__(self) -> None:
        self._group = _Group(self)

    @property
    def alone(self) -> bool:
        """Whether no other holder is left."""
        return len(self._group.holders) == 1

    def claim(self, start: int, stop: int) -> bool:
        """Whether positions start..stop are this holder's to write: no other holder is left, or none wrote this far."""
        with _LOCK:
            if start < self._group.written and not self.alone:
                return False
            self._group.written = stop
            return True

    def leave(self, written: int = 0) -> None:
        """Share nothing anymore; `written` positions of the memory that comes instead are written."""
        with _LOCK:
            self._group.holders.discard(self)
            self._group = _Group(self)
            self._group.written = written

    def __deepcopy__(self, memo: dict[int, Any]) -> Sharing:
        twin = Sharing()
        with _LOCK:
            twin._group = self._group
            twin._group.holders.add(twin)
        return twin
