"""The cache of converted checkpoints: what took work to make, in one file that the next start only maps.

A folder per checkpoint (its name is the source's key), in it for a GGUF `memory.json` and `tokenizer.json`, and for
each storage asked for one `<kind>.safetensors`. Files appear whole (written beside, then renamed), so processes that
start at the same time do not disturb one another. A file that is damaged, or that anything wrote to since, is thrown
away and made again. Gigabytes are not read to find that out: a file carries the time at which it was written, and one
whose time of modification is another was changed (or copied, and is made again for nothing).
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import struct
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmstate.errors import ModelError
from lmstate.files.atomic import atomic_write
from lmstate.files.safetensors import DTYPES, TensorFile
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.grouped import weight_from_tensors

FORMAT = 8  # of everything in the cache; raise it when a file's meaning changes, and old ones are made again
LINE = 64  # bytes of a cache line
NAMES = {dtype: name for name, dtype in DTYPES.items()}
SPARE_BYTES = 2**30  # leave this many bytes of the disk free


class ConversionCache:
    """The matrices of one checkpoint in one storage, by the names that they were asked for with.

    `source`: the checkpoint's path, which the file notes for `recorded.recorded_source`.
    """

    def __init__(self, path: Path, source: Path) -> None:
        self._path = path
        self._source = source
        self._file = _open(path)
        self._shapes: dict[str, Any] = json.loads(self._file.metadata["weights"]) if self._file else {}
        self._new: dict[str, Weight] = {}
        self._errors: dict[str, float | None] = {label: error for label, (*_, error) in self._shapes.items()}

    def get(self, label: str) -> Weight | None:
        """The matrix kept under a label, mapped from the file; None if there is none."""
        if self._file is None or label not in self._shapes:
            return None
        kind, shape, parts, _ = self._shapes[label]
        tensors = {part: self._file.tensor(f"{label}#{part}") for part in parts}
        try:
            return weight_from_tensors(kind, tuple(shape), tensors)
        except (ValueError, KeyError, TypeError, IndexError, RuntimeError):
            return None  # of another layout than this version packs: convert again

    def error(self, label: str) -> float | None:
        """The error that was put beside the matrix that is kept under a label."""
        return self._errors.get(label)

    def put(self, label: str, weight: Weight, error: float | None = None) -> None:
        """Keep a matrix from the next `save` on; with what quantizing it lost, where that is worth a warning."""
        self._new[label] = weight
        self._errors[label] = error

    def save(self) -> None:
        """Write what was put. A full disk or a read-only folder is not an error: the next start converts again."""
        if not self._new:
            return
        weights = dict(self._new)
        for label in self._shapes:
            kept = self.get(label)
            if kept is not None:
                weights.setdefault(label, kept)
        self._new = {}
        tensors = {f"{label}#{part}": t for label, w in weights.items() for part, t in w.tensors().items()}
        shapes = {
            label: [w.kind, list(w.shape), list(w.tensors()), self._errors.get(label)] for label, w in weights.items()
        }
        with contextlib.suppress(OSError):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            needed = sum(tensor.nbytes for tensor in tensors.values())
            if shutil.disk_usage(self._path.parent).free > needed + SPARE_BYTES:
                metadata = {
                    "format": str(FORMAT),
                    "source": str(self._source.absolute()),
                    "weights": json.dumps(shapes),
                }
                _save_tensors(self._path, tensors, metadata)


def _open(path: Path) -> TensorFile | None:
    """A packed file that reads back whole, or None. A damaged one is removed."""
    try:
        file = TensorFile(path)
        unchanged = file.metadata.get("written") == str(path.stat().st_mtime_ns)
        shapes = json.loads(file.metadata["weights"])
        sound = (
            unchanged
            and file.metadata.get("format") == str(FORMAT)
            and all(f"{label}#{part}" in file.entries for label, (_, _, parts, _) in shapes.items() for part in parts)
        )
    except OSError:
        return None
    except (ModelError, KeyError, TypeError, ValueError, AttributeError, RecursionError):
        sound = False
    if not sound:
        with contextlib.suppress(OSError):
            path.unlink()
        return None
    return file


def _save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """A safetensors file whose data begin on a cache line, those with whole lines first: kernels read it as it is."""
    written = int(time.time()) // 2 * 2 * 10**9  # a time that every file system can keep, in nanoseconds
    metadata = {**metadata, "written": str(written)}
    ordered = sorted(tensors.items(), key=lambda item: (-(item[1].nbytes & -item[1].nbytes), item[0]))
    header: dict[str, Any] = {"__metadata__": metadata}
    reached = 0
    for name, tensor in ordered:
        offsets = [reached, reached + tensor.nbytes]
        header[name] = {"dtype": NAMES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": offsets}
        reached = offsets[1]
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % LINE)
    with atomic_write(path) as beside:
        with beside.open("wb") as file:
            file.write(struct.pack("<Q", len(text)) + text)
            for _, tensor in ordered:
                file.write(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        os.utime(beside, ns=(written, written))
