"""Sampled tokens, found again when a client sends an answer back in its own words.

A client re-serializes the JSON of a call, and a tokenizer may cut a text in another way than the model did: then no
stored prefix fits. So the tokens of an answer are kept beside a digest of the conversation up to it.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any


@dataclass(frozen=True)
class Sampled:
    """The tokens of a prompt and its answer, and the token that ended the answer (None: it was cut off)."""

    tokens: Sequence[int]
    end: int | None


class Replay:
    """Sampled answers by conversation, the latest ones, up to `most` tokens in all. Thread-safe."""

    def __init__(self, most: int = 4_000_000) -> None:
        self._most = most
        self._count = 0
        self._known: OrderedDict[bytes, Sampled] = OrderedDict()
        self._lock = Lock()

    def put(self, key: bytes, sampled: Sampled) -> None:
        compact = Sampled(array("q", sampled.tokens), sampled.end)
        with self._lock:
            if (old := self._known.pop(key, None)) is not None:
                self._count -= len(old.tokens)
            self._known[key] = compact
            self._count += len(compact.tokens)
            while self._count > self._most:
                _, gone = self._known.popitem(last=False)
                self._count -= len(gone.tokens)

    def get(self, key: bytes) -> Sampled | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)


def chain(key: bytes, messages: Sequence[Any]) -> list[bytes]:
    """A digest for each beginning of a conversation, its first n messages, n from 1."""
    links, last = [], hashlib.blake2b(key, digest_size=16).digest()
    for message in messages:
        last = link(last, message)
        links.append(last)
    return links


def link(last: bytes, message: Any) -> bytes:
    """The digest of a conversation that goes on with one more message."""
    text = json.dumps(message, sort_keys=True, ensure_ascii=False)
    return hashlib.blake2b(last + text.encode("utf-8", "surrogatepass"), digest_size=16).digest()
