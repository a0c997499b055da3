"""Records of a store as the caller sees them: each owner has names of its own."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from lmstate.engine.tiers.record_store import RecordStore, StoredRecord
from lmstate.serve.wire.tenants import caller


class OwnedRecords:
    """A `RecordStore` in which the caller's names are kept in their stored forms."""

    def __init__(self, records: RecordStore) -> None:
        self._records = records

    def read(self, kind: str, name: str) -> StoredRecord | None:
        return self._records.read(kind, caller().stored(name))

    def read_generation(self, kind: str, name: str) -> int | None:
        return self._records.read_generation(kind, caller().stored(name))

    def commit(self, kind: str, name: str, data: bytes, generation: int) -> bool:
        return self._records.commit(kind, caller().stored(name), data, generation)

    def names(self, kind: str) -> Iterable[str]:
        found = map(caller().shown, self._records.names(kind))
        return (name for name in found if name is not None)

    def set_aside(self, kind: str, name: str) -> None:
        self._records.set_aside(kind, caller().stored(name))

    def excess(self, kind: str, most: int) -> list[str]:
        """Stored forms, of all owners: `as_owner` deletes them."""
        return self._records.excess(kind, most)

    def get_value(self, kind: str, name: str) -> bytes | None:
        return self._records.get_value(kind, caller().stored(name))

    def put_values(self, kind: str, values: Mapping[str, bytes]) -> None:
        self._records.put_values(kind, {caller().stored(name): data for name, data in values.items()})

    def remove_values(self, kind: str, names: Iterable[str]) -> None:
        self._records.remove_values(kind, map(caller().stored, names))

    def close(self) -> None:
        self._records.close()
