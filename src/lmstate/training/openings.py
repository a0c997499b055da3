"""Prompt tuning (2104.08691), P-tuning (2103.10385) and prefix tuning (2101.00190), in PEFT's files.

Vectors in place of embeddings, or keys and values of every layer, are learned in front of every text.
"""

from __future__ import annotations

import itertools
import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.hub import weights_of
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.files.safetensors import TensorFile
from lmstate.files.writing import save_tensors, write_json
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.embedding import LearnedPositions
from lmstate.models.layers.opening import LearnedOpening
from lmstate.models.model import Model
from lmstate.models.network import Network
from lmstate.ops.weights.lora import AdapterTensor
from lmstate.training.model import TrainedAdapter

MOST_POSITIONS = 2**16
TENSOR = "prompt_embeddings"
# Families whose embedding is scaled as it is looked up: what is learned comes behind that, elsewhere in front of it.
SCALED_WORDS = ("gemma", "gemma2", "gemma3_text", "vaultgemma", "minicpm3", "biogpt", "xglm")


@dataclass(frozen=True)
class OpeningConfig(ABC):
    """Settings of an adapter that stands in front of every text: its number of positions."""

    peft_type: ClassVar[str]
    positions: int = 20

    def __post_init__(self) -> None:
        if not isinstance(self.positions, int) or not 1 <= self.positions <= MOST_POSITIONS:
            raise ModelError(f"{self.positions!r:.40} learned positions were asked for; give 1 to {MOST_POSITIONS}")

    @abstractmethod
    def width(self, network: Network) -> int:
        """Numbers of a position. Raises `ModelError` for a model that has no such positions."""

    @abstractmethod
    def fresh(self, network: Network) -> Tensor:
        """The numbers that training begins with, float32 `[P, width]`."""

    @abstractmethod
    def opening(self, learned: Tensor, network: Network) -> LearnedOpening:
        """The opening of a model that is made of `learned` `[P, width]`."""

    @abstractmethod
    def to_json(self, network: Network) -> dict[str, Any]:
        """The part of PEFT's config that is of its kind."""


@dataclass(frozen=True)
class PromptTuningConfig(OpeningConfig):
    """Prompt tuning: vectors in place of the embeddings of tokens. They begin as those of `tokens`, again and again, or
    of tokens drawn from the vocabulary."""

    peft_type = "PROMPT_TUNING"

    tokens: Sequence[int] = ()

    def width(self, network: Network) -> int:
        _refuse(network)
        return network.config.hidden_size

    def fresh(self, network: Network) -> Tensor:
        vocab = network.config.vocab_size
        if any(not isinstance(token, int) or not 0 <= token < vocab for token in self.tokens):
            raise ModelError(f"tokens to begin with are {self.tokens!r:.80}; this model's ids are 0 to {vocab - 1}")
        drawn = torch.randint(vocab, (self.positions,)).tolist()
        ids = list(itertools.islice(itertools.cycle(self.tokens or drawn), self.positions))
        words = network.embed.rows(torch.tensor(ids, device=network.device)).float()
        return words * network.config.embed_scale / _scale(network)

    def opening(self, learned: Tensor, network: Network) -> LearnedOpening:
        scale = _scale(network)
        return LearnedOpening(learned if scale == 1.0 else learned * scale)

    def to_json(self, network: Network) -> dict[str, Any]:
        return {"token_dim": network.config.hidden_size, "prompt_tuning_init": "RANDOM"}


@dataclass(frozen=True)
class PrefixTuningConfig(OpeningConfig):
    """Prefix tuning: keys and values of every layer, as attention reads them."""

    peft_type = "PREFIX_TUNING"

    def width(self, network: Network) -> int:
        _refuse(network)
        heads, dim = _shape(network)
        return 2 * len(network.blocks) * heads * dim

    def fresh(self, network: Network) -> Tensor:
        return torch.randn(self.positions, self.width(network))

    def opening(self, learned: Tensor, network: Network) -> LearnedOpening:
        layers = learned.unflatten(1, (len(network.blocks), 2, *_shape(network))).movedim(0, 2)  # [L, 2, P, K, D]
        return LearnedOpening.of_keys_values(layers, network.config.hidden_size)

    def to_json(self, network: Network) -> dict[str, Any]:
        heads, dim = _shape(network)
        return {
            "token_dim": heads * dim, "num_attention_heads": heads, "prefix_projection": False,
            "encoder_hidden_size": network.config.hidden_size,
        }  # fmt: skip


OPENINGS: dict[str, type[OpeningConfig]] = {
    "PROMPT_TUNING": PromptTuningConfig, "P_TUNING": PromptTuningConfig, "PREFIX_TUNING": PrefixTuningConfig,
}  # fmt: skip


