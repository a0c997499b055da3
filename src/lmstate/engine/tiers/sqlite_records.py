"""Records in an SQLite file, or in memory."""

from __future__ import annotations

import hashlib
import hmac
import json
import sqlite3
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from threading import Lock
from time import time

from lmstate.engine.tiers.record_store import MOST_RECORD, StoredRecord, check_size
from lmstate.engine.tiers.seal import seal
from lmstate.errors import SnapshotError
from lmstate.files.atomic import atomic_write
from lmstate.files.private import FILE_MODE, private_file, private_folder
from lmstate.files.sqlite_schema import check_schema, unusable, use_wal

LOCK_SECONDS = 10.0  # that a statement waits for another process
DELETED_SECONDS = 7 * 24 * 3600  # for which the generation of a deleted record is kept
TABLE = """records (
    kind text not null, name text not null, generation integer not null, data blob not null, seal blob not null,
    size integer not null, used real not null, primary key (kind, name)
)"""
PUT = "(generation, data, seal, size, used, kind, name) values (?, ?, ?, ?, ?, ?, ?)"


class SqliteRecords:
    """Records in a file that several processes may share; None: in memory. With a key each has a seal."""

    def __init__(self, file: Path | None, key: bytes) -> None:
        """Raises OSError for a file that is something else, or cannot be opened."""
        self._key, self._lock = key, Lock()
        self._folder = None if file is None else private_folder(file.parent)
        self._used: dict[tuple[str, str], float] = {}  # when records were read, written along with the next change
        where = Path(":memory:") if file is None else private_file(file)
        try:
            self._connection = sqlite3.connect(where, check_same_thread=False, timeout=LOCK_SECONDS)
            check_schema(self._connection, (TABLE,))
            self._connection.text_factory = lambda text: text.decode(errors="replace")  # a hostile name ends no list
            use_wal(self._connection, LOCK_SECONDS)
            self._connection.executescript(f"pragma synchronous=full; create table if not exists {TABLE};")
        except sqlite3.Error as error:
            raise unusable(where, error, "file of records") from error

    def read(self, kind: str, name: str) -> StoredRecord | None:
        with self._lock:
            row = self._connection.execute(
                "select generation, cast(data as blob), cast(seal as blob) from records where kind = ? and name = ?",
                (kind, name),
            ).fetchone()
            if row is None:
                return None
            self._used[kind, name] = time()
        generation = int(row[0])
        try:
            if not hmac.compare_digest(row[2], self._seal(kind, name, generation, row[1])):
                raise SnapshotError("it has another seal")
            return StoredRecord(generation, inflate(row[1], MOST_RECORD) if row[1] else b"")
        except (SnapshotError, zlib.error):
            return StoredRecord(generation, b"", damaged=True)

    def read_generation(self, kind: str, name: str) -> int | None:
        with self._lock:
            row = self._connection.execute(
                "select generation from records where kind = ? and name = ?", (kind, name)
            ).fetchone()
        return None if row is None else int(row[0])

    def commit(self, kind: str, name: str, data: bytes, generation: int) -> bool:
        row = self._row(kind, name, data, generation)
        with self._lock, self._connection as connection:
            made = connection.execute(f"insert or ignore into records {PUT}", row)
            if not made.rowcount:
                made = connection.execute(
                    "update records set generation = ?, data = ?, seal = ?, size = ?, used = ? "
                    "where kind = ? and name = ? and generation = ?",
                    (*row, generation - 1),
                )
            self._note_uses()
            return bool(made.rowcount)

    def names(self, kind: str) -> Iterable[str]:
        with self._lock:
            rows = self._connection.execute(
                "select name from records where kind = ? and data != x''", (kind,)
            ).fetchall()
        return [str(name) for (name,) in rows]

    def set_aside(self, kind: str, name: str) -> None:
        with self._lock:
            row = self._connection.execute(
                "select generation, hex(data) from records where kind = ? and name = ?", (kind, name)
            ).fetchone()
        if row is not None and self._folder is not None:
            told = {"kind": kind, "name": name, "generation": row[0], "data": row[1]}
            digest = hashlib.sha256(f"{kind}|{name}".encode()).hexdigest()
            aside = private_folder(self._folder / "damaged") / f"record-{digest}-{row[0]}.json"
            with atomic_write(aside, FILE_MODE) as part:
                part.write_text(json.dumps(told))

    def excess(self, kind: str, most: int) -> list[str]:
        with self._lock:
            (held,) = self._connection.execute("select total(size) from records where kind = ?", (kind,)).fetchone()
            if held <= most:
                return []
            rows = self._connection.execute(
                "select name, size from records where kind = ? and data != x'' order by used", (kind,)
            ).fetchall()
        found: list[str] = []
        for name, size in rows:
            if held <= most:
                break
            found.append(str(name))
            held -= size
        return found

    def get_value(self, kind: str, name: str) -> bytes | None:
        found = self.read(kind, name)
        return None if found is None or found.damaged else found.data

    def put_values(self, kind: str, values: Mapping[str, bytes]) -> None:
        rows = [self._row(kind, name, data, 0) for name, data in values.items()]
        with self._lock, self._connection as connection:
            connection.executemany(f"insert or replace into records {PUT}", rows)

    def remove_values(self, kind: str, names: Iterable[str]) -> None:
        with self._lock, self._connection as connection:
            connection.executemany("delete from records where kind = ? and name = ?", [(kind, name) for name in names])

    def forget_deleted(self) -> None:
        """Remove records that were deleted long ago."""
        with self._lock, self._connection as connection:
            connection.execute("delete from records where data = x'' and used < ?", (time() - DELETED_SECONDS,))

    def close(self, timeout: float = -1) -> None:
        """Close the file. With a timeout it stays open where a statement hangs for longer."""
        if self._lock.acquire(timeout=timeout):
            try:
                self._connection.close()
            finally:
                self._lock.release()

    def _row(
        self, kind: str, name: str, data: bytes, generation: int
    ) -> tuple[int, bytes, bytes, int, float, str, str]:
        check_size(data)
        packed = zlib.compress(data, 1) if data else b""
        return generation, packed, self._seal(kind, name, generation, packed), len(data), time(), kind, name

    def _seal(self, kind: str, name: str, generation: int, packed: bytes) -> bytes:
        """Of a record; nothing without a key."""
        if not self._key:
            return b""
        return seal(self._key, *(part.encode() for part in (kind, name, str(generation))), packed)

    def _note_uses(self) -> None:
        used, self._used = self._used, {}
        self._connection.executemany(
            "update records set used = max(used, ?) where kind = ? and name = ?",
            [(when, *where) for where, when in used.items()],
        )


def inflate(blob: bytes, most: int) -> bytes:
    """Inverse of `zlib.compress`. Raises SnapshotError for more than `most` bytes."""
    stream = zlib.decompressobj()
    data = stream.decompress(blob, most)
    if stream.unconsumed_tail or not stream.eof:
        raise SnapshotError("a stored text is too long, or cut short")
    return data
