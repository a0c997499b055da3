"""A store that several machines share: Redis, or an object store (S3, GCS, Azure, a local folder) through obstore.

    <namespace>/index/<key>      which text an entry is of, and the keys of what it hangs on
    <namespace>/prefix/<hash>    the keys of entries of texts with this beginning, the newest first
    <namespace>/entries/<key>    a checksum, the number of layers, a safetensors file
    <namespace>/sessions/<hash>  a conversation

How much it may hold is the store's own affair (`maxmemory`, a lifecycle rule): what is gone is computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any, Protocol, get_args

from lmstate.engine.prefix.parts import Layers
from lmstate.engine.tiers.tier import (
    MOST_LAYERS,
    Entry,
    Kind,
    SavedSession,
    Tier,
    from_bytes,
    packed,
    to_bytes,
    unpacked,
)
from lmstate.errors import SnapshotError

SECONDS = 5.0  # that a Redis server may take to answer
MOST_ENTRIES = 50_000  # of the index that are read at the start
FINE, COARSE = 64, 1024  # tokens between two beginnings that are looked up, in the first COARSE ones and beyond
KEYS = 8  # entries that are remembered of a beginning
DEEPEST = 4  # beginnings of a text, the longest that are known, whose entries are taken
MOST_FOUND = 64  # entries that one text's lookup reads the index of
MOST_TOLD = 2**26  # bytes of a blob of the index, or of a conversation


class Blobs(Protocol):
    """Bytes under names. Any call may raise anything."""

    def get(self, name: str, most: int) -> bytes | None:
        """The first `most` bytes; None where there are none."""

    def put(self, name: str, data: bytes) -> None: ...

    def delete(self, name: str) -> None: ...

    def names(self, prefix: str) -> Iterable[str]: ...


class RedisBlobs:
    """`redis://host:port/db`, `rediss://...` or `unix://path`."""

    def __init__(self, url: str) -> None:
        try:
            import redis
        except ImportError:
            raise ImportError(f"store={url!r} needs the redis package: pip install lmstate[redis]") from None
        self._server: Any = redis.Redis.from_url(url, socket_timeout=SECONDS, socket_connect_timeout=SECONDS)

    def get(self, name: str, most: int) -> bytes | None:
        found: bytes = self._server.getrange(f"lmstate/{name}", 0, most - 1)
        return found or None

    def put(self, name: str, data: bytes) -> None:
        self._server.set(f"lmstate/{name}", data)

    def delete(self, name: str) -> None:
        self._server.delete(f"lmstate/{name}")

    def names(self, prefix: str) -> Iterable[str]:
        for name in self._server.scan_iter(match=f"lmstate/{prefix}*", count=1000):
            yield name.decode().removeprefix("lmstate/")


class ObjectBlobs:
    """A URL that obstore knows, or a store of its own making."""

    def __init__(self, store: str | Any) -> None:
        try:
            import obstore
            from obstore.exceptions import BaseError, NotFoundError
        except ImportError:
            raise ImportError(f"store={store!r} needs the obstore package: pip install lmstate[obstore]") from None
        self._obstore, self._absent = obstore, NotFoundError
        try:
            self._store: Any = store
            if isinstance(store, str):
                local = store.startswith("file:")  # a folder, which may have to be made
                self._store = obstore.store.from_url(store, mkdir=True) if local else obstore.store.from_url(store)
        except (BaseError, OSError) as error:
            told = str(error).partition("\n")[0]  # what comes after it is for obstore's own makers
            raise ValueError(f"store={store!r} was asked for, and obstore says: {told}") from error

    def get(self, name: str, most: int) -> bytes | None:
        try:
            found = self._obstore.get(self._store, name)
            if found.meta["size"] > most:  # which is known before they are read
                return bytes(self._obstore.get_range(self._store, name, start=0, length=most))
            return bytes(found.bytes())
        except (self._absent, FileNotFoundError):
            return None

    def put(self, name: str, data: bytes) -> None:
        self._obstore.put(self._store, name, data)

    def delete(self, name: str) -> None:
        with suppress(self._absent, FileNotFoundError):
            self._obstore.delete(self._store, name)

    def names(self, prefix: str) -> Iterable[str]:
        for batch in self._obstore.list(self._store, prefix=prefix):
            for found in batch:
                yield str(found["path"])


class SharedTier(Tier):
    """Entries and sessions as blobs. What others write later is looked up where a text is not known."""

    name = "shared"
    looks_up = True

    def __init__(self, blobs: Blobs, namespace: str) -> None:
        super().__init__(namespace)
        self._blobs = blobs
        self._place = hashlib.sha256(namespace.encode()).hexdigest()[:16]
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
        data, names = packed(tokens), []
        digest, done = hashlib.sha256(), 0
        ends = [*range(FINE, COARSE, FINE), *range(COARSE, len(tokens) + 1, COARSE)]
        for end in [end for end in ends if end <= len(tokens)]:
            digest.update(data[4 * done : 4 * end])
            done = end
            names.append(f"{self._place}/prefix/{digest.hexdigest()}")
        return names

    def _pointed(self, name: str) -> list[str]:
        """The keys under a beginning; none if there is something else."""
        try:
            keys = json.loads(self._blobs.get(name, MOST_TOLD) or b"[]")
        except (ValueError, RecursionError):
            return []
        return [key for key in keys if isinstance(key, str)][:KEYS] if isinstance(keys, list) else []

    def sessions(self) -> Iterable[SavedSession]:
        for place in self._places("sessions", MOST_ENTRIES):
            if (session := self._session_at(place)) is not None:
                yield session

    def session_names(self) -> Iterable[str]:
        for place in self._places("sessions", MOST_ENTRIES):
            if place in self._names:
                yield self._names[place]
            elif (session := self._session_at(place)) is not None:
                yield session.name

    def read_session(self, name: str) -> SavedSession | None:
        session = self._session_at(self._session(name))
        return session if session is not None and session.name == name else None

    def _session_at(self, place: str) -> SavedSession | None:
        if (blob := self._blobs.get(place, MOST_TOLD)) is None:
            return None
        try:
            told, tokens = _parted(blob)
            session = SavedSession(str(told["name"]), list(unpacked(tokens)), str(told["record"]))
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

    def write_session(self, session: SavedSession) -> None:
        told = {"name": session.name, "record": session.record}
        self._blobs.put(self._session(session.name), _joined(told, packed(session.tokens)))

    def remove_session(self, name: str) -> None:
        self._blobs.delete(self._session(name))

    def _session(self, name: str) -> str:
        return f"{self._place}/sessions/{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}"

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
