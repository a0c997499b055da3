"""A cache of transformers as an immutable value, and that value on disk."""

from __future__ import annotations

import hashlib
import json
import os
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lmstate.errors import SnapshotError
from lmstate.state.layer_file import MOST_TOKENS, by_layer, metadata_number, read_layers, write_layers

FORMAT = "lmstate-transformers-cache"
VERSION = 2
SAMPLE = 64  # elements of each weight that the fingerprint reads
LOCAL = ("transformers_version", "_name_or_path", "dtype", "torch_dtype", "_attn_implementation")


@dataclass(frozen=True)
class CacheSnapshot:
    """All rows of a cache at one length. `known`: ids of earlier tokens are not in `history`."""

    length: int
    layers: tuple[tuple[str, dict[str, Tensor]], ...] = field(repr=False)
    known: int
    history: dict[str, Tensor] = field(repr=False)
    fingerprint: str

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        held = [tensor for _, layer in self.layers for tensor in layer.values()] + list(self.history.values())
        return sum(tensor.nbytes for tensor in held)

    def check(self, fingerprint: str, kinds: list[str]) -> None:
        """Raise `SnapshotError` unless it belongs to a model of this fingerprint, with layers of these kinds."""
        if self.fingerprint != fingerprint:
            raise SnapshotError(
                "the snapshot was made with another model, or with other weights of it; restore it there, or feed the "
                "text to this model"
            )
        if [kind for kind, _ in self.layers] != kinds:
            raise SnapshotError("the snapshot's layers are not those of this model's cache: the file was changed")


def fingerprint_of(model: PreTrainedModel) -> str:
    """sha256 over the config and, of every weight, its name, shape, dtype and an even sample of its content.

    Read again each time, since nothing tells of every change: PEFT merges adapters through `weight.data`, which moves
    no version counter. A change of a few elements beside the sample goes unseen.
    """
    config = {name: value for name, value in model.config.to_dict().items() if name not in LOCAL}
    digest = hashlib.sha256(json.dumps(config, sort_keys=True, default=repr).encode())
    samples: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for name, weight in model.state_dict().items():
        digest.update(f"{name} {tuple(weight.shape)} {weight.dtype};".encode())
        flat = weight.detach().reshape(-1)
        samples.setdefault((weight.dtype, weight.device), []).append(flat[:: max(1, len(flat) // SAMPLE)])
    for parts in samples.values():  # together, so that a device is waited for once
        digest.update(torch.cat(parts).cpu().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def save(snapshot: CacheSnapshot, path: str | os.PathLike[str]) -> None:
    """Write it. Layout: metadata `format`, `version`, `fingerprint`, `length`, `known`, `kinds` (JSON); tensors
    `layers.{index}.{name}` and `history.{name}`. Raises `OSError`; an older file of that name is then whole.
    """
    tensors = {f"history.{name}": tensor for name, tensor in snapshot.history.items()}
    for index, (_, layer) in enumerate(snapshot.layers):
        tensors.update({f"layers.{index}.{name}": tensor for name, tensor in layer.items()})
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "fingerprint": snapshot.fingerprint,
        "length": str(snapshot.length),
        "known": str(snapshot.known),
        "kinds": json.dumps([kind for kind, _ in snapshot.layers]),
    }
    write_layers(path, metadata, tensors)


def load(path: str | os.PathLike[str]) -> CacheSnapshot:
    """Read what `save` wrote. Raises `SnapshotError` if it is damaged or none, `OSError` if unreadable."""
    path = Path(path)
    metadata, tensors = read_layers(path, FORMAT, VERSION, "file of a StateCache")
    kinds = _kinds(path, metadata)
    length, known = (metadata_number(path, metadata, name, MOST_TOKENS) for name in ("length", "known"))
    named = {name: f"history.{name}" for name in ("ids", "positions", "mask")}
    history = {name: tensors.pop(stored) for name, stored in named.items() if stored in tensors}
    layers = by_layer(path, tensors, len(kinds))
    _check_history(path, history, length, known)
    rows = {_rows(name, tensor) for layer in layers for name, tensor in layer.items()}
    rows |= {len(history["ids"])} if "ids" in history else set()
    if len(rows) > 1 or 0 in rows:
        raise SnapshotError(f"{path} holds tensors of {sorted(rows)} rows; those of one cache all have as many")
    return CacheSnapshot(length, tuple(zip(kinds, layers)), known, history, metadata.get("fingerprint", ""))


def _rows(name: str, tensor: Tensor) -> int:
    axis = 1 if name == "indexer_position_ids" else 0
    return tensor.shape[axis] if tensor.ndim > axis else 0


def _check_history(path: Path, history: dict[str, Tensor], length: int, known: int) -> None:
    """Raise `SnapshotError` unless these are ids and positions of `length` tokens, and a mask of at most as many."""
    ids, positions, mask = (history.get(name) for name in ("ids", "positions", "mask"))
    whole = [x for x in (ids, positions) if x is not None]
    sound = all(x.dtype in (torch.int64, torch.int32) and x.ndim > 1 and x.shape[-1] == length for x in whole)
    sound = sound and (ids is None or ids.ndim == 2)
    if not sound or (mask is not None and (mask.ndim != 2 or mask.shape[1] > length)) or known > length:
        shapes = {name: f"{x.dtype} {list(x.shape)}" for name, x in history.items()}
        raise SnapshotError(f"{path} holds a history {shapes}, {known} of it unknown, that {length} tokens cannot have")


def _kinds(path: Path, metadata: dict[str, str]) -> list[str]:
    try:
        kinds = json.loads(metadata.get("kinds", ""))
    except (ValueError, RecursionError) as error:
        raise SnapshotError(f"{path} does not say what its layers are") from error
    if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
        raise SnapshotError(f"{path} does not say what its layers are")
    return kinds
