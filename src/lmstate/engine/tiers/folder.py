"""A folder: one SQLite index, one safetensors file an entry, written whole or not at all and checked when read.

index.sqlite3         entries (key, text, size, checksum, last use)
sessions.sqlite3      sessions, a record each
entries/ab/abcd...    what the key stands for; its name is the hash of the text, so it never changes
damaged/              an index, files and records of sessions that were damaged, to find out why
"""

from __future__ import annotations

import hashlib
import hmac
import json
import logging
import os
import sqlite3
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from threading import Lock
from time import time, time_ns
from typing import get_args

from lmstate.engine.prefix.digests import packed
from lmstate.engine.prefix.parts import Layers, nbytes
from lmstate.engine.tiers.seal import seal
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
from lmstate.errors import ModelError, SnapshotError
from lmstate.files.atomic import STALE_SECONDS, atomic_write, remove_stale_parts
from lmstate.files.mmap_file import open_regular
from lmstate.files.private import FILE_MODE, private_file, private_folder
from lmstate.files.sqlite_schema import check_schema, unusable

LOG = logging.getLogger(__name__)
MOST_NEW = 256  # entries of other processes that are taken at a time
LOCK_SECONDS = 10.0  # that a statement waits for another process
ENDING = 1.0  # seconds that a statement on the index may go on at the end
# Bytes of a text in the index, unpacked, and of all that are read at a time: a hostile index must not fill the memory.
MOST_TEXT, MOST_TEXTS = 2**26, 2**30
TABLES = (
    """entries (
    namespace text not null, key text not null, kind text not null, frequency_key integer not null,
    start integer not null, tokens blob not null, layers integer not null, size integer not null,
    checksum text not null, used real not null, primary key (namespace, key)
)""",
)
OLD_SESSIONS = """sessions (
    namespace text not null, name text not null, tokens blob not null, record text not null,
    primary key (namespace, name)
)"""  # of the index, in versions before `sessions.sqlite3`
RECORDS = (
    """records (
    namespace text not null, name text not null, generation integer not null, changes text not null,
    tokens blob not null, record text not null, seal blob not null, primary key (namespace, name)
)""",
)
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


