"""Video files from untrusted sources: some of their frames, decoded by PyAV within limits."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator
from time import monotonic
from typing import TYPE_CHECKING, Any

from lmstate.errors import StateError, UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image

MOST_BYTES = 2**26  # of a file
MOST_PIXELS = 768 * 28 * 28  # of a frame that is kept: larger ones are scaled down
MOST_SOURCE_PIXELS = 2**25  # of a frame in the file
EARLY = 1e-6  # seconds by which times of frames may differ
SECONDS = 60.0  # that decoding the files of a conversation may take
# The first bytes of a file, from the fifth on for the boxes of MP4 -> its format in FFmpeg: no other parser is tried.
MATROSKA = b"\x1a\x45\xdf\xa3"
BOXES = (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip")


def frames_of_file(
    data: bytes, fps: float, most: int, pixels: int, until: float | None = None
) -> tuple[list[Image], float]:
    """Frames of a video file, `fps` for each second, and the number that there are then.

    until: the time, of `monotonic`, at which decoding is given up; None is in `SECONDS`.

    Where these are more than `most`, or have more than `pixels` together, every second one is left out, again and
    again. Raises `UnsupportedError` without PyAV, `StateError` for a file that is too large, damaged, of another
    format than MP4, MOV, MKV and WebM, or without frames.
    """
    try:
        import av
    except ImportError as error:
        raise UnsupportedError("video files need PyAV: pip install 'lmstate[video]'; or give their frames") from error
    if len(data) > MOST_BYTES:
        raise StateError(f"a video has {len(data)} bytes; it may have {MOST_BYTES}")
    if data[:4] != MATROSKA and data[4:8] not in BOXES:
        raise StateError("a video has another format than MP4, MOV, MKV and WebM, or is damaged")
    name, until = "matroska" if data[:4] == MATROSKA else "mp4", monotonic() + SECONDS if until is None else until
    kept: list[Image] = []
    step, shown, begin, time = 1.0 / fps, None, 0.0, 0.0
    try:
        with av.open(io.BytesIO(data), format=name, metadata_errors="replace") as container:
            if not container.streams.video:
                raise StateError("a video file has no pictures")
            stream = container.streams.video[0]
            _refuse_size(stream.codec_context.width, stream.codec_context.height)
            for frame in _decoded(container.demux(stream), until):
                time = time if frame.time is None else float(frame.time)
                if shown is None:
                    begin = time
                else:
                    step = _keep(kept, shown, time - begin - EARLY, step, most, pixels)
                shown = frame
            if shown is not None:
                step = _keep(kept, shown, max(time - begin + EARLY, EARLY), step, most, pixels)
    except StateError:
        raise
    except Exception as error:  # FFmpeg raises many kinds for damaged files
        raise StateError(f"a video is damaged: {str(error)[:120]}") from error
    if not kept:
        raise StateError("a video file has no pictures")
    return kept, 1.0 / step


def _decoded(packets: Iterable[Any], until: float) -> Iterator[Any]:
    """The frames of packets, of which many may have none."""
    for packet in packets:
        if monotonic() > until:
            raise StateError(f"videos take more than {SECONDS:g} seconds to decode; give shorter ones")
        yield from packet.decode()


def _keep(kept: list[Image], shown: Any, until: float, step: float, most: int, pixels: int) -> float:
    """Keep the frame that is shown up to a time, as often as one is due. Returns the seconds between frames."""
    image: Image | None = None
    while len(kept) * step < until:
        image = _image(shown) if image is None else image
        kept.append(image)
        if len(kept) > max(1, min(most, pixels // (kept[0].width * kept[0].height))):
            del kept[1::2]
            step *= 2
    return step


def _image(frame: Any) -> Image:
    """A frame in RGB, turned as its camera says, and scaled down where it is large."""
    _refuse_size(frame.width, frame.height)
    factor = min(1.0, (MOST_PIXELS / (frame.width * frame.height)) ** 0.5)
    width, height = (max(1, int(side * factor)) for side in (frame.width, frame.height))
    image: Image = frame.to_image(width=width, height=height)
    return image.rotate(frame.rotation, expand=True) if frame.rotation else image


def _refuse_size(width: int, height: int) -> None:
    if not 0 < width * height <= MOST_SOURCE_PIXELS:
        raise StateError(f"a video has {width} x {height} pixels; it may have {MOST_SOURCE_PIXELS}")
