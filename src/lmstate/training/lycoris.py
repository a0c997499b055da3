"""LoHa (2108.06098) and LoKr (2212.10650) adapters: elementwise and Kronecker products of small matrices."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from math import isqrt
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.ops.weights.lora import AdapterTensor, HadamardProduct, KroneckerProduct, Update
from lmstate.training.adapter_config import Parts, RankedConfig

MOST_FACTOR = 2**20


@dataclass(frozen=True)
class LoHaConfig(RankedConfig):
    """LoHa settings: an update is the elementwise product of two matrices of the rank, times `alpha / rank`."""

    peft_type = "LOHA"
    part_names = "hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"

    def fresh(self, module: str, shape: tuple[int, int], norms: Callable[[str], Tensor]) -> dict[str, Tensor]:
        (height, width), rank = shape, self.rank_of(module)
        return {
            "hada_w1_a": _random(height, rank), "hada_w1_b": _random(rank, width),
            "hada_w2_a": _random(height, rank), "hada_w2_b": torch.zeros(rank, width),
        }  # fmt: skip

    def shape(self, parts: Parts) -> tuple[int | None, int | None] | None:
        if set(parts) != set(self.part_names) or any(part.ndim != 2 for part in parts.values()):
            return None
        (height, rank), width = parts["hada_w1_a"].shape, parts["hada_w1_b"].shape[1]
        expected = [(height, rank), (rank, width)] * 2
        return (height, width) if [tuple(parts[name].shape) for name in self.part_names] == expected else None

    def update(self, module: str, first: int, shape: tuple[int, int], parts: Mapping[str, AdapterTensor]) -> Update:
        rank = self.checked_rank(module, len(parts["hada_w1_b"].storage))
        return HadamardProduct(first, shape, parts, self.scale_of(module, rank))

    def to_json(self, targets: list[str], modules: Mapping[str, Mapping[str, AdapterTensor]]) -> dict[str, Any]:
        return {**super().to_json(targets, modules), "modules_to_save": None, "init_weights": True}


@dataclass(frozen=True)
class LoKrConfig(RankedConfig):
    """LoKr settings: an update is the Kronecker product of two matrices, times `alpha / rank`.

    Each side of a module's matrix is a product of two numbers: `factor` and the rest where it divides the side, else
    as near to each other as can be (-1), or the smaller one at most `factor`. The first matrix has the smaller ones,
    the second the larger ones; it is of the rank where that is less than half of its larger side, and so is the first
    one with `decompose_both`.
    """

    peft_type = "LOKR"
    part_names = "lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b"

    decompose_both: bool = False
    factor: int = -1

    def fresh(self, module: str, shape: tuple[int, int], norms: Callable[[str], Tensor]) -> dict[str, Tensor]:
        rank = self.rank_of(module)
        smaller, larger = zip(*(_factors(side, self.factor) for side in shape))
        parts: dict[str, Tensor] = {}
        for name, (height, width), split in (("w1", smaller, self.decompose_both), ("w2", larger, True)):
            if split and rank < max(height, width) / 2:
                parts |= {f"lokr_{name}_a": _random(height, rank), f"lokr_{name}_b": _random(rank, width)}
            else:
                parts[f"lokr_{name}"] = _random(height, width)
        parts["lokr_w1" if "lokr_w1" in parts else "lokr_w1_a"].zero_()
        return parts

    def shape(self, parts: Parts) -> tuple[int | None, int | None] | None:
        heights, widths, known = 1, 1, 0
        for name in ("lokr_w1", "lokr_w2"):
            own = [parts[key] for key in ([name] if name in parts else [f"{name}_a", f"{name}_b"]) if key in parts]
            if not own or any(part.ndim != 2 for part in own) or (len(own) == 1) != (name in parts):
                return None
            if own[0].shape[1] != own[-1].shape[0] and len(own) == 2:
                return None
            heights, widths, known = heights * own[0].shape[0], widths * own[-1].shape[1], known + len(own)
        return (heights, widths) if known == len(parts) else None

    def update(self, module: str, first: int, shape: tuple[int, int], parts: Mapping[str, AdapterTensor]) -> Update:
        ranks = [len(part.storage) for name, part in parts.items() if name.endswith("_b")]
        return KroneckerProduct(first, shape, parts, self.scale_of(module, self.checked_rank(module, *ranks)))

    @classmethod
    def read(cls, path: Path, fields: Config) -> Self:
        both = fields.bool("decompose_both", default=False)
        factor = fields.int("decompose_factor", low=-1, high=MOST_FACTOR, default=-1)
        return replace(super().read(path, fields), decompose_both=both, factor=factor)

    def to_json(self, targets: list[str], modules: Mapping[str, Mapping[str, AdapterTensor]]) -> dict[str, Any]:
        return {
            **super().to_json(targets, modules), "modules_to_save": None, "init_weights": True,
            "decompose_both": self.decompose_both, "decompose_factor": self.factor,
        }  # fmt: skip


def _random(height: int, width: int) -> Tensor:
    """float32 `[height, width]`, of numbers up to one over the square root of the width, as in PEFT."""
    return torch.empty(height, width).uniform_(-(width**-0.5), width**-0.5)


def _factors(size: int, factor: int) -> tuple[int, int]:
    """Two numbers whose product is `size`, as PEFT chooses them."""
    if factor > 0 and size % factor == 0:
        return factor, size // factor
    most = isqrt(size) if factor < 1 else min(isqrt(size), factor)
    smaller = next(number for number in range(max(most, 1), 0, -1) if size % number == 0)
    return smaller, size // smaller
