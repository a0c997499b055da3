"""The native libraries that were built, and those that this processor runs.

The libraries share torch's OpenMP pool: they ask for `libgomp.so.1`, which torch has loaded already.
"""

from __future__ import annotations

import ctypes
from functools import lru_cache
from pathlib import Path

from lmstate.ops.cpu import abi
from lmstate.ops.cpu.sources import digest

VARIANTS = ("portable", "avx2", "avxvnni", "avx512")
"""From the plainest to the fastest."""


class NativeError(RuntimeError):
    """A native variant cannot be used here; the message says why."""


def path_of(variant: str) -> Path:
    return Path(__file__).with_name(f"native_{variant}.so")


def built(variant: str) -> bool:
    """Whether there is a library of this variant, and from the sources that are here."""
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
    return digest(Path(__file__).parent / "csrc")


def usable() -> tuple[str, ...]:
    """The variants that were built from these sources and that this processor runs, the fastest last."""
    if not built("portable"):
        return ()
    runs = ctypes.CDLL(str(path_of("portable"))).lmstate_processor()
    return tuple(variant for i, variant in enumerate(VARIANTS) if runs >> i & 1 and built(variant))


def open_cdll(variant: str) -> ctypes.CDLL:
    """Load a variant. NativeError where it was not built from these sources, this processor does not run it, or its
    argument structures are not those of `abi`."""
    if not built(variant):
        raise NativeError(
            f"the native variant {variant!r} was not built, or from other sources than lie here: install the package "
            f"(again) where a C compiler is found"
        )
    if variant not in usable():
        raise NativeError(f"this processor does not run the native variant {variant!r}; it runs {', '.join(usable())}")
    library = ctypes.CDLL(str(path_of(variant)))
    if differing := abi.differing(library):
        raise NativeError(
            f"the native variant {variant!r} lays out its arguments otherwise than this package packs them: "
            f"{', '.join(differing)}; install the package again"
        )
    return library
