"""Open files, and nothing else that has a name: a pipe would wait for ever."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from lmstate.errors import ModelError


@contextmanager
def open_regular(path: Path) -> Iterator[BinaryIO]:
    """Open a file for reading. Raises `OSError`, and `ModelError` for anything but a file."""
    if os.path.isdir(path):  # `fdopen` would name its handle
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    handle = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    with os.fdopen(handle, "rb") as file:
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise ModelError(f"{path} is not a regular file")
        yield file
