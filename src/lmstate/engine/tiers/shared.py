"""A store that several machines share: Redis, or an object store (S3, GCS, Azure, a local folder) through obstore.

    <namespace>/index/<key>      which text an entry is of
    <namespace>/entries/<key>    a checksum, the number of layers, a safetensors file
    <namespace>/sessions/<hash>  a conversation

How much it may hold is the store's own affair (`maxmemory`, a lifecycle rule): what is gone is computed again.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from itertools import islice
from typing import Any, Protocol, get_args

from lmstate.engine.prefix.parts import Layers
from lmstate.engine.tiers.tier import Entry, Kind, SavedSession, Tier, from_bytes, packed, to_bytes, unpacked
from lmstate.errors import SnapshotError

SECONDS = 5.0  # that a Redis server may take to answer
MOST_ENTRIES = 50_000  # of the index that are read at the start
MOST_LAYERS = 100_000


class Blobs(Protocol):
    """Bytes under names. Any call may raise anything."""

    def get(self, name: str) -> bytes | None: ...

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

    def get(self, name: str) -> bytes | None:
        found: bytes | None = self._server.get(f"lmstate/{name}")
        return found

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
            from obstore.exceptions import NotFoundError
        except ImportError:
            raise ImportError(f"store={store!r} needs the obstore package: pip install lmstate[obstore]") from None
        self._obstore, self._absent = obstore, NotFoundError
        self._store: Any = obstore.store.from_url(store) if isinstance(store, str) else store

    def get(self, name: str) -> bytes | None:
        try:
            return bytes(self._obstore.get(self._store, name).bytes())
        except (self._absent, FileNotFoundError):
            return None

    def put(self, name: str, data: bytes) -> None:
        self._obstore.put(self._store, name, data)

    def delete(self, name: str) -> None:
        if self.get(name) is not None:
            self._obstore.delete(self._store, name)

    def names(self, prefix: str) -> Iterable[str]:
        for batch in self._obstore.list(self._store, prefix=prefix):
            for found in batch:
                yield str(found["path"])


class SharedTier(Tier):
    """Entries and sessions as blobs. What others write later is seen at the next start."""

    name = "shared"

    def __init__(self, blobs: Blobs, namespace: str) -> None:
        super().__init__(namespace)
        self._blobs = blobs
        self._place = hashlib.sha256(namespace.encode()).hexdigest()[:16]
        self._thread.start()

    def entries(self) -> Iterable[tuple[str, Entry]]:
        for blob in self._all("index", MOST_ENTRIES):
            try:
                told, tokens = _parted(blob)
                entry = Entry(told["kind"], int(told["regime"]), int(told["start"]), unpacked(tokens))
                key = entry.key(self.namespace)
                sound = entry.kind in get_args(Kind) and 0 <= entry.start <= len(entry.tokens) and told["key"] == key
            except (SnapshotError, ValueError, TypeError, KeyError):
                sound = False
            if sound:
                self._keys.add(key)
                yield key, entry
            else:
                self.counts["quarantined"] += 1

    def sessions(self) -> Iterable[SavedSession]:
        for blob in self._all("sessions", MOST_ENTRIES):
            try:
                told, tokens = _parted(blob)
                yield SavedSession(str(told["name"]), list(unpacked(tokens)), str(told["record"]))
            except (SnapshotError, ValueError, TypeError, KeyError):
                self.counts["quarantined"] += 1

    def read(self, key: str) -> Layers:
        name = f"{self._place}/entries/{key}"
        blob = self._blobs.get(name)
        if blob is None:
            raise SnapshotError("it is there no longer")
        layers = int.from_bytes(blob[32:36], "little")
        if hashlib.sha256(blob[32:]).digest() != blob[:32] or layers > MOST_LAYERS:
            self.counts["quarantined"] += 1
            self._blobs.delete(name)
            raise SnapshotError(f"{name} is damaged: its checksum is another")
        return from_bytes(blob[36:], name, layers)

    def write(self, entry: Entry, key: str, layers: Layers, above: Sequence[str]) -> None:
        data = len(layers).to_bytes(4, "little") + to_bytes(layers)
        told = {"key": key, "kind": entry.kind, "regime": entry.regime, "start": entry.start}
        self._blobs.put(f"{self._place}/entries/{key}", hashlib.sha256(data).digest() + data)
        self._blobs.put(f"{self._place}/index/{key}", _joined(told, packed(entry.tokens)))

    def write_session(self, session: SavedSession) -> None:
        told = {"name": session.name, "record": session.record}
        self._blobs.put(self._session(session.name), _joined(told, packed(session.tokens)))

    def remove_session(self, name: str) -> None:
        self._blobs.delete(self._session(name))

    def _session(self, name: str) -> str:
        return f"{self._place}/sessions/{hashlib.sha256(name.encode('utf-8', 'surrogatepass')).hexdigest()}"

    def _all(self, kind: str, most: int) -> Iterable[bytes]:
        """The blobs of a kind, as far as they can be read now."""
        try:
            for name in islice(self._blobs.names(f"{self._place}/{kind}/"), most):
                if (blob := self._blobs.get(name)) is not None:
                    yield blob
        except Exception:  # whatever client that is: a store that cannot be reached has nothing
            self.counts["failed"] += 1


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
