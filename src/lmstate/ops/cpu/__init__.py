"""Native bodies for the processor: C without libtorch, one library for each variant, loaded by ctypes.

The libraries share torch's OpenMP pool: they ask for `libgomp.so.1`, which torch has loaded already.
"""

from __future__ import annotations

import ctypes
from pathlib import Path

from lmstate.ops.cpu.library import Library

VARIANTS = ("portable", "avx2", "avx512")
"""From the plainest to the fastest; a processor that runs one runs those before it."""


class NativeError(RuntimeError):
    """A native variant cannot be used here; the message says why."""


def path_of(variant: str) -> Path:
    return Path(__file__).with_name(f"native_{variant}.so")


def usable() -> tuple[str, ...]:
    """The variants that were built and that this processor runs, the fastest last."""
    if not path_of("portable").exists():
        return ()
    level = ctypes.CDLL(str(path_of("portable"))).lmstate_processor()
    return tuple(variant for variant in VARIANTS[: level + 1] if path_of(variant).exists())


def open_library(variant: str) -> Library:
    """Load a variant. NativeError if it was not built, or if this processor does not run it."""
    if not path_of(variant).exists():
        raise NativeError(
            f"the native variant {variant!r} was not built: install the package where a C compiler is found"
        )
    if variant not in usable():
        raise NativeError(f"this processor does not run the native variant {variant!r}; it runs {', '.join(usable())}")
    return Library(variant, ctypes.CDLL(str(path_of(variant))))


__all__ = ["VARIANTS", "Library", "NativeError", "open_library", "usable"]
