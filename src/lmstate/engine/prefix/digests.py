"""Names of the beginnings of texts: the same on any machine, and telling nothing of the text."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterator, Sequence

import numpy as np

from lmstate.errors import SnapshotError

FINE, COARSE = 64, 1024  # tokens between two beginnings that have names, in the first COARSE ones and beyond
NARROW = 2**31  # numbers from here on, those of pictures, do not fit int32
WIDE = b"\xff\xff\xff\xff"  # no token id: int64 follow


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as int32, little-endian; where one is a number of a picture, `WIDE` and all of them as int64."""
    ids = np.asarray(tokens, dtype=np.int64)
    return WIDE + ids.astype("<i8").tobytes() if (ids >= NARROW).any() else ids.astype("<i4").tobytes()


def ends(length: int) -> Iterator[int]:
    """Tokens of the beginnings of a text of this length that have names, fewer first."""
    yield from range(FINE, min(COARSE, length + 1), FINE)
    yield from range(COARSE, length + 1, COARSE)


def unpacked(data: bytes) -> array[int]:
    """Inverse of `packed`. Raises SnapshotError for bytes that it cannot have returned."""
    wide = data.startswith(WIDE)
    if (len(data) - 4) % 8 if wide else len(data) % 4:
        raise SnapshotError("a stored text is not a list of token ids")
    ids = np.frombuffer(data, dtype="<i8", offset=4) if wide else np.frombuffer(data, dtype="<i4")
    if (ids < 0).any():
        raise SnapshotError("a stored text has negative token ids")
    return array("q", ids.astype(np.int64).tobytes())


def beginnings(tokens: Sequence[int], salt: str = "") -> Iterator[str]:
    """SHA-256 of a salt and the beginnings of a text, shorter ones first."""
    digest, done = hashlib.sha256(salt.encode()), 0
    for end in ends(len(tokens)):
        digest.update(packed(tokens[done:end]))
        done = end
        yield digest.hexdigest()
