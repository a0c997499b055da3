"""Bytes of any number, sent in parts: neither side holds more of them than one part."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from time import monotonic
from uuid import uuid4

import msgspec

PART = 2**20  # bytes of a part
MOST_OPEN = 64  # uploads that are not complete: the oldest goes
ABANDONED = 300.0  # seconds without a part after which an upload goes: its sender gives up much sooner


class WirePart(msgspec.Struct, frozen=True):
    """The next bytes of an upload to a replica."""

    to: str  # the replica
    id: str  # of the upload
    start: int
    data: bytes


class Uploads:
    """Bytes that arrive in parts, in files of a private folder. Safe for any thread."""

    def __init__(self) -> None:
        self._folder: TemporaryDirectory[str] | None = None
        self._open: OrderedDict[str, tuple[Path, float]] = OrderedDict()  # and when its last part came
        self._lock = Lock()

    def add(self, part: WirePart) -> None:
        """Append a part. Raises ValueError for one that does not follow the last one."""
        with self._lock:
            if self._folder is None:
                self._folder = TemporaryDirectory(prefix="lmstate-upload-")
            path, _ = self._open.pop(part.id, (Path(self._folder.name, uuid4().hex), 0.0))
            try:
                with path.open("ab") as file:
                    if file.tell() != part.start:
                        raise ValueError(
                            f"a part of an upload begins at {part.start}; {file.tell()} bytes came before it"
                        )
                    file.write(part.data)
            except BaseException:  # such as a full disk: the parts before cannot be used any more
                path.unlink(missing_ok=True)
                raise
            self._open[part.id] = path, monotonic()
            while len(self._open) > MOST_OPEN:
                self._drop_oldest()

    def drop_abandoned(self) -> None:
        """Remove the uploads whose senders are gone."""
        with self._lock:
            while self._open and monotonic() - next(iter(self._open.values()))[1] > ABANDONED:
                self._drop_oldest()

    def _drop_oldest(self) -> None:
        path, _ = self._open.popitem(last=False)[1]
        path.unlink()

    @contextmanager
    def taken(self, id: str) -> Iterator[Path]:
        """The file of an upload that is complete; it is removed then. Raises ValueError for an unknown one."""
        with self._lock:
            upload = self._open.pop(id, None)
        if upload is None:
            raise ValueError("an upload is not here: it did not come, or others came after it; send it again")
        path, _ = upload
        try:
            yield path
        finally:
            path.unlink()


async def parts_of(data: bytes | memoryview) -> AsyncIterator[bytes]:
    """One part or more, of no bytes if there are none."""
    view = memoryview(data)
    for start in range(0, max(1, len(view)), PART):
        yield bytes(view[start : start + PART])


async def parts_of_file(path: Path) -> AsyncIterator[bytes]:
    """The same of a file. The loop goes on while the disk is waited for."""
    with path.open("rb") as file:
        data: bytes | None = None
        while data is None or len(data) == PART:
            yield (data := await asyncio.to_thread(file.read, PART))
