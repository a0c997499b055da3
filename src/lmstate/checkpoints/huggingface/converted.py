"""The part of a config.json that tells how `lmstate convert` made the checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmstate.checkpoints.config import Config
from lmstate.ops.types.weight import FLOAT_KINDS

SECTION = "lmstate"


@dataclass(frozen=True)
class ConvertedCheckpoint:
    """Record of a conversion, by which the new checkpoint computes as its source.

    `weights`: the storage that was asked for, which "auto" stands for from then on. `activation_bits`: those of the
    activations that its quantized tensors multiply by default; 16 for the `rounded` ones, which were floats before.
    """

    weights: str = "auto"
    activation_bits: int = 16
    rounded: frozenset[str] = frozenset()

    @classmethod
    def of(cls, config: Mapping[str, Any], path: Path) -> ConvertedCheckpoint:
        """Read the record in a config. Raises `ModelError` for values that are not there."""
        told = Config(config, f"config of {path}").fields(SECTION)
        if told is None:
            return cls()
        return cls(
            told.str("weights", ("auto", "int4", "int8", *FLOAT_KINDS), default="auto"),
            8 if told.int("activation_bits", 8, 16, default=16) == 8 else 16,
            frozenset(told.strs("rounded", default=())),
        )

    def section(self) -> dict[str, Any]:
        """The values of a config that `of` reads."""
        told: dict[str, Any] = {"weights": self.weights, "activation_bits": self.activation_bits}
        return {**told, "rounded": sorted(self.rounded)} if self.rounded else told
