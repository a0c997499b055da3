"""Embeddings of pictures between a front, whose tower makes them, and its replicas, which keep them by content."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from math import prod
from pathlib import Path
from threading import Lock

import msgspec
import torch

from lmstate.cluster.parts import parts_of
from lmstate.engine.results import EngineError
from lmstate.state.media import AXES, Media, MediaSpan

MOST_BYTES = 2**29  # of the pictures of a request, and of those that a replica keeps for later ones


class PictureMissing(EngineError):
    """A replica has not these pictures of a request, or not any more: send them, and the request again."""

    def __init__(self, hashes: list[str]) -> None:
        super().__init__(f"{len(hashes)} pictures of a request are not at the replica that it was sent to")
        self.hashes = hashes


class WirePicture(msgspec.Struct, frozen=True):
    """A picture whose bytes were uploaded: positions, int64 `[3, N]`, if it has some, then embeddings, float32."""

    to: str  # the replica
    id: str  # of the upload
    hash: str
    token: int
    shape: tuple[int, int]  # of its embeddings
    axes: bool  # whether it has positions
    text: tuple[int, ...] = ()
    beside: bool = False


def picture_to_wire(media: Media, to: str, id: str) -> WirePicture:
    assert media.embeddings is not None
    rows, width = media.embeddings.shape
    axes = media.positions is not None
    return WirePicture(to, id, media.hash, media.token, (rows, width), axes, media.text, media.beside)


async def picture_parts(media: Media) -> AsyncIterator[bytes]:
    """The bytes of a picture that a replica is sent."""
    for tensor in (media.positions, media.embeddings):
        if tensor is not None:
            async for part in parts_of(tensor.cpu().contiguous().view(torch.uint8).flatten().numpy().data):
                yield part


def read_picture(told: WirePicture, path: Path) -> Media:
    """A picture from an uploaded file. Raises ValueError for a file that has other bytes, or another hash."""
    positions, size = (8 * AXES * told.shape[0] if told.axes else 0), path.stat().st_size
    if min(told.shape) < 1 or size > MOST_BYTES or size != positions + 4 * prod(told.shape):
        raise ValueError(f"a picture of {told.shape} embeddings came with {size} bytes")
    data = bytearray(path.read_bytes())
    axes = torch.frombuffer(data, dtype=torch.int64, count=positions // 8).view(AXES, -1) if told.axes else None
    embeddings = torch.frombuffer(data, dtype=torch.float32, offset=positions).view(told.shape)
    if (media := Media.of(embeddings, told.token, axes, told.text, told.beside)).hash != told.hash:
        raise ValueError("a picture came damaged: it is not the one of its hash")
    return media


def without_copies(media: Sequence[MediaSpan]) -> dict[str, Media]:
    """The pictures of a request by their hashes. Raises ValueError where they are too large to send."""
    pictures = {span.media.hash: span.media for span in media}
    size = sum(tensor.nbytes for one in pictures.values() for tensor in one.tensors)
    if size > MOST_BYTES:
        raise ValueError(
            f"the request has {size:,} bytes of pictures; a front sends at most {MOST_BYTES:,} with one: leave some out"
        )
    if any(one.embeddings is None for one in pictures.values()):
        raise ValueError("the request has pictures without embeddings, which a replica cannot read: encode them again")
    return pictures


class KeptPictures:
    """The pictures that were used last, `MOST_BYTES` of them, by hash. Safe for any thread."""

    def __init__(self) -> None:
        self._kept: OrderedDict[str, Media] = OrderedDict()
        self._lock = Lock()

    def put(self, media: Media) -> None:
        with self._lock:
            self._kept[media.hash] = media
            while len(self._kept) > 1 and sum(_nbytes(one) for one in self._kept.values()) > MOST_BYTES:
                self._kept.popitem(last=False)

    def known(self, spans: Sequence[MediaSpan]) -> tuple[MediaSpan, ...]:
        """Spans that have a hash for each picture, with those that are here."""
        with self._lock:
            return tuple(MediaSpan(span.at, self._kept.get(span.media.hash, span.media)) for span in spans)

    def placed(self, spans: Sequence[MediaSpan]) -> tuple[MediaSpan, ...]:
        """Spans that have a hash for each picture, with the pictures. Raises PictureMissing, and ValueError for a span
        that differs from its picture."""
        with self._lock:
            hashes = dict.fromkeys(span.media.hash for span in spans)
            for hash in hashes:
                if hash in self._kept:
                    self._kept.move_to_end(hash)
            if missing := [hash for hash in hashes if hash not in self._kept]:
                raise PictureMissing(missing)
            found = tuple(MediaSpan(span.at, self._kept[span.media.hash]) for span in spans)
        if list(found) != list(spans):
            raise ValueError("a picture of a request is told with another token or length than it has")
        return found


def _nbytes(media: Media) -> int:
    return sum(tensor.nbytes for tensor in media.tensors)
