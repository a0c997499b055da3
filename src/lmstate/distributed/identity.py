"""The program and the operations of a process: ranks with other ones may compute other bits."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from lmstate.ops import dispatch

DECIDING = ("avx512_bf16", "amx_bf16", "amx_int8", "avx512_vnni", "avx_vnni")
"""Capabilities of a processor by which the bodies of one variant choose how they add."""


def identity() -> str:
    """The version of lmstate, the variant of the operations, and the capabilities that decide on bits."""
    name = dispatch.choice().name
    return f"lmstate {_version()} with {' '.join([name, *_capabilities(name)])}"


def _version() -> str:
    try:
        return version("lmstate")
    except PackageNotFoundError:  # a source tree that was not installed
        return "of sources"


def _capabilities(variant: str) -> list[str]:
    """Those of this processor; none for a variant below them."""
    if variant not in ("avxvnni", "avx512"):
        return []
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    found = dict(line.partition(":")[::2] for line in reversed(lines) if ":" in line)  # of the first processor
    words = {name.strip(): value.split() for name, value in found.items()}
    return [*words.get("vendor_id", []), *(name for name in DECIDING if name in words.get("flags", []))]
