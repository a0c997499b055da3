"""A folder: one SQLite index, one safetensors file an entry, written whole or not at all and checked when read.

index.sqlite3         entries (key, text, size, checksum, last use)
records.sqlite3       sessions, responses and conversations, a record each
entries/ab/abcd...    what the key stands for; its name is the hash of the text, so it never changes
damaged/              an index, files and records that were damaged, to find out why
"""

from __future__ import annotations

import hashlib
import hmac
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from time import time, time_ns

from lmstate.engine.prefix.digests import packed, unpacked
from lmstate.engine.prefix.parts import Layers, nbytes
from lmstate.engine.tiers.records import SavedSession
from lmstate.engine.tiers.seal import seal, store_key
from lmstate.engine.tiers.sqlite_records import LOCK_SECONDS, SqliteRecords, inflate
from lmstate.engine.tiers.tier import (
    MOST_LAYERS,
    Entry,
    Tier,
    from_bytes,
    sessions_of,
    to_bytes,
)
from lmstate.errors import ModelError, SnapshotError
from lmstate.files.atomic import STALE_SECONDS
from lmstate.files.blob_folder import BlobFolder
from lmstate.files.regular import open_regular
from lmstate.files.sqlite_schema import unusable

MOST_NEW = 256  # entries of other processes that are taken at a time
ENDING = 1.0  # seconds that a statement on the index may go on at the end
# Bytes of a text in the index, unpacked, and of all that are read at a time: a hostile index must not fill the memory.
MOST_TEXT, MOST_TEXTS = 2**26, 2**30
TABLE = """entries (
    namespace text not null, key text not null, kind text not null, frequency_key integer not null,
    start integer not null, tokens blob not null, layers integer not null, size integer not null,
    checksum text not null, used real not null, primary key (namespace, key)
)"""
OLD_SESSIONS = """sessions (
    namespace text not null, name text not null, tokens blob not null, record text not null,
    primary key (namespace, name)
)"""  # of the index, in older versions
RECORDS = "records.sqlite3"
OLD_COLUMNS = "namespace, name, tokens, record"


