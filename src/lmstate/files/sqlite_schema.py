"""SQLite files from outside: a view, a trigger or a computed column makes a plain query compute whatever it says."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable


def check_schema(connection: sqlite3.Connection, tables: Iterable[str]) -> None:
    """Raise `sqlite3.DatabaseError` for a database that has more than `tables`: `name (columns)`, as they are made."""
    known = {f"CREATE TABLE {table}" for table in tables}
    try:
        found = [sql for (sql,) in connection.execute("select sql from sqlite_master where sql is not null")]
    except UnicodeDecodeError as error:  # also of SQLite's own message, which repeats what it found
        raise sqlite3.DatabaseError("what it says of its tables is no text") from error
    for sql in found:
        if sql not in known:
            raise sqlite3.DatabaseError("it has other tables, or views or triggers, which could compute anything")
