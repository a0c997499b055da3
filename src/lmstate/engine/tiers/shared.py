"""A store that several machines share: Redis, or an object store (S3, GCS, Azure, a local folder) through obstore.

    <namespace>/index/<key>      which text an entry is of, and the keys of what it hangs on
    <namespace>/prefix/<hash>    the keys of entries of texts with this beginning, the newest first
    <namespace>/entries/<key>    a checksum, the number of layers, a safetensors file
    <namespace>/records/<hash>   a session, in generations (an object store: .../<hash>/<generation>)
    <namespace>/damaged/<hash>-<generation>   the record of a session that says nothing, to find out why

How much it may hold is the store's own affair (`maxmemory`, a lifecycle rule): what is gone is computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from lmstate.engine.prefix.digests import beginnings, packed
from lmstate.engine.prefix.parts import Layers
from lmstate.engine.tiers.blobs import Blobs
from lmstate.engine.tiers.seal import SealBroken, SealedBlobs
from lmstate.engine.tiers.tier import (
    MOST_LAYERS,
    Entry,
    Kind,
    SavedSession,
    Tier,
    from_bytes,
    to_bytes,
    unpacked,
)
from lmstate.errors import SnapshotError

MOST_ENTRIES = 50_000  # of the index that are read at the start
KEYS = 8  # entries that are remembered of a beginning
DEEPEST = 4  # beginnings of a text, the longest that are known, whose entries are taken
MOST_FOUND = 64  # entries that one text's lookup reads the index of
MOST_TOLD = 2**26  # bytes of a blob of the index, or of a conversation


class SharedTier(Tier):
    """Entries and sessions as blobs. What others write later is looked up where a text is not known."""

    name = "shared"
    looks_up = True

    def __init__(self, blobs: Blobs, namespace: str) -> None:
        super().__init__(namespace)
        self._blobs: Blobs = SealedBlobs(blobs, self.key) if self.key else blobs
        self._place = hashlib.sha256(self.namespace.encode()).hexdigest()[:16]
        self._names: dict[str, str] = {}  # of sessions, by their places
        self._thread.start()

    def check_access(self) -> None:
        name = f"{self._place}/access"
        self._blobs.put(name, b"lmstate")
        self._blobs.get(name, MOST_TOLD)
        self._blobs.delete(name)

    def entries(self) -> Iterable[tuple[str, Entry]]:
        for place in self._places("index", MOST_ENTRIES):
            if (blob := self._blobs.get(place, MOST_TOLD)) is not None and (found := self._entry(blob)) is not None:
                self._keys.add(found[0])
                yield found[:2]

    def _entry(self, blob: bytes) -> tuple[str, Entry, list[str]] | None:
        """(key, entry, the keys of what it hangs on) of a blob of the index; None for one that is damaged."""
        try:
            told, tokens = _parted(blob)
            entry = Entry(told["kind"], int(told["frequency_key"]), int(told["start"]), unpacked(tokens))
            key = entry.key(self.namespace)
            if entry.kind in get_args(Kind) and 0 <= entry.start <= len(entry.tokens) and told["key"] == key:
                return key, entry, [str(above) for above in told.get("above", ())]
        except (SnapshotError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            pass
        self.counts["quarantined"] += 1
        return None

    def find(self, tokens: Sequence[int]) -> list[tuple[str, Entry]]:
        names = self._beginnings(tokens)
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

    def _beginnings(self, tokens: Sequence[int]) -> list[str]:
        """The names of the beginnings of a text that are looked up, shorter ones first."""
        return [f"{self._place}/prefix/{digest}" for digest in beginnings(tokens)]

    def _pointed(self, name: str) -> list[str]:
        """The keys under a beginning; none if there is something else."""
        try:
            keys = json.loads(self._blobs.get(name, MOST_TOLD) or b"[]")
        except (ValueError, RecursionError):
            return []
        return [key for key in keys if isinstance(key, str)][:KEYS] if isinstance(keys, list) else []

    def session_names(self) -> Iterable[str]:
        for place in islice(self._blobs.record_names(f"{self._place}/records/"), MOST_ENTRIES):
            if place not in self._names and (found := self._record(place)) is not None:
                self._saved(place, *found)
            if place in self._names:
                yield self._names[place]

    def read_session(self, name: str) -> SavedSession | None:
        try:
            found = self._blobs.read_record(place := self._session(name), MOST_TOLD)
        except SealBroken as broken:
            self.counts["quarantined"] += 1
            return SavedSession(name, [], "", broken.generation, damaged=True)
        if found is None:
            return None
        generation, data = found
        session = self._saved(place, generation, data)
        if session is None or session.name != name:
            return SavedSession(name, [], "", generation, damaged=bool(data))
        return session

    def set_aside_session(self, name: str) -> None:
        try:
            found = self._blobs.read_record(place := self._session(name), MOST_TOLD)
        except SealBroken as broken:
            found = broken.generation, broken.data
        if found is not None:
            self._blobs.put(f"{self._place}/damaged/{place.rpartition('/')[2]}-{found[0]:016d}", found[1])

    def _record(self, place: str) -> tuple[int, bytes] | None:
        """The record at a place; None if it is not as it was written."""
        with suppress(SealBroken):
            return self._blobs.read_record(place, MOST_TOLD)
        return None

    def session_generation(self, name: str) -> int | None:
        found = self._blobs.read_record(self._session(name), 0)
        return None if found is None else found[0]

    def _saved(self, place: str, generation: int, data: bytes) -> SavedSession | None:
        """The session of a record; None for one that is closed, or damaged."""
        if not data:
            return None
        try:
            told, tokens = _parted(data)
            ids = list(unpacked(tokens))
            changes = tuple(map(str, told["changes"]))
            session = SavedSession(str(told["name"]), ids, str(told["record"]), generation, changes)
        except (SnapshotError, ValueError, TypeError, KeyError, RecursionError):
            self.counts["quarantined"] += 1
            return None
        self._names[place] = session.name
        return session

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
            "key": key, "kind": entry.kind, "frequency_key": entry.frequency_key, "start": entry.start,
            "above": list(above),
        }  # fmt: skip
        self._blobs.put(f"{self._place}/entries/{key}", hashlib.sha256(data).digest() + data)
        self._blobs.put(f"{self._place}/index/{key}", _joined(told, packed(entry.tokens)))
        names = self._beginnings(entry.tokens)
        before = len(self._beginnings(entry.tokens[: entry.start])) if entry.kind == "run" else len(names) - 1
        for name in names[max(0, before) :]:
            # Two that write at once may lose one of the two: then that one is found at the next start.
            keys = [key, *(other for other in self._pointed(name) if other != key)][:KEYS]
            self._blobs.put(name, json.dumps(keys).encode())

    def write_session(self, session: SavedSession) -> bool:
        told = {"name": session.name, "record": session.record, "changes": session.changes}
        data = b"" if session.gone else _joined(told, packed(session.tokens))
        if len(data) > MOST_TOLD:  # it could not be read again
            raise OSError(f"a record of {len(data)} bytes is more than the {MOST_TOLD} that one may have")
        return self._blobs.commit_record(self._session(session.name), data, session.generation)

    def _session(self, name: str) -> str:
        return f"{self._place}/records/{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}"

    def _places(self, kind: str, most: int) -> Iterable[str]:
        """The names of the blobs of a kind, at most so many."""
        return islice(self._blobs.names(f"{self._place}/{kind}/"), most)


def _joined(told: dict[str, Any], tokens: bytes) -> bytes:
    header = json.dumps(told).encode()
    return len(header).to_bytes(4, "little") + header + tokens


def _parted(blob: bytes) -> tuple[dict[str, Any], bytes]:
    """Inverse of `_joined`. Raises ValueError for bytes that it cannot have returned."""
    end = 4 + int.from_bytes(blob[:4], "little")
    told = json.loads(blob[4:end])
    if not isinstance(told, dict):
        raise ValueError("a stored entry says nothing of itself")
    return told, blob[end:]