class FolderTier(Tier):
    """Keeps at most `limit` bytes of files; the least recently used go first, ends of texts before their
    beginnings. Several processes may share a folder."""

    name = "folder"
    looks_up = True

    def __init__(self, path: str | os.PathLike[str], namespace: str, limit: int) -> None:
        where = Path(path).absolute()  # the process may change its folder
        self._blobs = BlobFolder(where, "entries", (TABLE,), "index of prefixes", LOCK_SECONDS, True, (OLD_SESSIONS,))
        self.limit = limit
        self._records = SqliteRecords(where / RECORDS, store_key())
        super().__init__(namespace, self._records)
        self._lock = Lock()
        self._used: dict[str, float] = {}  # keys of entries, and when they were last read, as far as no index has it
        self._seen: tuple[int | None, int] = None, 0  # version of the index, and its newest entry, that are known here
        self._index = self._blobs.open_or_renew_index()
        self._index.execute("pragma synchronous=normal")
        try:
            self._move_old_sessions()
        except sqlite3.Error as error:
            raise unusable(self._blobs.index, error, self._blobs.what) from error
        self.start()

    def _move_old_sessions(self) -> None:
        """Move the sessions of an older version's index to the records."""
        with self._index:
            self._index.execute("begin immediate")
            if self._index.execute("select 1 from sqlite_master where name = 'sessions'").fetchone() is None:
                return
            for namespace, name, tokens, record in self._index.execute(f"select {OLD_COLUMNS} from sessions"):
                try:
                    text = unpacked(inflate(tokens, MOST_TEXT))
                    data = SavedSession(str(name), list(text), str(record)).to_bytes()
                except (SnapshotError, zlib.error, TypeError):
                    data = b"damaged " + bytes(tokens)
                self._records.commit(sessions_of(namespace), str(name), data, 1)
            self._index.execute("drop table sessions")

    def entries(self) -> Iterable[tuple[str, Entry]]:
        self._seen = None, 0
        return self._newer()

    def find(self, tokens: Sequence[int], salt: str = "") -> list[tuple[str, Entry]]:
        """All that other processes have written since the last look, of any text."""
        return list(self._newer(MOST_NEW))

    def _newer(self, most: int = -1) -> Iterator[tuple[str, Entry]]:
        """(key, entry) of the entries that are not known yet, the oldest first; at most `most`, -1 for all."""
        with self._lock:
            version = self._index.execute("pragma data_version").fetchone()[0]  # another one if others have written
            if self._seen[0] == version:
                return
            rows = self._index.execute(
                "select rowid, key, kind, frequency_key, start, tokens from entries where namespace = ? and rowid > ? "
                "order by rowid limit ?",
                (self.namespace, self._seen[1], most),
            ).fetchall()
            last = rows[-1][0] if rows else self._seen[1]
            self._seen = (None if len(rows) == most else version), last
        inflated = 0
        for _, key, label, frequency_key, start, blob in rows:
            if key in self._keys:
                continue
            if inflated > MOST_TEXTS:
                self.counts["failed"] += 1
                return
            try:
                inflated += len(text := inflate(blob, MOST_TEXT))
                tokens = unpacked(text)
                entry = Entry.labelled(str(label), int(frequency_key), int(start), tokens)
                sound = entry.key(self.namespace) == key
            except (SnapshotError, zlib.error, TypeError, ValueError, OverflowError):
                sound = False
            if sound:
                self._keys.add(key)
                yield key, entry
            else:
                self._forget(str(key))

    def read(self, key: str) -> Layers:
        with self._lock:
            row = self._index.execute(
                "select layers, checksum, size from entries where namespace = ? and key = ?", (self.namespace, key)
            ).fetchone()
        if row is None:
            raise SnapshotError("it is in the index no longer")
        file, size = self._file(key), row[2]
        self.check_size(size)
        try:
            if int(row[0]) > MOST_LAYERS:
                raise SnapshotError(f"{file} has {row[0]} layers, by the index")
            with open_regular(file) as opened:
                if opened.seek(0, 2) != size:  # before memory is taken for it
                    raise SnapshotError(f"{file} is damaged: its size is another")
                data = bytearray(size)  # no large pages: the next file gets the same memory, which is warm
                opened.seek(0)
                opened.readinto(data)  # type: ignore[attr-defined]
            self._check_seal(str(row[1]).encode(), self._checksum(key, data).encode())
            layers = from_bytes(data, file, int(row[0]))
        except (ModelError, SnapshotError, FileNotFoundError):
            self._quarantine(key)  # not for other errors: with too many open files, say, nothing is wrong with this one
            raise
        self._used[key] = time()
        return layers

    def write(self, entry: Entry, key: str, layers: Layers, above: Sequence[str]) -> None:
        size = nbytes(layers)
        data = to_bytes(layers) if size <= self.limit else b""  # no copy of what has no room: it comes again each turn
        if max(size, len(data)) > self.limit:
            raise OSError(f"an entry of {size} bytes is more than the folder may hold")
        self._make_room(len(data))
        with self._blobs.writing(self._digest(key)) as part:
            part.write_bytes(data)
        told = (
            self.namespace, key, entry.label, entry.frequency_key, entry.start, zlib.compress(packed(entry.tokens), 1),
            len(layers), len(data), self._checksum(key, data), time(),
        )  # fmt: skip
        with self._lock, self._index:
            # SQLite would give the largest rowid again once its entry is gone: who has seen that one misses this one.
            self._index.execute(
                "insert or replace into entries "
                "(rowid, namespace, key, kind, frequency_key, start, tokens, layers, size, checksum, used) "
                "values (max(?, (select coalesce(max(rowid), 0) + 1 from entries)), ?, ?, ?, ?, ?, ?, ?, ?, ?, ?)",
                (time_ns(), *told),
            )
            # The entries above it are used with it: so that ends of texts go before their beginnings.
            self._used.update(dict.fromkeys(above, told[-1]))
            self._note_uses()

    def nbytes(self) -> int:
        """Bytes of all files, as the index has them."""
        with self._lock:
            return int(self._index.execute("select coalesce(sum(size), 0) from entries").fetchone()[0])

    def end(self) -> None:
        self._records.close(ENDING)
        if self._lock.acquire(timeout=ENDING):  # else a statement hangs, as on a network's disk: do not wait for it
            try:
                with suppress(sqlite3.Error), self._index:  # of a full disk, say: others will think it older
                    self._index.execute(f"pragma busy_timeout = {int(1000 * ENDING)}")
                    self._note_uses()
                self._index.close()
            finally:
                self._lock.release()

    def tidy(self) -> None:
        """Remove files that no index knows, and parts of files: of writers that were killed. Younger ones may come."""
        self._records.forget_deleted()
        with self._lock:
            rows = self._index.execute("select namespace, key from entries").fetchall()
        known = {self._digest(str(key), str(namespace)) for namespace, key in rows}
        self._blobs.remove_unknown(known, time() - STALE_SECONDS)

    # ---- the parts of it

    def _checksum(self, key: str, data: bytes | bytearray) -> str:
        """Of an entry's bytes: what tells damage, or with a key any change."""
        if not self.key:
            return hashlib.sha256(data).hexdigest()
        return seal(self.key, self.namespace.encode(), key.encode(), data).hex()

    def _check_seal(self, found: bytes, right: bytes) -> None:
        """Raise SnapshotError for a seal, or a checksum, of something else."""
        if not hmac.compare_digest(bytes(found), right):
            raise SnapshotError("it is damaged: its checksum is another")

    def _digest(self, key: str, namespace: str | None = None) -> str:
        return hashlib.sha256(f"{namespace or self.namespace}|{key}".encode()).hexdigest()

    def _file(self, key: str, namespace: str | None = None) -> Path:
        return self._blobs.file(self._digest(key, namespace))

    def _make_room(self, size: int) -> None:
        held = self.nbytes()
        if held + size <= self.limit:
            return
        with self._lock, self._index:
            self._note_uses()
            rows = self._index.execute(
                "select namespace, key, size from entries order by used, length(tokens) desc"
            ).fetchall()
        for namespace, key, freed in rows:
            if held + size <= self.limit:
                return
            self._forget(key, namespace)
            held -= freed

    def _note_uses(self) -> None:
        """Have the index know what was read: when something is written to it in any case, since no request waits for
        that."""
        used = [(when, self.namespace, key) for key, when in self._used.copy().items()]
        self._index.executemany("update entries set used = ? where namespace = ? and key = ?", used)
        for _, _, key in used:
            del self._used[key]

    def _forget(self, key: str, namespace: str | None = None) -> None:
        namespace = namespace or self.namespace
        with self._lock, self._index:
            self._index.execute("delete from entries where namespace = ? and key = ?", (namespace, key))
        if namespace == self.namespace:
            self._keys.discard(key)
        self._file(key, namespace).unlink(missing_ok=True)

    def _quarantine(self, key: str) -> None:
        self.counts["quarantined"] += 1
        self._blobs.quarantine(self._digest(key))
        self._forget(key)
