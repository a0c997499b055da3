"""Native bodies for the processor: C without libtorch, one library for each variant, loaded by ctypes.

The libraries share torch's OpenMP pool: they ask for `libgomp.so.1`, which torch has loaded already.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

from lmstate.ops.cpu.library import Library
from lmstate.ops.cpu.sources import digest

VARIANTS = ("portable", "avx2", "avx512")
"""From the plainest to the fastest; a processor that runs one runs those before it."""


class NativeError(RuntimeError):
    """A native variant cannot be used here; the message says why."""


def path_of(variant: str) -> Path:
    return Path(__file__).with_name(f"native_{variant}.so")


def built(variant: str) -> bool:
    """Whether there is a library of this variant, and from the sources that lie here."""
    if not path_of(variant).exists():
        return False
    try:
        sources = ctypes.CDLL(str(path_of(variant))).lmstate_sources
    except AttributeError:  # from before libraries said so
        return False
    sources.restype = ctypes.c_uint64
    return sources() == _digest()


@lru_cache
def _digest() -> int:
    return digest(Path(__file__).parent)


def usable() -> tuple[str, ...]:
    """The variants that were built from these sources and that this processor runs, the fastest last."""
    if not built("portable"):
        return ()
    level = ctypes.CDLL(str(path_of("portable"))).lmstate_processor()
    return tuple(variant for variant in VARIANTS[: level + 1] if built(variant))


def open_library(variant: str) -> Library:
    """Load a variant. NativeError if it was not built from these sources, or if this processor does not run it."""
    if not built(variant):
        raise NativeError(
            f"the native variant {variant!r} was not built, or from other sources than lie here: install the package "
            f"(again) where a C compiler is found"
        )
    if variant not in usable():
        raise NativeError(f"this processor does not run the native variant {variant!r}; it runs {', '.join(usable())}")
    return Library(variant, ctypes.CDLL(str(path_of(variant))))


__all__ = ["VARIANTS", "Library", "NativeError", "open_library", "usable"]
