"""Prompt tuning (2104.08691), P-tuning (2103.10385) and prefix tuning (2101.00190), in PEFT's files.

Vectors in place of embeddings, or keys and values of every layer, are learned in front of every text.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.opening import LearnedOpening
from lmstate.models.network import Network
from lmstate.training.network_adapter import NetworkConfig

MOST_POSITIONS = 2**16
TENSOR = "prompt_embeddings"
# Families whose embedding is scaled as it is looked up: what is learned comes after that, elsewhere in front of it.
SCALED_WORDS = ("gemma", "gemma2", "gemma3_text", "vaultgemma", "minicpm3", "biogpt", "xglm")


@dataclass(frozen=True)
class OpeningConfig(NetworkConfig):
    """Settings of an adapter that is in front of every text: its number of positions."""

    positions: int = 20

    def __post_init__(self) -> None:
        if not isinstance(self.positions, int) or not 1 <= self.positions <= MOST_POSITIONS:
            raise ModelError(f"{self.positions!r:.40} learned positions were asked for; give 1 to {MOST_POSITIONS}")

    def shapes(self, network: Network) -> dict[str, tuple[int, ...]]:
        _refuse(network)
        return {TENSOR: (self.positions, self.width(network))}

    @abstractmethod
    def width(self, network: Network) -> int:
        """Numbers of a position. Raises `ModelError` for a model that has no such positions."""

    @classmethod
    def read(cls, folder: Path, fields: Config) -> Self:
        if fields.int("num_transformer_submodules", low=1, high=2, default=1) != 1:
            raise ModelError(f"{folder} is for a model with an encoder; lmstate learns nothing in front of its sources")
        return cls(fields.int("num_virtual_tokens", low=1, high=MOST_POSITIONS))

    def to_json(self, network: Network) -> dict[str, Any]:
        return {
            "num_virtual_tokens": self.positions, "num_transformer_submodules": 1, "num_layers": len(network.blocks)
        }  # fmt: skip


@dataclass(frozen=True)
class PromptTuningConfig(OpeningConfig):
    """Prompt tuning: vectors in place of the embeddings of tokens. They begin as those of `tokens`, again and again, or
    of tokens drawn from the vocabulary."""

    peft_type = "PROMPT_TUNING"

    tokens: Sequence[int] = ()

    def width(self, network: Network) -> int:
        return network.config.hidden_size

    def fresh(self, network: Network) -> dict[str, Tensor]:
        self.shapes(network)
        vocab = network.config.vocab_size
        if any(not isinstance(token, int) or not 0 <= token < vocab for token in self.tokens):
            raise ModelError(f"tokens to begin with are {self.tokens!r:.80}; this model's ids are 0 to {vocab - 1}")
        drawn = torch.randint(vocab, (self.positions,)).tolist()
        ids = list(itertools.islice(itertools.cycle(self.tokens or drawn), self.positions))
        words = network.embed.rows(torch.tensor(ids, device=network.device)).float()
        return {TENSOR: words * network.config.embed_scale / _scale(network)}

    def applied(self, tensors: Mapping[str, Tensor], network: Network) -> Network:
        learned, scale = tensors[TENSOR], _scale(network)
        return replace(network, opening=LearnedOpening(learned if scale == 1.0 else learned * scale))

    def to_json(self, network: Network) -> dict[str, Any]:
        return {**super().to_json(network), "token_dim": self.width(network), "prompt_tuning_init": "RANDOM"}


@dataclass(frozen=True)
class PrefixTuningConfig(OpeningConfig):
    """Prefix tuning: keys and values of every layer, as attention reads them."""

    peft_type = "PREFIX_TUNING"

    def width(self, network: Network) -> int:
        heads, dim = _shape(network)
        return 2 * len(network.blocks) * heads * dim

    def fresh(self, network: Network) -> dict[str, Tensor]:
        return {name: torch.randn(shape) for name, shape in self.shapes(network).items()}

    def applied(self, tensors: Mapping[str, Tensor], network: Network) -> Network:
        parts = len(network.blocks), 2, *_shape(network)
        layers = tensors[TENSOR].unflatten(1, parts).movedim(0, 2)  # [L, 2, P, K, D]
        return replace(network, opening=LearnedOpening.of_keys_values(layers, network.config.hidden_size))

    def to_json(self, network: Network) -> dict[str, Any]:
        heads, dim = _shape(network)
        return {
            **super().to_json(network), "token_dim": heads * dim, "num_attention_heads": heads,
            "prefix_projection": False, "encoder_hidden_size": network.config.hidden_size,
        }  # fmt: skip


def _scale(network: Network) -> float:
    """Factor of what is learned in the stream."""
    return 1.0 if network.config.family in SCALED_WORDS else network.config.embed_scale


def _shape(network: Network) -> tuple[int, int]:
    """Key heads and their width, the same in all layers. Raises `ModelError` where a layer has none of its own."""
    found = set()
    for block in network.blocks:
        mixer = block.mixer
        if not isinstance(mixer, Attention) or mixer.reads is not None:
            raise ModelError(
                f"prefix tuning was asked for of a {network.config.family} model, which has layers without keys and "
                "values of their own: use prompt tuning"
            )
        if type(mixer).mix is not Attention.mix:
            raise ModelError(
                f"prefix tuning was asked for of a {network.config.family} model, whose attention stores its keys and "
                "values in a way of its own: use prompt tuning"
            )
        found.add((mixer.kv_heads, mixer.head_dim))
    if len(found) != 1:
        raise ModelError(
            f"prefix tuning was asked for of a {network.config.family} model, whose layers have keys of different "
            "shapes: use prompt tuning"
        )
    return found.pop()


def _refuse(network: Network) -> None:
    """Raise `ModelError` for a model whose texts nothing can be learned in front of."""
    why = None
    if network.encoder is not None:
        why = "its tokens read a source"
    elif network.entry is not None and network.entry.reads_tokens:
        why = "its layers also read the tokens themselves, apart from the stream"
    elif network.whole_pictures:
        why = "its positions that have vectors of their own see each other, as those of pictures do"
    if why is not None:
        raise ModelError(f"nothing can be learned in front of the texts of a {network.config.family} model: {why}")
