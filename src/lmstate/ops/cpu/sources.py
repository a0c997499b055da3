"""Digest of the C sources that a native library was built from: one of older sources would misread its arguments.

The build reads this file by itself, so it imports nothing of the package.
"""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path


def digest(folder: Path) -> int:
    """64 bits of a hash over the C files below it, and their paths; what the build writes into a library."""
    whole = sha256()
    for path in sorted([*folder.rglob("*.c"), *folder.rglob("*.h")]):
        whole.update(
            path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes().replace(b"\r\n", b"\n") + b"\0"
        )
    return int.from_bytes(whole.digest()[:8], "big")
