"""Records as blobs of a store that several machines share."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from contextlib import suppress
from itertools import islice

from lmstate.engine.tiers.blobs import Blobs
from lmstate.engine.tiers.record_store import MOST_RECORD, StoredRecord, check_size
from lmstate.engine.tiers.seal import SealBroken

CHECKSUM = hashlib.sha256().digest_size
READS = 2  # of a record that is damaged: what went wrong may be the reading
MOST_NAMES = 50_000  # records of a kind whose names are told


class BlobRecords:
    """Records under the hashes of their kinds and names; each has a checksum and its name.

    <kind>/records/<hash>                 a record, in generations (an object store: .../<hash>/<generation>)
    <kind>/values/<hash>                  a value
    <kind>/damaged/<hash>-<generation>    a record that says nothing, to find out why
    """

    def __init__(self, blobs: Blobs) -> None:
        self._blobs = blobs
        self._names: dict[str, str] = {}  # by their places

    def read(self, kind: str, name: str) -> StoredRecord | None:
        generation = 0
        for _ in range(READS):
            try:
                found = self._blobs.read_record(_place(kind, "records", name), MOST_RECORD)
            except SealBroken as broken:
                generation = broken.generation
                continue
            if found is None:
                return None
            generation, stored = found
            if not stored:
                return StoredRecord(generation, b"")
            if (told := _opened(stored)) is not None and told[0] == name:
                return StoredRecord(generation, told[1])
        return StoredRecord(generation, b"", damaged=True)

    def read_generation(self, kind: str, name: str) -> int | None:
        found = self._blobs.read_record(_place(kind, "records", name), 0)
        return None if found is None else found[0]

    def commit(self, kind: str, name: str, data: bytes, generation: int) -> bool:
        data = _closed(name, data) if data else b""
        check_size(data)
        return self._blobs.commit_record(_place(kind, "records", name), data, generation)

    def names(self, kind: str) -> Iterable[str]:
        for place in islice(self._blobs.record_names(f"{_folder(kind)}/records/"), MOST_NAMES):
            if place not in self._names:
                with suppress(SealBroken):
                    told = _opened((self._blobs.read_record(place, MOST_RECORD) or (0, b""))[1])
                    if told is not None and place == _place(kind, "records", told[0]):
                        self._names[place] = told[0]
            if place in self._names:
                yield self._names[place]

    def set_aside(self, kind: str, name: str) -> None:
        place = _place(kind, "records", name)
        try:
            found = self._blobs.read_record(place, MOST_RECORD)
        except SealBroken as broken:
            found = broken.generation, broken.data
        if found is not None:
            self._blobs.put(f"{_folder(kind)}/damaged/{place.rpartition('/')[2]}-{found[0]:016d}", found[1])

    def excess(self, kind: str, most: int) -> list[str]:
        return []

    def get_value(self, kind: str, name: str) -> bytes | None:
        return self._blobs.get(_place(kind, "values", name), MOST_RECORD)

    def put_values(self, kind: str, values: Mapping[str, bytes]) -> None:
        for name, data in values.items():
            self._blobs.put(_place(kind, "values", name), data)

    def remove_values(self, kind: str, names: Iterable[str]) -> None:
        for name in names:
            self._blobs.delete(_place(kind, "values", name))

    def close(self) -> None:
        """Nothing is held open."""


def _folder(kind: str) -> str:
    return hashlib.sha256(kind.encode()).hexdigest()[:16]


def _place(kind: str, what: str, name: str) -> str:
    return f"{_folder(kind)}/{what}/{hashlib.sha256(_bytes(name)).hexdigest()}"


def _closed(name: str, data: bytes) -> bytes:
    """A record as it is stored: a checksum, the name, the data."""
    body = len(_bytes(name)).to_bytes(4, "little") + _bytes(name) + data
    return hashlib.sha256(body).digest() + body


def _opened(stored: bytes) -> tuple[str, bytes] | None:
    """(the name, the data), inverse of `_closed`; None for other bytes."""
    body = stored[CHECKSUM:]
    end = 4 + int.from_bytes(body[:4], "little")
    if hashlib.sha256(body).digest() != stored[:CHECKSUM] or len(body) <= end:
        return None
    try:
        return body[4:end].decode("utf-8", "surrogatepass"), body[end:]
    except UnicodeDecodeError:
        return None


def _bytes(name: str) -> bytes:
    return name.encode("utf-8", "surrogatepass")
