"""One row of a state at one position, as an immutable value."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate.errors import SnapshotError, StateError
from lmstate.state import layer_file
from lmstate.state.rows import Row
from lmstate.state.validate import token_ids, whole_number


@dataclass(frozen=True, repr=False)
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

    def __repr__(self) -> str:
        family = next((word[7:] for word in str(self.fingerprint).split() if word.startswith("family=")), "unknown")
        notes = f", notes {self.notes!r:.80}" if self.notes else ""
        size = f"{self.nbytes / 2**20:,.1f} MiB"
        return f"Snapshot({len(self.tokens)} tokens, {len(self.layers)} layers of a {family:.40} model, {size}{notes})"

    @property
    def length(self) -> int:
        return len(self.tokens)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to one safetensors file, whole or not at all; see `lmstate.state.layer_file`."""
        layer_file.save(self, path)

    @staticmethod
    def load(path: str | os.PathLike[str]) -> Snapshot:
        """Read what `save` wrote. Raises `SnapshotError` for a file that is damaged or is no snapshot."""
        return layer_file.load(path)

    def as_row(self, vocab_size: int, device: torch.device) -> Row:
        """What a state knows of a row beside its layers, in tensors of its own.

        No field is trusted: a snapshot may have been made by hand. Raises `SnapshotError` if one cannot be. What is in
        the tensors of `layers` is for each layer to check.
        """
        try:
            tokens = token_ids(self.tokens, "the snapshot", vocab_size)
            cached, regime = whole_number(self.cached, "cached"), whole_number(self.regime, "regime")
        except StateError as error:
            raise SnapshotError(f"the snapshot is damaged: {error}") from None
        if not 0 <= cached <= len(tokens):
            raise SnapshotError(
                f"the snapshot is damaged: it says that {cached} of its {len(tokens)} tokens are in its layers"
            )
        if not all(isinstance(part, Tensor) for layer in self.layers for part in dict(layer).values()):
            raise SnapshotError("the snapshot is damaged: what it has of its layers is not tensors")
        logits = self.logits
        if logits is None:
            return Row.of(tokens, cached, regime)
        if not isinstance(logits, Tensor) or logits.shape != (vocab_size,) or not logits.is_floating_point():
            raise SnapshotError(f"the snapshot's logits are {_shown(logits)}; this model gives float32 [{vocab_size}]")
        return Row.of(tokens, cached, regime, logits.to(device, torch.float32, copy=True))

    @property
    def nbytes(self) -> int:
        """Bytes of its tensors."""
        held = sum(tensor.nbytes for layer in self.layers for tensor in layer.values())
        return held + (0 if self.logits is None else self.logits.nbytes)


def differences(theirs: str, ours: str) -> str:
    """What two fingerprints disagree on, in words; empty if nothing."""
    if theirs == ours:
        return ""
    there, here = (dict(word.partition("=")[::2] for word in str(text).split()) for text in (theirs, ours))
    named = [name for name in here if there.get(name) != here[name]]
    said = [f"{name} is {there.get(name, 'unknown')[:40]} there and {here[name][:40]} here" for name in named]
    return ", ".join(said) or "its fingerprint cannot be read"


def _shown(thing: object) -> str:
    return f"{thing.dtype} {list(thing.shape)}" if isinstance(thing, Tensor) else f"{thing!r:.80}"
