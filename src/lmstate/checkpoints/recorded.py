"""The model that a folder of the cache of conversions was made of, read without torch."""

from __future__ import annotations

import contextlib
from pathlib import Path

from lmstate.files.json_object import read_object
from lmstate.files.tensor_header import metadata_of


def recorded_source(folder: Path) -> str | None:
    """The path of the checkpoint that a folder of the cache was made of; None if nothing there tells."""
    for path in sorted(folder.glob("*.safetensors")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return metadata_of(path)["source"]
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return str(read_object(folder / "memory.json")["path"])
    return None
