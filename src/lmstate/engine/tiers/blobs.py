"""Bytes under names that several machines share: a Redis server, or what obstore knows (S3, GCS, Azure, a folder)."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Protocol, runtime_checkable

SECONDS = 5.0  # that a Redis server may take to answer
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


@runtime_checkable
class Blobs(Protocol):
    """Bytes under names, and records of sessions in generations: what a store that machines share has to do.

    Several threads call it. Any call may raise anything. Names are ASCII, with `/` between their parts.
    """

    def get(self, name: str, most: int) -> bytes | None:
        """Return the first `most` bytes under a name; None if there are none."""

    def put(self, name: str, data: bytes) -> None:
        """Store bytes under a name, in place of others. Readers see the old bytes or the new ones."""

    def delete(self, name: str) -> None:
        """Remove a name. One that is not there is no error."""

    def names(self, prefix: str) -> Iterable[str]:
        """Return the names that begin with `prefix`."""

    def read_record(self, name: str, most: int) -> tuple[int, bytes] | None:
        """Return (generation, the first `most` bytes) of the newest record of a name; no bytes if it was closed."""

    def commit_record(self, name: str, data: bytes, generation: int) -> bool:
        """Store a record if the newest one is of `generation - 1`, or there is none.

        Atomic between processes. False if there is another one, also if that may have come after this one. No bytes:
        the record is closed; keep its generation for a week or longer.
        """

    def record_names(self, prefix: str) -> Iterable[str]:
        """Return the names of the records that begin with `prefix` and were not closed."""


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
