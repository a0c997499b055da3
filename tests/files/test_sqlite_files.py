"""SQLite files that several threads or processes open for the first time at once."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from lmstate.engine.tiers.folder import FolderTier
from lmstate.engine.tiers.sqlite_records import SqliteRecords
from lmstate.state.snapshot_folder import SnapshotFolder

OPENERS: dict[str, Callable[[Path], object]] = {
    "snapshots": SnapshotFolder,
    "records": lambda path: SqliteRecords(path / "records.sqlite3", b""),
    "prefixes": lambda path: FolderTier(path, "tiny", 10**9),
}
TOGETHER, FILES = 4, 40


@pytest.mark.parametrize("kind", OPENERS)
def test_those_who_open_a_new_file_at_once_wait_for_each_other(kind: str, tmp_path: Path) -> None:
    begin = Barrier(TOGETHER)

    def come(path: Path) -> object:
        begin.wait()
        return OPENERS[kind](path)

    with ThreadPoolExecutor(TOGETHER) as pool:
        for number in range(FILES):
            (folder := tmp_path / str(number)).mkdir()
            for opened in [pool.submit(come, folder) for _ in range(TOGETHER)]:
                assert opened.result() is not None
