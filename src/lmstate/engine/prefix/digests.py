"""Names of the beginnings of texts: the same on any machine, and telling nothing of the text."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from lmstate.errors import SnapshotError

FINE, COARSE = 64, 1024  # tokens between two beginnings that have names, in the first COARSE ones and beyond


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as int32, little-endian."""
    return np.asarray(tokens, dtype=np.int64).astype("<i4").tobytes()


def ends(length: int) -> Iterator[int]:
    """Tokens of the beginnings of a text of this length that have names, fewer first."""
    yield from range(FINE, min(COARSE, length + 1), FINE)
    yield from range(COARSE, length + 1, COARSE)


def unpacked(data: bytes) -> array[int]:
    """Inverse of `packed`. Raises SnapshotError for bytes that it cannot have returned."""
    if len(data) % 4:
        raise SnapshotError("a stored text is no list of token ids")
    ids = np.frombuffer(data, dtype="<i4")
    if (ids < 0).any():
        raise SnapshotError("a stored text has negative token ids")
    return array("q", ids.astype(np.int64).tobytes())


def beginnings(tokens: Sequence[int], salt: str = "") -> Iterator[str]:
    """SHA-256 of a salt and the beginnings of a text, shorter ones first."""
    data, digest, done = packed(tokens), hashlib.sha256(salt.encode()), 0
    for end in ends(len(tokens)):
        digest.update(data[4 * done : 4 * end])
        done = end
        yield digest.hexdigest()
