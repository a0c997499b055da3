"""Records of a store as the caller sees them: each owner has names of its own."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Mapping
from pathlib import Path

from lmstate.engine.results import StoreUnreachable
from lmstate.engine.tiers.folder import RECORDS
from lmstate.engine.tiers.record_store import RecordStore, StoredRecord
from lmstate.engine.tiers.seal import store_key
from lmstate.engine.tiers.sqlite_records import SqliteRecords
from lmstate.serve.wire.tenants import caller

# Errors of storing: those of SQLite, of the disk, and the engine's for other stores.
STORE_ERRORS = (sqlite3.Error, OSError, StoreUnreachable)
ATTEMPTS = 10  # to commit a record that other processes change too


class OwnedRecords:
    """A `RecordStore` in which the caller's names are kept in their stored forms."""

    def __init__(self, records: RecordStore, *, shared: bool) -> None:
        """`shared`: other servers may use the same store."""
        self._records, self.shared = records, shared

    @staticmethod
    def open(records: RecordStore | None, folder: Path | None) -> OwnedRecords:
        """In the engines' store, so that all its servers have them; without one in a folder, or in memory."""
        if records is not None:
            return OwnedRecords(records, shared=True)
        return OwnedRecords(SqliteRecords(None if folder is None else folder / RECORDS, store_key()), shared=False)

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
