"""Folders and files that other users of the machine cannot read, since the engine keeps what people wrote."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

FILE_MODE, FOLDER_MODE = 0o600, 0o700


def private_folder(path: Path) -> Path:
    """Make a folder that only its owner can enter, and those above it. One that is there keeps its mode."""
    path.mkdir(mode=FOLDER_MODE, parents=True, exist_ok=True)
    return path


def private_file(path: Path) -> Path:
    """Make an empty file that only its owner can read, or take away what others may do with one that is there."""
    with suppress(OSError):  # the next open says what is wrong
        os.close(os.open(path, os.O_CREAT | os.O_RDWR, FILE_MODE))
        if path.stat().st_mode & 0o077:
            path.chmod(FILE_MODE)
    return path