class FolderTier(Tier):
    """Keeps at most `limit` bytes of files; what was not used for the longest goes first, ends of texts before their
    beginnings. Several processes may share a folder."""

    name = "folder"
    looks_up = True

    def __init__(self, path: str | os.PathLike[str], namespace: str, limit: int) -> None:
        super().__init__(namespace)
        self.path = Path(path).absolute()  # the process may change its folder
        self.limit = limit
        private_folder(self.path)
        self._lock = Lock()
        self._used: dict[str, float] = {}  # keys of entries, and when they were last read, as far as no index has it
        self._seen: tuple[int | None, int] = None, 0  # version of the index, and its newest entry, that are known here
        self._index = self._opened_index()
        self._sessions = self._opened("sessions.sqlite3", RECORDS, "full", "file of sessions")
        self._sessions_lock = Lock()
        try:
            self._move_old_sessions()
        except sqlite3.Error as error:
            raise unusable(self.path / "index.sqlite3", error, "index of prefixes") from error
        self._thread.start()

    def _opened_index(self) -> sqlite3.Connection:
        """The index; one that is damaged is set aside, for all that it knows can be computed again."""
        file = private_file(self.path / "index.sqlite3")
        before = file.stat() if file.exists() else None
        try:
            index = self._opened(file.name, TABLES, "normal", "index of prefixes", OLD_SESSIONS)
            if (found := index.execute("pragma quick_check(1)").fetchone()[0]) == "ok":
                return index
            index.close()
        except OSError as error:
            if getattr(error.__cause__, "sqlite_errorcode", None) not in DAMAGED:
                raise
            found = str(error.__cause__)
        LOG.warning("%s is damaged (%s): it is set aside, and prefixes are computed again", file, found)
        with suppress(FileNotFoundError):
            if before is not None and os.path.samestat(before, file.stat()):  # else another process has set it aside
                aside = private_folder(self.path / "damaged") / f"{time_ns()}-{file.name}"
                os.replace(file, aside)
                for end in ("-wal", "-shm"):
                    with suppress(FileNotFoundError):
                        os.replace(f"{file}{end}", f"{aside}{end}")
        return self._opened(file.name, TABLES, "normal", "index of prefixes", OLD_SESSIONS)

    def _opened(
        self, name: str, tables: tuple[str, ...], synchronous: str, what: str, *former: str
    ) -> sqlite3.Connection:
        """`former`: tables that it may have too."""
        file = private_file(self.path / name)
        try:
            connection = sqlite3.connect(file, check_same_thread=False, timeout=LOCK_SECONDS)
            check_schema(connection, (*tables, *former))
            made = "".join(f"create table if not exists {table};" for table in tables)
            connection.executescript(f"pragma journal_mode=wal; pragma synchronous={synchronous};" + made)
        except sqlite3.Error as error:
            raise unusable(file, error, what) from error
        return connection

    def _move_old_sessions(self) -> None:
        """Move the sessions of an older version's index to their file."""
        with self._index:
            self._index.execute("begin immediate")
            if self._index.execute("select 1 from sqlite_master where name = 'sessions'").fetchone() is None:
                return
            with self._sessions:
                self._sessions.executemany(
                    "insert or ignore into records (namespace, name, generation, changes, tokens, record, seal) "
                    "values (?, ?, 1, '[]', ?, ?, x'')",
                    self._index.execute("select namespace, name, tokens, record from sessions"),
                )
            self._index.execute("drop table sessions")

    def entries(self) -> Iterable[tuple[str, Entry]]:
        self._seen = None, 0
        return self._newer()

    def find(self, tokens: Sequence[int]) -> list[tuple[str, Entry]]:
        """All that other processes have written since somebody looked, of whatever texts."""
        return list(self._newer(MOST_NEW))

    def _newer(self, most: int = -1) -> Iterator[tuple[str, Entry]]:
        """(key, entry) of the entries that are not known yet, the oldest first; at most so many of them."""
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
        for _, key, kind, frequency_key, start, blob in rows:
            if key in self._keys:
                continue
            if inflated > MOST_TEXTS:
                self.counts["failed"] += 1
                return
            try:
                inflated += len(text := _inflated(blob))
                tokens = unpacked(text)
                entry = Entry(kind, int(frequency_key), int(start), tokens)
                sound = kind in get_args(Kind) and 0 <= start <= len(tokens) and entry.key(self.namespace) == key
            except (SnapshotError, zlib.error, TypeError, ValueError, OverflowError):
                sound = False
            if sound:
                self._keys.add(key)
                yield key, entry
            else:
                self._forget(str(key))

    def session_names(self) -> Iterable[str]:
        with self._sessions_lock:
            rows = self._sessions.execute(
                "select name from records where namespace = ? and record != ''", (self.namespace,)
            ).fetchall()
        return [str(name) for (name,) in rows]

    def read_session(self, name: str) -> SavedSession | None:
        with self._sessions_lock:
            row = self._sessions.execute(
                "select tokens, record, generation, changes, seal from records where namespace = ? and name = ?",
                (self.namespace, name),
            ).fetchone()
        if row is None:
            return None
        generation = int(row[2])
        try:
            self._check_seal(row[4], self._record_seal(self.namespace, name, generation, row[3], *row[:2]))
            tokens, changes = list(unpacked(_inflated(row[0]))), tuple(map(str, json.loads(row[3])))
            return SavedSession(name, tokens, str(row[1]), generation, changes)
        except (SnapshotError, zlib.error, TypeError, ValueError, RecursionError):
            self.counts["quarantined"] += 1
            return SavedSession(name, [], "", generation, damaged=True)

    def set_aside_session(self, name: str) -> None:
        with self._sessions_lock:
            row = self._sessions.execute(
                "select generation, changes, hex(tokens), record from records where namespace = ? and name = ?",
                (self.namespace, name),
            ).fetchone()
        if row is not None:
            told = dict(
                zip(("namespace", "name", "generation", "changes", "tokens", "record"), (self.namespace, name, *row))
            )
            file = self._file(f"session|{name}")
            aside = private_folder(self.path / "damaged") / f"session-{file.name}-{row[0]}.json"
            with atomic_write(aside, FILE_MODE) as part:
                part.write_text(json.dumps(told, default=repr))

    def session_generation(self, name: str) -> int | None:
        with self._sessions_lock:
            row = self._sessions.execute(
                "select generation from records where namespace = ? and name = ?", (self.namespace, name)
            ).fetchone()
        return None if row is None else int(row[0])

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
        file = self._file(key)
        private_folder(file.parent.parent)
        private_folder(file.parent)
        with atomic_write(file, FILE_MODE) as part:
            part.write_bytes(data)
        told = (
            self.namespace, key, entry.kind, entry.frequency_key, entry.start, zlib.compress(packed(entry.tokens), 1),
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
            # What it hangs on is used with it: so that ends of texts go before their beginnings.
            self._used.update(dict.fromkeys(above, told[-1]))
            self._note_uses()

    def write_session(self, session: SavedSession) -> bool:
        tokens = zlib.compress(packed(session.tokens), 1)
        changes = json.dumps(session.changes)
        sealed = self._record_seal(self.namespace, session.name, session.generation, changes, tokens, session.record)
        told = session.generation, changes, tokens, session.record, sealed, self.namespace, session.name
        with self._sessions_lock, self._sessions:
            made = self._sessions.execute(
                "insert or ignore into records (generation, changes, tokens, record, seal, namespace, name) "
                "values (?, ?, ?, ?, ?, ?, ?)",
                told,
            )
            if made.rowcount:
                return True
            changed = self._sessions.execute(
                "update records set generation = ?, changes = ?, tokens = ?, record = ?, seal = ? "
                "where namespace = ? and name = ? and generation = ?",
                (*told, session.generation - 1),
            )
            return bool(changed.rowcount)

    def nbytes(self) -> int:
        """Bytes of all files, as the index has them."""
        with self._lock:
            return int(self._index.execute("select coalesce(sum(size), 0) from entries").fetchone()[0])

    def end(self) -> None:
        if self._sessions_lock.acquire(timeout=ENDING):
            try:
                self._sessions.close()
            finally:
                self._sessions_lock.release()
        if self._lock.acquire(timeout=ENDING):  # else a statement hangs, as on a network's disk: nobody waits for it
            try:
                with suppress(sqlite3.Error), self._index:  # of a full disk, say: others will think it older
                    self._index.execute(f"pragma busy_timeout = {int(1000 * ENDING)}")
                    self._note_uses()
                self._index.close()
            finally:
                self._lock.release()

    def tidy(self) -> None:
        """Remove files that no index knows, and parts of files: of writers that were killed. Younger ones may come."""
        folder, oldest = self.path / "entries", time() - STALE_SECONDS
        with self._lock:
            rows = self._index.execute("select namespace, key from entries").fetchall()
        known = {self._file(str(key), str(namespace)).name for namespace, key in rows}
        for inner in [inner for inner in folder.glob("*") if inner.is_dir()]:
            remove_stale_parts(inner)
            for file in inner.glob("[!.]*"):
                with suppress(OSError):
                    if file.name not in known and file.lstat().st_mtime < oldest:
                        file.unlink()

    # ---- the parts of it

    def _checksum(self, key: str, data: bytes | bytearray) -> str:
        """Of an entry's bytes: what tells damage, or with a key any change."""
        if not self.key:
            return hashlib.sha256(data).hexdigest()
        return seal(self.key, self.namespace.encode(), key.encode(), data).hex()

    def _record_seal(
        self, namespace: str, name: str, generation: int, changes: str, tokens: bytes, record: str
    ) -> bytes:
        """Of a record; nothing without a key."""
        if not self.key:
            return b""
        texts = (part.encode() for part in (namespace, name, str(generation), str(changes), str(record)))
        return seal(self.key, *texts, bytes(tokens))

    def _check_seal(self, found: bytes, right: bytes) -> None:
        """Raise SnapshotError for a seal, or a checksum, of something else."""
        if not hmac.compare_digest(bytes(found), right):
            raise SnapshotError("it is damaged: its checksum is another")

    def _file(self, key: str, namespace: str | None = None) -> Path:
        name = hashlib.sha256(f"{namespace or self.namespace}|{key}".encode()).hexdigest()
        return self.path / "entries" / name[:2] / name

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
        """Have the index know what was read: when something is written to it in any case, for nobody waits then."""
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
        file = self._file(key)
        self.counts["quarantined"] += 1
        if file.exists():
            os.replace(file, private_folder(self.path / "damaged") / file.name)
        self._forget(key)


def _inflated(blob: bytes) -> bytes:
    """Raises SnapshotError for more than any text has."""
    stream = zlib.decompressobj()
    data = stream.decompress(blob, MOST_TEXT)
    if stream.unconsumed_tail or not stream.eof:
        raise SnapshotError("a stored text is too long, or cut short")
    return data
