"""One row of a state at one position, as an immutable value."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True)
class Snapshot:
    """All that a row needs to go on: token ids, last logits and every layer's memory. Nothing in it is shared.

    `cached` of the `length` tokens are in `layers`; the rest (after a rewind that went far back, say) is recomputed by
    the first call after a restore. `regime` is what the keys were rotated for, see `State`. `logits` (float32 `[V]`) are
    those after the last token, None if they are not known.
    """

    tokens: tuple[int, ...]
    cached: int
    regime: int
    logits: Tensor | None
    layers: tuple[dict[str, Tensor], ...]
    fingerprint: str

    @property
    def length(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        held = sum(tensor.nbytes for layer in self.layers for tensor in layer.values())
        return held + (0 if self.logits is None else self.logits.nbytes)
