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

CLOSED_SECONDS = 7 * 24 * 3600  # for which Redis keeps the generation of a closed session
# KEYS: the record, the generation of a closed one. ARGV: the generation before, the new one, data, seconds.
COMMIT = """
local there = redis.call('getrange', KEYS[1], 0, 7)
if there == '' then there = redis.call('get', KEYS[2]) or ARGV[1] end
if there ~= ARGV[1] then return 0 end
if ARGV[3] == '' then
  redis.call('del', KEYS[1])
  redis.call('set', KEYS[2], ARGV[2], 'ex', ARGV[4])
else
  redis.call('set', KEYS[1], ARGV[2] .. ARGV[3])
  redis.call('del', KEYS[2])
end
return 1
"""


class Blobs(Protocol):
    """Bytes under names, and records of sessions in generations. Any call may raise anything."""

    def get(self, name: str, most: int) -> bytes | None:
        """The first `most` bytes; None where there are none."""

    def put(self, name: str, data: bytes) -> None: ...

    def delete(self, name: str) -> None: ...

    def names(self, prefix: str) -> Iterable[str]: ...

    def read_record(self, name: str, most: int) -> tuple[int, bytes] | None:
        """(generation, the first `most` bytes) of the newest record of a name; no bytes if it was closed."""

    def commit_record(self, name: str, data: bytes, generation: int) -> bool:
        """Store a record if the newest one is of `generation - 1`, or there is none.

        Atomic between processes. False if there is another one, also if that may have come after this one. No bytes:
        the record is closed; keep its generation for a week or longer.
        """

    def record_names(self, prefix: str) -> Iterable[str]:
        """The names of records that were not closed."""


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

    def read_record(self, name: str, most: int) -> tuple[int, bytes] | None:
        if found := self._server.getrange(f"lmstate/{name}", 0, 8 + most - 1):
            return int.from_bytes(found[:8], "big"), found[8:]
        if (closed := self._server.get(f"lmstate-closed/{name}")) is not None:
            return int.from_bytes(closed[:8], "big"), b""
        return None

    def commit_record(self, name: str, data: bytes, generation: int) -> bool:
        keys = f"lmstate/{name}", f"lmstate-closed/{name}"
        before, now = ((generation - back).to_bytes(8, "big") for back in (1, 0))
        return bool(self._server.eval(COMMIT, 2, *keys, before, now, data, CLOSED_SECONDS))

    def record_names(self, prefix: str) -> Iterable[str]:
        return self.names(prefix)


class ObjectBlobs:
    """A URL that obstore knows, or a store of its own making."""

    def __init__(self, store: str | Any) -> None:
        try:
            import obstore
            from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError
        except ImportError:
            raise ImportError(f"store={store!r} needs the obstore package: pip install lmstate[obstore]") from None
        self._obstore, self._absent, self._exists = obstore, NotFoundError, AlreadyExistsError
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

    def read_record(self, name: str, most: int) -> tuple[int, bytes] | None:
        for _ in range(3):
            if (generation := max(self._generations(name), default=None)) is None:
                return None
            data = self.get(f"{name}/{generation:016d}", most) if most else b""  # no store gives a range of nothing
            if data is not None:
                return generation, data
        raise OSError("the record in the store changes all the time")  # a newer one came, and this one went

    def commit_record(self, name: str, data: bytes, generation: int) -> bool:
        """Create the name of the generation; older ones go then.

        A writer that comes late may find its name free again, since newer ones have come and it has gone: that shows
        after it has written.
        """
        newest = max(there := self._generations(name), default=None)
        if newest is not None and newest != generation - 1:
            return False
        try:
            self._obstore.put(self._store, f"{name}/{generation:016d}", data, mode="create")
        except (self._exists, FileExistsError):
            return False
        if max(self._generations(name), default=generation) > generation:
            self.delete(f"{name}/{generation:016d}")
            return False
        for older in there:
            with suppress(Exception):  # it is stored; what stays behind is removed with the next
                self.delete(f"{name}/{older:016d}")
        return True

    def record_names(self, prefix: str) -> Iterable[str]:
        newest: dict[str, tuple[int, int]] = {}
        for batch in self._obstore.list(self._store, prefix=prefix):
            for found in batch:
                name, _, generation = str(found["path"]).rpartition("/")
                if generation.isdecimal():
                    newest[name] = max(newest.get(name, (0, 0)), (int(generation), int(found["size"])))
        return [name for name, (_, size) in newest.items() if size]

    def _generations(self, name: str) -> list[int]:
        ends = (found.rpartition("/")[2] for found in self.names(f"{name}/"))
        return [int(end) for end in ends if end.isdecimal()]


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

    def session_names(self) -> Iterable[str]:
        for place in islice(self._blobs.record_names(f"{self._place}/records/"), MOST_ENTRIES):
            if place not in self._names and (found := self._blobs.read_record(place, MOST_TOLD)) is not None:
                self._saved(place, *found)
            if place in self._names:
                yield self._names[place]

    def read_session(self, name: str) -> SavedSession | None:
        if (found := self._blobs.read_record(place := self._session(name), MOST_TOLD)) is None:
            return None
        generation, data = found
        session = self._saved(place, generation, data)
        if session is None or session.name != name:
            return SavedSession(name, [], "", generation, damaged=bool(data))
        return session

    def set_aside_session(self, name: str) -> None:
        if (found := self._blobs.read_record(place := self._session(name), MOST_TOLD)) is not None:
            self._blobs.put(f"{self._place}/damaged/{place.rpartition('/')[2]}-{found[0]:016d}", found[1])

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
