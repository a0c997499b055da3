"""A store that several machines share: Redis, or an object store (S3, GCS, Azure, a local folder) through obstore.

    <namespace>/index/<key>      which text an entry is of, and the keys of what it hangs on
    <namespace>/prefix/<hash>    the keys of entries of texts with this beginning, the newest first
    <namespace>/entries/<key>    a checksum, the number of layers, a safetensors file

and records, see `BlobRecords`.

How much it may hold is the store's own affair (`maxmemory`, a lifecycle rule): lost entries are computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import islice
from pathlib import Path

from lmstate.engine.prefix.digests import beginnings, packed, unpacked
from lmstate.engine.prefix.parts import Layers
from lmstate.engine.tiers.blob_records import BlobRecords
from lmstate.engine.tiers.blobs import Blobs
from lmstate.engine.tiers.record_store import joined, parted
from lmstate.engine.tiers.seal import SealedBlobs, store_key
from lmstate.engine.tiers.tier import (
    MOST_LAYERS,
    Entry,
    Tier,
    from_bytes,
    to_bytes,
)
from lmstate.errors import SnapshotError

MOST_ENTRIES = 50_000  # of the index that are read at the start
KEYS = 8  # entries that are remembered of a beginning
DEEPEST = 4  # beginnings of a text, the longest that are known, whose entries are taken
MOST_FOUND = 64  # entries that one text's lookup reads the index of
MOST_TOLD = 2**26  # bytes of a blob of the index


class SharedTier(Tier):
    """Entries and sessions as blobs. Later entries of other processes are looked up where a text is not known."""

    name = "shared"
    looks_up = True

    def __init__(self, blobs: Blobs, namespace: str) -> None:
        self._blobs: Blobs = SealedBlobs(blobs, key) if (key := store_key()) else blobs
        super().__init__(namespace, BlobRecords(self._blobs))
        self._place = hashlib.sha256(self.namespace.encode()).hexdigest()[:16]
        self.start()

    def check_access(self) -> None:
        name = f"{self._place}/access"
        self._blobs.put(name, b"lmstate")
        self._blobs.get(name, MOST_TOLD)
        self._blobs.delete(name)

    def entries(self) -> Iterable[tuple[str, Entry]]:
        for place in self._places("index", MOST_ENTRIES):
            if (blob := self._blobs.get(place, MOST_TOLD)) is not None and (found := self._entry(blob)) is not None:
                yield found[:2]

    def _entry(self, blob: bytes) -> tuple[str, Entry, list[str]] | None:
        """(key, entry, the keys of what it hangs on) of a blob of the index; None for one that is damaged."""
        try:
            told, tokens = parted(blob)
            place = int(told["frequency_key"]), int(told["start"])
            entry = Entry.labelled(str(told["kind"]), *place, unpacked(tokens))
            if told["key"] == (key := entry.key(self.namespace)):
                return key, entry, [str(above) for above in told.get("above", ())]
        except (SnapshotError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            pass
        self.counts["quarantined"] += 1
        return None

    def find(self, tokens: Sequence[int], salt: str = "") -> list[tuple[str, Entry]]:
        names = self._beginnings(tokens, salt)
        low, high = 0, len(names)  # who writes of a beginning writes of all shorter ones
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._blobs.get(names[middle], MOST_TOLD) is not None else (low, middle)
        waiting: list[str] = []
        for name in names[max(0, low - DEEPEST) : low]:
            waiting += self._pointed(name)
        found: dict[str, Entry] = {}
        asked: set[str] = set()
        while waiting and len(asked) < MOST_FOUND:
            if (key := waiting.pop()) in asked:
                continue
            asked.add(key)
            blob = self._blobs.get(f"{self._place}/index/{key}", MOST_TOLD)
            if blob is not None and (known := self._entry(blob)) is not None and known[0] == key:
                found[key] = known[1]
                waiting += known[2]
        return list(found.items())

    def _beginnings(self, tokens: Sequence[int], salt: str) -> list[str]:
        """The names of the beginnings of a text that are looked up, shorter ones first."""
        return [f"{self._place}/prefix/{digest}" for digest in beginnings(tokens, salt)]

    def _pointed(self, name: str) -> list[str]:
        """The keys under a beginning; none if there is something else."""
        try:
            keys = json.loads(self._blobs.get(name, MOST_TOLD) or b"[]")
        except (ValueError, RecursionError):
            return []
        return [key for key in keys if isinstance(key, str)][:KEYS] if isinstance(keys, list) else []

    def read(self, key: str) -> Layers:
        name = f"{self._place}/entries/{key}"
        blob = self._blobs.get(name, self.most_read + 1)
        if blob is None:
            raise SnapshotError("it is there no longer")
        self.check_size(len(blob))
        body = memoryview(blob)[32:]
        layers = int.from_bytes(body[:4], "little")
        if hashlib.sha256(body).digest() != blob[:32] or layers > MOST_LAYERS:
            self.counts["quarantined"] += 1
            self._blobs.delete(name)
            raise SnapshotError(f"{name} is damaged: its checksum is another")
        return from_bytes(bytearray(body[4:]), Path(name), layers)

    def write(self, entry: Entry, key: str, layers: Layers, above: Sequence[str]) -> None:
        data = len(layers).to_bytes(4, "little") + to_bytes(layers)
        told = {
            "key": key, "kind": entry.label, "frequency_key": entry.frequency_key, "start": entry.start,
            "above": list(above),
        }  # fmt: skip
        self._blobs.put(f"{self._place}/entries/{key}", hashlib.sha256(data).digest() + data)
        self._blobs.put(f"{self._place}/index/{key}", joined(told, packed(entry.tokens)))
        names = self._beginnings(entry.tokens, entry.salt)
        before = (
            len(self._beginnings(entry.tokens[: entry.start], entry.salt)) if entry.kind == "run" else len(names) - 1
        )
        for name in names[max(0, before) :]:
            # Two that write at once may lose one of the two: then that one is found at the next start.
            keys = [key, *(other for other in self._pointed(name) if other != key)][:KEYS]
            self._blobs.put(name, json.dumps(keys).encode())

    def _places(self, kind: str, most: int) -> Iterable[str]:
        """The names of the blobs of a kind, at most `most`."""
        return islice(self._blobs.names(f"{self._place}/{kind}/"), most)
