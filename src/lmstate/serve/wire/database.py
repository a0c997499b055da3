"""SQLite files of the server's stores."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from lmstate.files.private import private_file, private_folder
from lmstate.files.sqlite_schema import unusable


def open_database(folder: Path | None, name: str, schema: str) -> sqlite3.Connection:
    """A connection to `name` in a folder, made where there is none, or in memory; for threads that share a lock.

    schema: statements that make tables where they are missing. Raises `OSError`.
    """
    if folder is not None:
        private_folder(folder)
    file = Path(":memory:") if folder is None else private_file(folder / name)
    try:
        connection = sqlite3.connect(file, check_same_thread=False)
        with connection:
            if folder is not None:
                connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(schema)
    except sqlite3.Error as error:
        raise unusable(file, error, "database of the server") from error
    return connection
