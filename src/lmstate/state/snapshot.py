"""One row of a state at one position, as an immutable value."""

from __future__ import annotations

import os
from dataclasses import dataclass

from torch import Tensor

from lmstate.state import storage


@dataclass(frozen=True)
class Snapshot:
    """All that a row needs to go on: token ids, last logits and every layer's memory. Nothing in it is shared.

    `cached` of the `length` tokens are in `layers`; the rest (after a rewind that went far back, say) is recomputed by
    the first call after a restore. `regime` is what the keys were rotated for, see `State`. `logits` (float32 `[V]`)
    are those after the last token, None if they are not known. `fingerprint` names the model: words of the form
    name=value, of its config and of a sample of its weights. `notes` is text of the application that made it.
    """

    tokens: tuple[int, ...]
    cached: int
    regime: int
    logits: Tensor | None
    layers: tuple[dict[str, Tensor], ...]
    fingerprint: str
    notes: str = ""

    @property
    def length(self) -> int:
        return len(self.tokens)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one safetensors file, whole or not at all; see `lmstate.state.storage`."""
        storage.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Snapshot:
        """Read what `save` wrote. Raises `SnapshotError` for a file that is damaged or is no snapshot."""
        return storage.load(path)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        held = sum(tensor.nbytes for layer in self.layers for tensor in layer.values())
        return held + (0 if self.logits is None else self.logits.nbytes)