class OpeningAdapter:
    """An adapter that stands in front of every text: `learned` `[P, numbers of a position]`."""

    def __init__(self, config: OpeningConfig, learned: Tensor) -> None:
        self.config, self.learned = config, AdapterTensor(learned)

    @staticmethod
    def load(folder: Path, fields: Config) -> OpeningAdapter:
        """Read what PEFT's (or this) `save_pretrained` wrote.

        Raises `ModelError` for a damaged one and for what lmstate does not run, `OSError` for missing files.
        """
        kind = OPENINGS[fields.str("peft_type")]
        if fields.int("num_transformer_submodules", low=1, high=2, default=1) != 1:
            raise ModelError(f"{folder} is for a model with an encoder; lmstate learns nothing in front of its sources")
        config = kind(fields.int("num_virtual_tokens", low=1, high=MOST_POSITIONS))
        file = TensorFile(folder / "adapter_model.safetensors")
        shapes = {name: own.shape for name, own in file.entries.items()}
        if set(shapes) != {TENSOR} or len(shapes[TENSOR]) != 2 or shapes[TENSOR][0] != config.positions:
            told = ", ".join(f"{name[:40]} {list(shape)}" for name, shape in shapes.items())
            raise ModelError(f"{folder} holds {told:.200}; expected {TENSOR} [{config.positions}, numbers of each]")
        learned = file.tensor(TENSOR)
        if not learned.is_floating_point():
            raise ModelError(f"{folder} holds {TENSOR} as {learned.dtype}; expected floats")
        return OpeningAdapter(config, learned.float().contiguous().clone())

    def save(self, folder: str | os.PathLike[str], base: tuple[str, str | None], network: Network) -> None:
        """Write it for PEFT. `base`: the repository or the path of the model, and its revision."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_tensors(path / "adapter_model.safetensors", {TENSOR: self.learned.storage.detach()})
        config: dict[str, Any] = {
            "peft_type": self.config.peft_type, "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base[0], "revision": base[1], "inference_mode": True,
            "num_virtual_tokens": self.config.positions, "num_transformer_submodules": 1,
            "num_layers": len(network.blocks),
        }  # fmt: skip
        write_json(path / "adapter_config.json", config | self.config.to_json(network))

    def applied(self, network: Network) -> Network:
        """The network with it. Raises `ModelError` where it does not fit."""
        if (width := self.config.width(network)) != self.learned.storage.shape[1]:
            raise ModelError(
                f"the adapter is of another model: it has {self.learned.storage.shape[1]} numbers for each position, "
                f"and this model {width}"
            )
        return replace(network, opening=self.config.opening(self.learned.storage, network))

    def to(self, device: torch.device) -> None:
        """Move it to where the model is."""
        self.learned.storage = self.learned.storage.to(device)


class OpeningModel(TrainedAdapter):
    """A model of which learned positions in front of every text are trained, over weights of any storage.

    Made by `lmstate.load(..., trainable=PromptTuningConfig())`, or `PrefixTuningConfig`.
    """

    def __init__(self, weights: WeightLoader, config: OpeningConfig, adapter: OpeningAdapter | None = None) -> None:
        from lmstate.models.families import build

        built = build(weights)
        self._plain = built.network
        config.width(self._plain)
        self.adapter = OpeningAdapter(config, config.fresh(self._plain)) if adapter is None else adapter
        self.adapter.to(weights.device)
        self.adapter.learned.storage.requires_grad_()
        super().__init__(self.adapter.applied(self._plain), built.dtype, built.context_size)
        self._version = self.version

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield TENSOR, self.adapter.learned.storage

    @contextmanager
    def apart(self) -> Iterator[tuple[list[Tensor], Iterator[Model]]]:
        held = self.adapter.learned.storage
        self.adapter.learned.storage = leaf = held.detach().requires_grad_()
        try:
            yield [leaf], iter(self._again, None)
        finally:
            self.adapter.learned.storage = held
            self._again()

    def _again(self) -> Model:
        """Itself, made again of what is learned: a graph of it serves one backward."""
        self.network = self.adapter.applied(self._plain)
        return self

    def refresh(self) -> None:
        if self._version != self.version or torch.is_grad_enabled():
            self._version, self._fingerprint = self.version, None
            self._again()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapter for PEFT, `lmstate.load(..., adapter=folder)` and `lmstate generate --adapter`."""
        self.adapter.save(folder, weights_of(self.name), self._plain)


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
    elif network.entry is not None and not isinstance(network.entry, LearnedPositions):
        why = "its layers also read the embeddings of tokens apart from the stream"
    elif network.whole_pictures:
        why = "its positions that have vectors of their own see each other, as those of pictures do"
    if why is not None:
        raise ModelError(f"nothing can be learned in front of the texts of a {network.config.family} model: {why}")
