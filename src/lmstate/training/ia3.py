"""(IA)3 adapters (Liu et al. 2022, 2205.05638): vectors that multiply keys, values and the inside of an MLP."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.ops.weights.lora import AdapterTensor, Rescaling, Update
from lmstate.training.adapter_config import AdapterConfig, Parts, named


@dataclass(frozen=True)
class IA3Config(AdapterConfig):
    """(IA)3 settings: the modules whose outputs are multiplied by a vector, or, of those in `feedforward`, the inputs.

    `targets`: the last words of modules' names, or `"all-linear"`; the default is that of the paper, for models with
    Llama's names.
    """

    peft_type = "IA3"
    part_names = ("ia3_l",)

    targets: str | Sequence[str] = ("k_proj", "v_proj", "down_proj")
    feedforward: Sequence[str] = ("down_proj",)

    def fresh(self, module: str, shape: tuple[int, int], norms: Callable[[str], Tensor]) -> dict[str, Tensor]:
        inputs = named(module, self.feedforward) is not None
        return {"ia3_l": torch.ones(1, shape[1]) if inputs else torch.ones(shape[0], 1)}

    def shape(self, parts: Parts) -> tuple[int | None, int | None] | None:
        vector = parts.get("ia3_l")
        if vector is None or vector.ndim != 2 or 1 not in vector.shape:
            return None
        return (None, vector.shape[1]) if len(vector) == 1 else (len(vector), None)

    def update(self, module: str, first: int, shape: tuple[int, int], parts: Mapping[str, AdapterTensor]) -> Update:
        return Rescaling(first, shape, parts, _of_inputs(parts))

    @classmethod
    def read(cls, path: Path, fields: Config) -> Self:
        return cls()

    def to_json(self, targets: list[str], modules: Mapping[str, Mapping[str, AdapterTensor]]) -> dict[str, Any]:
        inputs = {
            target for module, parts in modules.items() if _of_inputs(parts) and (target := named(module, targets))
        }
        return {"target_modules": targets, "feedforward_modules": sorted(inputs), "modules_to_save": None}


def _of_inputs(parts: Mapping[str, AdapterTensor]) -> bool:
    return len(parts["ia3_l"].storage) == 1
