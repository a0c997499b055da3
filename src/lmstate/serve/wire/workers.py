"""The threads beside an event loop, and the memory that they leave."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from threading import get_ident
from typing import Any, TypeVar

T = TypeVar("T")

TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3  # parameters of `mallopt`
THRESHOLDS = {TRIM_THRESHOLD: 2**26, MMAP_THRESHOLD: 2**25}  # the largest that glibc comes to by itself
ANCHOR = 2**16  # bytes, the least that has glibc look at the end of an arena when they are freed


def _glibc() -> ctypes.CDLL | None:
    """The C library, if it is glibc: others give memory back by themselves."""
    try:
        library = ctypes.CDLL(None)
        library.malloc.restype, library.malloc.argtypes = ctypes.c_void_p, [ctypes.c_size_t]
        library.free.restype, library.free.argtypes = None, [ctypes.c_void_p]
    except (AttributeError, OSError, TypeError):
        return None
    return library if hasattr(library, "gnu_get_libc_version") else None


GLIBC = _glibc()


class Workers(ThreadPoolExecutor):
    """Threads whose free memory `return_memory` gives back, all of it.

    Each thread has an arena, at whose end glibc keeps up to 64 MiB, also from `malloc_trim`. It gives them back when a
    block of the arena is freed while the threshold is low. Each thread has one for this, its anchor.
    """

    def submit(self, function: Callable[..., T], /, *arguments: Any, **options: Any) -> Future[T]:
        return super().submit(_anchored, function, *arguments, **options)


_anchors: dict[int, int] = {}  # addresses, by thread


def _anchored(function: Callable[..., T], *arguments: Any, **options: Any) -> T:
    try:
        return function(*arguments, **options)
    finally:
        if GLIBC is not None and get_ident() not in _anchors:
            _anchors[get_ident()] = GLIBC.malloc(ANCHOR)


def return_memory() -> None:
    """Give the free memory of the C allocator back to the system. The thresholds are constant from then on."""
    if GLIBC is None:
        return
    GLIBC.mallopt(TRIM_THRESHOLD, ANCHOR)
    while _anchors:
        GLIBC.free(_anchors.popitem()[1])
    for name, value in THRESHOLDS.items():
        GLIBC.mallopt(name, value)
    GLIBC.malloc_trim(0)
