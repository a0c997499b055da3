"""Adaption prompts (LLaMA-Adapter, Zhang et al. 2023, 2303.16199), in PEFT's files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.layers.adaption import AdaptionPrompt
from lmstate.models.layers.attention import Attention
from lmstate.models.network import Network
from lmstate.training.adapter import PREFIX
from lmstate.training.network_adapter import NetworkConfig

MOST_TOKENS = 2**16
# The attention of a family in transformers; whether PEFT adds a prompt's output after the output projection.
MODULES = {
    "llama": ("model.layers.{}.self_attn", False), "mistral": ("model.layers.{}.self_attn", False),
    "gpt2": ("transformer.h.{}.attn", True),
}  # fmt: skip


@dataclass(frozen=True)
class AdaptionPromptConfig(NetworkConfig):
    """Adaption prompts: `tokens` learned tokens for each of the last `layers` layers (None: for all), of the families
    that PEFT knows them for: llama, mistral, gpt2."""

    peft_type = "ADAPTION_PROMPT"

    tokens: int = 10
    layers: int | None = None

    def __post_init__(self) -> None:
        for name, value in (("tokens", self.tokens), ("layers", 1 if self.layers is None else self.layers)):
            if not isinstance(value, int) or not 1 <= value <= MOST_TOKENS:
                raise ModelError(f"AdaptionPromptConfig({name}={value!r:.40}) was asked for; give 1 to {MOST_TOKENS}")

    def shapes(self, network: Network) -> dict[str, tuple[int, ...]]:
        width = network.config.hidden_size
        return {
            f"{PREFIX}{name}.{part}": shape
            for name in self._modules(network).values()
            for part, shape in (("adaption_prompt", (1, self.tokens, width)), ("adaption_gate", (1,)))
        }

    def fresh(self, network: Network) -> dict[str, Tensor]:
        """Tokens are random as in PEFT; their gates are 0, so that they change nothing."""
        shapes = self.shapes(network)
        return {name: torch.zeros(1) if len(shape) == 1 else torch.randn(shape) for name, shape in shapes.items()}

    def applied(self, tensors: Mapping[str, Tensor], network: Network) -> Network:
        blocks, behind = list(network.blocks), MODULES[network.config.family][1]
        for index, name in self._modules(network).items():
            prompt, gate = (tensors[f"{PREFIX}{name}.{part}"] for part in ("adaption_prompt", "adaption_gate"))
            blocks[index] = _prompted(blocks[index], prompt, gate, behind)
        return replace(network, blocks=tuple(blocks))

    def _modules(self, network: Network) -> dict[int, str]:
        """The names of the attention modules of the layers that have prompts, by their numbers."""
        family, count = network.config.family, len(network.blocks)
        if family not in MODULES:
            raise ModelError(
                f"adaption prompts are for {', '.join(MODULES)} models, as in PEFT; this is a {family} model"
            )
        for block in network.blocks:
            mixer = block.mixer
            if not isinstance(mixer, Attention) or (mixer.out_bias is not None and not MODULES[family][1]):
                raise ModelError("adaption prompts were asked for of a model whose output projections have biases")
        layers = count if self.layers is None else self.layers
        if layers > count:
            raise ModelError(f"adaption prompts for {layers} layers were asked for; this model has {count}")
        return {index: MODULES[family][0].format(index) for index in range(count - layers, count)}

    def to_json(self, network: Network) -> dict[str, Any]:
        names = self._modules(network)
        target = MODULES[network.config.family][0].rpartition(".")[2]
        return {"adapter_len": self.tokens, "adapter_layers": len(names), "target_modules": target}

    @classmethod
    def read(cls, folder: Path, fields: Config) -> AdaptionPromptConfig:
        layers = fields.int("adapter_layers", low=1, high=MOST_TOKENS)
        return cls(fields.int("adapter_len", low=1, high=MOST_TOKENS), layers)


def _prompted(block: Block, prompt: Tensor, gate: Tensor, behind: bool) -> Block:
    """A block whose attention has a prompt `[1, S, E]`."""
    mixer = block.mixer
    assert isinstance(mixer, Attention)
    made = ops.linear(prompt, mixer.qkv, mixer.qkv_bias)[0].unflatten(-1, (-1, mixer.head_dim)).transpose(0, 1)
    keys, values = made[mixer.heads :].split(mixer.kv_heads)
    prompted = AdaptionPrompt(keys.contiguous(), values.contiguous(), gate, behind)
    return replace(block, mixer=replace(mixer, prompt=prompted))
