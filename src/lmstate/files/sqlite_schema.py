"""SQLite files from outside: a view, a trigger or a computed column makes a plain query compute whatever it says."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable
from pathlib import Path
from time import monotonic, sleep


def check_schema(connection: sqlite3.Connection, tables: Iterable[str]) -> None:
    """Raise `sqlite3.DatabaseError` for a database that has more than `tables`: `name (columns)`, as they are made."""
    known = {f"CREATE TABLE {table}" for table in tables}
    try:
        found = [sql for (sql,) in connection.execute("select sql from sqlite_master where sql is not null")]
    except UnicodeDecodeError as error:  # also of SQLite's own message, which repeats what it found
        raise sqlite3.DatabaseError("its table definitions are not UTF-8 text") from error
    for sql in found:
        if sql not in known:
            raise sqlite3.DatabaseError("it has other tables, or views or triggers, which could compute anything")


def use_wal(connection: sqlite3.Connection, seconds: float) -> None:
    """Switch a database to a write-ahead log. Raises `sqlite3.Error`.

    SQLite's own time limit does not hold for this switch: it fails at once while another connection opens the same new
    file. So it is tried again for some seconds.
    """
    end = monotonic() + seconds
    while True:
        try:
            connection.execute("pragma journal_mode=wal")
            return
        except sqlite3.OperationalError as error:
            if error.sqlite_errorcode & 0xFF != sqlite3.SQLITE_BUSY or monotonic() >= end:
                raise
            sleep(0.01)


def unusable(file: Path, error: sqlite3.Error, what: str) -> OSError:
    """The error for a file that cannot be opened as `what`; only one that is something else is to be removed.

    SQLite's operational errors are about the surroundings of a file: no space, no permission, a lock that others hold.
    """
    if isinstance(error, sqlite3.OperationalError):
        return OSError(f"{file} cannot be opened to read and write: {error}")
    return OSError(f"{file} is not usable as {what} ({error}); remove it, or name another folder")
