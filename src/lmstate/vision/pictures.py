"""Pictures from untrusted files: read by Pillow, within limits."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lmstate.errors import StateError, UnsupportedError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
MOST_BYTES = 2**25  # of a file
MOST_PIXELS = 2**26  # of a picture
MOST_RATIO = 100  # of its sides: processors scale the short one up


def picture_file(path: Path) -> bytes:
    """The content of a picture's file, checked by `read_picture`.

    Raises `StateError`, which names the file, for anything but a picture; `OSError` for a file that cannot be read.
    """
    try:
        if (size := path.stat().st_size) > MOST_BYTES:
            raise StateError(f"a picture has {size} bytes; it may have {MOST_BYTES}")
        read_picture(content := path.read_bytes())
    except StateError as error:
        raise StateError(f"{path}: {error}") from None
    return content


def read_picture(data: bytes) -> Image:
    """A picture in RGB, turned as its camera says; of several frames the first.

    Raises `StateError` for a file that is too large, cut short, or none of `FORMATS`: its size is checked before
    anything is unpacked.
    """
    try:
        from PIL import Image, ImageOps, UnidentifiedImageError
    except ImportError as error:
        raise UnsupportedError("pictures need transformers and pillow: pip install 'lmstate[vision]'") from error
    if not isinstance(data, bytes | bytearray | memoryview):
        raise StateError(f"a picture is {data!r:.80}; give the bytes of a file")
    if len(data) > MOST_BYTES:
        raise StateError(f"a picture has {len(data)} bytes; it may have {MOST_BYTES}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            _refuse_size(*image.size)
            image.load()
            return ImageOps.exif_transpose(image).convert("RGB")
    except StateError:
        raise
    except UnidentifiedImageError:
        raise StateError(f"a picture has another format than {', '.join(FORMATS)}, or is damaged") from None
    # Parsers of damaged files raise whatever they come upon.
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise StateError(f"a picture has more pixels than may be: {error}") from None
    except Exception as error:
        raise StateError(f"a picture is damaged: {str(error)[:120]}") from error


def read_frame(image: Any) -> Image:
    """A picture of Pillow in RGB, within the same limits. Raises `StateError`."""
    try:
        from PIL import Image
    except ImportError as error:
        raise UnsupportedError("pictures need transformers and pillow: pip install 'lmstate[vision]'") from error
    if not isinstance(image, Image.Image):
        raise StateError(f"it is {type(image).__name__}; give a picture of Pillow, a path, or the bytes of a file")
    _refuse_size(*image.size)
    try:
        return image.convert("RGB")
    except Exception as error:  # a file that is read only now
        raise StateError(f"a picture is damaged: {str(error)[:120]}") from error


def _refuse_size(width: int, height: int) -> None:
    if width * height > MOST_PIXELS:
        raise StateError(f"a picture has {width} x {height} pixels; it may have {MOST_PIXELS}")
    if max(width, height) > MOST_RATIO * min(width, height):
        raise StateError(f"a picture has {width} x {height} pixels; a side may be {MOST_RATIO} times the other")
