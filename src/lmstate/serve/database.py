"""SQLite files of the server's stores."""

from __future__ import annotations

import sqlite3
from pathlib import Path


def open_database(folder: Path | None, name: str, schema: str) -> sqlite3.Connection:
    """A connection to `name` in a folder, made where there is none, or in memory; for threads that share a lock.

    schema: statements that make tables where they are missing. Raises `OSError` or `sqlite3.Error`.
    """
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(":memory:" if folder is None else str(folder / name), check_same_thread=False)
    with connection:
        if folder is not None:
            connection.execute("PRAGMA journal_mode=WAL")
        connection.executescript(schema)
    return connection
