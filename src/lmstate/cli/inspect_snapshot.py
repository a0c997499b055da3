"""Facts of a snapshot for `lmstate inspect`."""

from __future__ import annotations

from itertools import groupby

from lmstate.cli.output import size
from lmstate.state import Snapshot


def snapshot_rows(snapshot: Snapshot) -> list[tuple[str, str]]:
    """Names and values: what it holds, and the model that it is of, word by word of its fingerprint."""
    words = (word.partition("=") for word in snapshot.fingerprint.split())
    return [
        ("model", snapshot.model or "unknown"),
        ("tokens", f"{snapshot.length:,} ({snapshot.backlog} to recompute)"),
        ("last logits", "unknown" if snapshot.logits is None else "held"),
        ("bytes", size(snapshot.nbytes)),
        ("notes", f"{len(snapshot.notes):,} characters"),
        *((f"model: {name}", value) for name, _, value in words),
    ]


def layer_rows(snapshot: Snapshot) -> list[tuple[str, str, str]]:
    """Runs of layers that hold the same: their numbers, the names and shapes of their tensors, and bytes."""
    described = [
        ", ".join(f"{name} {str(t.dtype).removeprefix('torch.')} {list(t.shape)}" for name, t in sorted(layer.items()))
        for layer in snapshot.layers
    ]
    rows = []
    for text, run in groupby(range(len(described)), key=described.__getitem__):
        numbers = list(run)
        held = sum(tensor.nbytes for index in numbers for tensor in snapshot.layers[index].values())
        name = str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"
        rows.append((name, text or "nothing", size(held)))
    return rows
