"""Atomic writes: a file is the old one or the new one, whatever stops the writer."""

from __future__ import annotations

import contextlib
import errno
import os
import re
import secrets
import stat
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

PART = re.compile(r"\.(?P<name>.*)\.(?P<pid>[0-9]+)-[0-9a-f]{8}\.part", re.DOTALL)
STALE_SECONDS = 600  # a process of another machine that shares the folder may still write before


@contextmanager
def atomic_write(path: Path, mode: int = 0o666) -> Iterator[Path]:
    """Yield a temporary path in the same folder; on a clean exit it is synced and renamed to `path`, else removed.

    A link is followed and stays. A new file has `mode`, but for the umask; one that is replaced keeps its mode.
    Leftovers of earlier writes to this path by killed processes are removed. Raises `OSError` that names `path`, also
    where it is not a regular file: a rename would replace a pipe or a device.
    """
    named, path = path, Path(os.path.realpath(path))
    with contextlib.suppress(FileNotFoundError):
        found = path.stat().st_mode
        if stat.S_ISDIR(found):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(named))
        if not stat.S_ISREG(found):
            raise OSError(errno.EINVAL, "is a pipe, a socket or a device; name a file to write", str(named))
    remove_stale_parts(path.parent, path.name)
    # Created as `open` would, so that the umask counts; exclusively, so that no planted link is followed.
    part = path.parent / f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}.part"
    try:
        os.close(os.open(part, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode))
        try:
            with contextlib.suppress(FileNotFoundError):
                part.chmod(stat.S_IMODE(path.stat().st_mode))
            yield part
            with part.open("rb+") as file:
                os.fsync(file.fileno())
            os.replace(part, path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:  # of a full disk it names no file, else the part, which the caller does not know
        if error.errno is None or error.filename not in (None, str(part)):
            raise
        raise OSError(error.errno, os.strerror(error.errno), str(named)) from error
    sync_folder(path.parent)  # the rename itself must reach the disk too


def sync_folder(path: Path) -> None:
    """Have what was created, renamed and removed in a folder reach the disk, where the system can be told to."""
    if os.name == "posix":
        folder = os.open(path, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def remove_stale_parts(folder: Path, name: str = "") -> None:
    """Remove parts of earlier writes whose process is gone, and that were not touched for a while.

    Of writes to the file `name` in a folder, by default to any.
    """
    oldest = time.time() - STALE_SECONDS
    with contextlib.suppress(OSError):
        for found in os.listdir(folder):
            told = PART.fullmatch(found)
            if told is None or (name and told["name"] != name) or _runs(int(told["pid"])):
                continue
            if (part := folder / found).stat().st_mtime < oldest:
                part.unlink(missing_ok=True)


def _runs(pid: int) -> bool:
    """Whether a process of this number runs here; yes where that cannot be told."""
    if os.name != "posix":  # elsewhere `kill` ends it
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        return True
    return True
