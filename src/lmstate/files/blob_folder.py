"""A folder of blobs by SHA-256, and an SQLite index of what they are for: snapshots and prefixes on disk build on it.

index.sqlite3        the tables of the folder's owner
<name>/ab/abcd...    a blob; its name is a SHA-256 that its content never changes under
damaged/             an index and blobs that were damaged, to find out why

Several processes may share a folder. A blob is written whole or not at all.
"""

from __future__ import annotations

import logging
import os
import re
import sqlite3
import stat
from collections.abc import Container, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from time import time_ns

from lmstate.files.atomic import atomic_write, remove_stale_parts
from lmstate.files.private import FILE_MODE, private_file, private_folder
from lmstate.files.sqlite_schema import check_schema, unusable, use_wal

LOG = logging.getLogger(__name__)
DIGEST = re.compile("[0-9a-f]{64}")
DAMAGED = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB)


@dataclass(frozen=True)
class BlobFolder:
    """Blobs in the folder `path / name`, and an index with `tables` (`name (columns)`).

    `what` names the index in errors; `seconds`: how long a transaction waits for others; `private`: only the owner can
    read what is made; `old_tables`: tables that the index may have from older versions.
    """

    path: Path
    name: str
    tables: tuple[str, ...]
    what: str
    seconds: float
    private: bool = False
    old_tables: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        self._made(self.path)

    # ---- the index

    @property
    def index(self) -> Path:
        return self.path / "index.sqlite3"

    def open_index(self) -> sqlite3.Connection:
        """Open the index, with its tables. Raises `OSError` for one that is damaged, or has other tables."""
        if self.private:
            private_file(self.index)
        connection = None
        try:
            connection = sqlite3.connect(self.index, check_same_thread=False, timeout=self.seconds)
            check_schema(connection, (*self.tables, *self.old_tables))
            use_wal(connection, self.seconds)
            connection.executescript("".join(f"create table if not exists {table};" for table in self.tables))
        except sqlite3.Error as error:
            if connection is not None:
                connection.close()
            raise unusable(self.index, error, self.what) from error
        return connection

    def open_or_renew_index(self) -> sqlite3.Connection:
        """`open_index` for an index of what can be computed again: a damaged one is set aside."""
        before = self.index.stat() if self.index.exists() else None
        try:
            connection = self.open_index()
            if (found := connection.execute("pragma quick_check(1)").fetchone()[0]) == "ok":
                return connection
            connection.close()
        except OSError as error:
            if getattr(error.__cause__, "sqlite_errorcode", None) not in DAMAGED:
                raise
            found = str(error.__cause__)
        LOG.warning("%s is damaged (%s): it is set aside, and a new one begun", self.index, found)
        with suppress(FileNotFoundError):
            # Another process may have set it aside meanwhile.
            if before is not None and os.path.samestat(before, self.index.stat()):
                aside = self._made(self.path / "damaged") / f"{time_ns()}-{self.index.name}"
                os.replace(self.index, aside)
                for end in ("-wal", "-shm"):
                    with suppress(FileNotFoundError):
                        os.replace(f"{self.index}{end}", f"{aside}{end}")
        return self.open_index()

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """A connection for one transaction, committed at a clean exit. SQLite's errors become `OSError`."""
        with closing(self.open_index()) as connection:
            try:
                yield connection
                connection.commit()
            except sqlite3.Error as error:
                raise OSError(f"{self.index}: {error}") from error

    # ---- blobs

    def file(self, digest: str) -> Path:
        return self.path / self.name / digest[:2] / digest

    @contextmanager
    def writing(self, digest: str) -> Iterator[Path]:
        """Yield a path to write a blob to, which takes its place at a clean exit."""
        file = self.file(digest)
        self._made(file.parent.parent)
        self._made(file.parent)
        with atomic_write(file, FILE_MODE if self.private else 0o666) as part:
            yield part

    def quarantine(self, digest: str) -> None:
        """Set a damaged blob aside, so that it can be written again."""
        with suppress(FileNotFoundError):  # another process may have set it aside
            if (file := self.file(digest)).exists():
                os.replace(file, self._made(self.path / "damaged") / digest)

    def files(self) -> Iterator[tuple[Path, os.stat_result]]:
        """All blobs, none through a link: it may lead to another folder's. Raises `OSError` for a link."""
        top = self.path / self.name
        for file in (top, *top.glob("*"), *top.glob("*/*")):
            with suppress(FileNotFoundError):
                found = file.lstat()
                if stat.S_ISLNK(found.st_mode):
                    raise OSError(f"{file} is a link, and what it leads to may be another's: remove the link")
                if stat.S_ISREG(found.st_mode) and DIGEST.fullmatch(file.name):
                    yield file, found

    def remove_unknown(self, known: Container[str], oldest: float = float("inf")) -> None:
        """Remove blobs that are not `known` and were written before `oldest`, and what killed writers left."""
        for file, found in list(self.files()):  # or an error, and nothing is removed
            if file.name not in known and found.st_mtime < oldest:
                with suppress(OSError):  # the next removal tries again
                    file.unlink()
        for inner in (self.path / self.name).glob("*"):
            if inner.is_dir():
                remove_stale_parts(inner)

    def _made(self, folder: Path) -> Path:
        if self.private:
            return private_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        return folder
