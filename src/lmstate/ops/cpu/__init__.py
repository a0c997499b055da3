"""Native bodies for the processor: C without libtorch, one library for each variant, loaded by ctypes."""

from __future__ import annotations

from lmstate.ops.cpu.library import Library
from lmstate.ops.cpu.variants import VARIANTS, NativeError, open_cdll, usable


def open_library(variant: str) -> Library:
    """The bodies of a variant. NativeError as in `open_cdll`."""
    return Library(variant, open_cdll(variant))


__all__ = ["VARIANTS", "Library", "NativeError", "open_library", "usable"]
