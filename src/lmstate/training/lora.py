"""LoRA adapters (Hu et al. 2021), and those of DoRA (2402.09353), with a vector of magnitudes beside each pair."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.ops.weights.lora import AdapterTensor, LowRank, Update
from lmstate.training.adapter_config import MOST_RANK, Parts, RankedConfig

# PEFT refuses updates of `out_proj` in these models, and their forward reads the weight of `dt_proj` past its update.
PEFT_REFUSES = {
    "falcon_h1": ("out_proj",), "mamba2": ("out_proj",), "nemotron_h": ("out_proj",),
    "mamba": ("out_proj", "dt_proj"), "falcon_mamba": ("out_proj", "dt_proj"), "jamba": ("dt_proj",),
}  # fmt: skip
MOVED = ("pissa", "olora", "corda", "loftq", "lora_ga")


@dataclass(frozen=True)
class LoraConfig(RankedConfig):
    """LoRA settings: the matrices that get an update, and its rank.

    `targets`: the last words of their modules' names (`"q_proj"`), or `"all-linear"`: every projection of the blocks.
    An update is multiplied by `alpha / rank`, or `alpha / sqrt(rank)` if `rslora` (2312.03732). `dora`: magnitudes of
    outputs are trained apart from directions. `ranks` and `alphas`: those of some modules, by names or regular
    expressions that the end of a module's name matches, of which the first counts, as in PEFT.
    """

    peft_type = "LORA"
    part_names = "lora_A", "lora_B", "lora_magnitude_vector"
    alpha_name = "lora_alpha"
    refused = ("lora_bias", "use_qalora", "use_bdlora", "alora_invocation_tokens", "layer_replication",
               "modules_to_save", "trainable_token_indices", "arrow_config",
               "kasa_config", "velora_config", "monteclora_config")  # fmt: skip

    rslora: bool = False
    dora: bool = False

    def scale_of(self, module: str, rank: int) -> float:
        return self.alpha_of(module) / (math.sqrt(rank) if self.rslora else rank)

    def fresh(self, module: str, shape: tuple[int, int], norms: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """A is random as in PEFT, B is zero, and magnitudes begin as norms."""
        (height, width), rank = shape, self.rank_of(module)
        parts = {
            "lora_A": torch.empty(rank, width).uniform_(-(width**-0.5), width**-0.5),
            "lora_B": torch.zeros(height, rank),
        }
        return {**parts, "lora_magnitude_vector": norms(module)} if self.dora else parts

    def shape(self, parts: Parts) -> tuple[int | None, int | None] | None:
        dims = {"lora_A": 2, "lora_B": 2} | ({"lora_magnitude_vector": 1} if self.dora else {})
        if {name: part.ndim for name, part in parts.items()} != dims:
            return None
        down, up = parts["lora_A"], parts["lora_B"]
        if not 1 <= len(down) <= MOST_RANK:
            raise ModelError(f"has rank {len(down)}; 1 to {MOST_RANK} will do")
        if len(down) != up.shape[1]:
            raise ModelError(f"has ranks {len(down)} and {up.shape[1]}")
        if self.dora and len(magnitudes := parts["lora_magnitude_vector"]) != len(up):
            raise ModelError(f"has {len(up)} outputs and {len(magnitudes)} magnitudes")
        return up.shape[0], down.shape[1]

    def update(self, module: str, first: int, shape: tuple[int, int], parts: Mapping[str, AdapterTensor]) -> Update:
        rank = self.checked_rank(module, len(parts["lora_A"].storage))
        return LowRank(first, shape, parts, self.scale_of(module, rank))

    @classmethod
    def read(cls, path: Path, fields: Config) -> Self:
        if (bias := fields.str("bias", default="none")) != "none":
            raise ModelError(f"{path}: bias={bias[:40]!r} is not supported; an adapter trains no biases here")
        parameters = fields.get("target_parameters") or []
        if not isinstance(parameters, list) or not all(str(name).endswith(".weight") for name in parameters):
            raise ModelError(f"{path} asks for target_parameters, which lmstate does not run")  # all experts at once
        # These take their own beginning off the base matrix: the file holds what is beside another base than the
        # model's.
        if (made := str(fields.get("init_lora_weights")).lower()).startswith(MOVED):
            raise ModelError(
                f"{path} was begun with init_lora_weights={made[:40]!r}, which changes the base weights, too; save it "
                "with PEFT's save_pretrained(path_initial_model_for_weight_conversion=...), which makes a plain LoRA "
                "of it"
            )
        flags = {name: fields.bool(f"use_{name}", default=False) for name in ("rslora", "dora")}
        return replace(super().read(path, fields), **flags)  # type: ignore[arg-type]

    def to_json(self, targets: list[str], modules: Mapping[str, Mapping[str, AdapterTensor]]) -> dict[str, Any]:
        # A module named as those of the experts: PEFT would take its name for theirs, but not that of its parameter.
        return {
            **super().to_json(targets, modules), "lora_dropout": 0.0, "bias": "none", "use_rslora": self.rslora,
            "fan_in_fan_out": False, "use_dora": self.dora, "modules_to_save": None, "init_lora_weights": True,
        }  # fmt: skip
