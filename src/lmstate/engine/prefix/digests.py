"""Names of the beginnings of texts: the same on any machine, and telling nothing of the text."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from lmstate.engine.prefix.store import PrefixStore

FINE, COARSE = 64, 1024  # tokens between two beginnings that have names, in the first COARSE ones and beyond


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as int32, little-endian."""
    return np.asarray(tokens, dtype=np.int64).astype("<i4").tobytes()


def beginnings(tokens: Sequence[int]) -> Iterator[str]:
    """SHA-256 of the beginnings of a text, shorter ones first."""
    data, digest, done = packed(tokens), hashlib.sha256(), 0
    for end in (*range(FINE, COARSE, FINE), *range(COARSE, len(tokens) + 1, COARSE)):
        if end > len(tokens):
            return
        digest.update(data[4 * done : 4 * end])
        done = end
        yield digest.hexdigest()


def resident(prefixes: PrefixStore, limit: int) -> list[str]:
    """The digests of the beginnings that memory has, of the texts that were last used first; the longest first."""
    found: dict[str, None] = {}
    leaves = [node for _, node in prefixes.nodes() if not node.children]
    for leaf in sorted(leaves, key=lambda node: node.used, reverse=True):
        if len(found) >= limit:
            break
        held = 0
        for node in leaf.path():
            if node.run is None:
                break
            held = node.end
        found.update(dict.fromkeys([*beginnings(leaf.all_tokens()[:held])][::-1]))
    return list(found)[: max(0, limit)]
