"""Bytes that the layers of a state and its rows hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lmstate.ops.types.block_table import KVBlock
from lmstate.state.layers.base import LayerState
from lmstate.state.media import held_tensors
from lmstate.state.rows import Row


class Memory(dict[str, int]):
    """Bytes by layer kind. `shared`: of them, those in blocks that other rows, marks or snapshots may hold too."""

    shared = 0


def memory_by_kind(
    layers: Sequence[LayerState], rows: Sequence[Row], logits: Mapping[int, int], positions: int
) -> Memory:
    """Bytes by layer kind, of `positions`, logits, marks and pictures where there are any; each tensor and block once.

    logits: bytes of each tensor of them, by where it is.
    """
    held = Memory({"positions": positions} if positions else {})
    for layer in layers:
        for leaf in layer.leaves():
            held[leaf.kind] = held.get(leaf.kind, 0) + leaf.nbytes()
            held.shared += leaf.nbytes_shared()
    counted = set(logits)
    if any(row.marks for row in rows):
        counted |= {tensor.data_ptr() for layer in layers for tensor in layer.tensors()}
    marks = {
        each.data_ptr(): each.nbytes
        for row in rows
        for mark in row.marks
        for kept in mark.held()
        for each in (kept.tensors if isinstance(kept, KVBlock) else (kept,))
        if each.data_ptr() not in counted
    }
    for name, sizes in (("logits", logits), ("marks", marks), ("media", held_tensors(row.media for row in rows))):
        if sizes:
            held[name] = sum(sizes.values())
    return held


def nbytes_beside(
    layers: Sequence[LayerState], rows: Sequence[Row], own_layers: Sequence[LayerState], own_rows: Sequence[Row]
) -> int:
    """Bytes of a state's layers, last logits and marks, but for what one's own layers and rows hold as well."""
    own = _by_place(own_layers, own_rows)
    return sum(nbytes for place, nbytes in _by_place(layers, rows).items() if place not in own)


def _by_place(layers: Sequence[LayerState], rows: Sequence[Row]) -> dict[int, int]:
    """Bytes of each tensor, by where it is."""
    tensors = [tensor for layer in layers for tensor in layer.tensors()]
    tensors += [row.logits for row in rows if row.logits is not None]
    for kept in (kept for row in rows for mark in row.marks for kept in mark.held()):
        tensors += kept.tensors if isinstance(kept, KVBlock) else [kept]
    return {tensor.data_ptr(): tensor.nbytes for tensor in tensors}
