"""Snapshots on disk: one safetensors file, written whole or not at all, and checked before it is believed."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lmstate.errors import SnapshotError
from lmstate.files.atomic import atomic_write

if TYPE_CHECKING:
    from lmstate.state.snapshot import Snapshot

FORMAT = "lmstate-snapshot"
VERSION = 3
MOST_TOKENS = 2**31


def save(snapshot: Snapshot, path: str | os.PathLike[str]) -> None:
    """Write a snapshot. Raises `OSError` where the file cannot be written; an older file of that name is then whole.

    Layout: metadata `format`, `version`, `fingerprint`, `cached`, `regime`, `layers`, `notes`; tensors `tokens` int64
    `[length]`, `logits` float32 `[V]` if known, and `layers.{index}.{name}` for what each layer captured.
    """
    from safetensors.torch import save_file

    tensors = {"tokens": torch.tensor(snapshot.tokens, dtype=torch.int64)}
    if snapshot.logits is not None:
        tensors["logits"] = snapshot.logits
    for index, layer in enumerate(snapshot.layers):
        tensors.update({f"layers.{index}.{name}": tensor for name, tensor in layer.items()})
    metadata = {
        "format": FORMAT,
        "version": str(VERSION),
        "fingerprint": snapshot.fingerprint,
        "cached": str(snapshot.cached),
        "regime": str(snapshot.regime),
        "layers": str(len(snapshot.layers)),
        "notes": snapshot.notes,
    }
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(Path(path)) as part:
        save_file(whole, part, metadata)


def load(path: str | os.PathLike[str]) -> Snapshot:
    """Read a snapshot that `save` wrote. Raises `SnapshotError` if it is damaged or none, `OSError` if unreadable.

    Whether it fits a model is checked when it is restored.
    """
    from lmstate.state.snapshot import Snapshot

    path = Path(path)
    metadata, tensors = read_tensors(path, FORMAT, VERSION, "lmstate snapshot")
    tokens, logits = _tokens(path, tensors), tensors.pop("logits", None)
    if logits is not None and (logits.dtype != torch.float32 or logits.ndim != 1):
        raise SnapshotError(f"{path} has logits {logits.dtype} {list(logits.shape)}; they are one float32 vector")
    cached = whole_number(path, metadata, "cached", len(tokens))
    regime = whole_number(path, metadata, "regime", MOST_TOKENS)
    layers = by_layer(path, tensors, whole_number(path, metadata, "layers", 100_000))
    fingerprint, notes = metadata.get("fingerprint", ""), metadata.get("notes", "")
    return Snapshot(tokens, cached, regime, logits, layers, fingerprint, notes)


# ---- what any file of layers has in common


def read_tensors(path: Path, format_: str, version: int, what: str) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Metadata and tensors of a safetensors file that names this format and version.

    Raises `SnapshotError` if it is damaged or no `what`, `OSError` if unreadable.
    """
    from safetensors import SafetensorError, safe_open

    with path.open("rb"):  # so that what is missing or forbidden is an OSError of its own kind
        pass
    try:
        with safe_open(path, framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != format_:
                raise SnapshotError(f"{path} is a safetensors file, but no {what}")
            if metadata.get("version") != str(version):
                raise SnapshotError(
                    f"{path} is a {what} of version {metadata.get('version')!r}; this lmstate reads version {version}"
                )
            return metadata, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, UnicodeDecodeError, OverflowError) as error:
        raise SnapshotError(f"{path} is damaged, or no {what}: {error}") from error


def by_layer(path: Path, tensors: dict[str, Tensor], count: int) -> tuple[dict[str, Tensor], ...]:
    """The tensors `layers.{index}.{name}` of each of `count` layers; a tensor that is none of them is an error."""
    layers: tuple[dict[str, Tensor], ...] = tuple({} for _ in range(count))
    for name, tensor in tensors.items():
        start, _, rest = name.partition(".")
        number, _, part = rest.partition(".")
        counted = number.isascii() and number.isdecimal() and len(number) < 12
        if start != "layers" or not counted or int(number) >= count or not part:
            raise SnapshotError(f"{path} holds a tensor {name[:80]!r} that belongs to no layer")
        layers[int(number)][part] = tensor
    return layers


def whole_number(path: Path, metadata: dict[str, str], name: str, most: int) -> int:
    text = metadata.get(name, "")
    if not (text.isascii() and text.isdecimal() and len(text) < 12 and int(text) <= most):
        raise SnapshotError(f"{path} says {name}={text[:40]!r}; it must be a number up to {most}")
    return int(text)


def _tokens(path: Path, tensors: dict[str, Tensor]) -> tuple[int, ...]:
    tokens = tensors.pop("tokens", None)
    if tokens is None or tokens.dtype != torch.int64 or tokens.ndim != 1:
        raise SnapshotError(f"{path} has no token ids; a snapshot has them as one int64 vector")
    if len(tokens) and int(tokens.min()) < 0:
        raise SnapshotError(f"{path} has negative token ids")
    return tuple(tokens.tolist())
