"""Adapters that make another network of a model's: learned positions in front of every text, and adaption prompts."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
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
from lmstate.models.model import Model
from lmstate.models.network import Network
from lmstate.ops.weights.lora import AdapterTensor
from lmstate.state.inference_mode import ordinary_tensors
from lmstate.training.adapter import CONFIG, TENSORS
from lmstate.training.model import TrainedAdapter


class NetworkConfig(ABC):
    """Settings of an adapter of one kind. `peft_type` names the kind in files."""

    peft_type: ClassVar[str]

    @abstractmethod
    def shapes(self, network: Network) -> dict[str, tuple[int, ...]]:
        """Shapes of the tensors of an adapter for a network, by their names in a file.

        Raises `ModelError` for a network that can have none.
        """

    @abstractmethod
    def fresh(self, network: Network) -> dict[str, Tensor]:
        """The tensors that training begins with, float32."""

    @abstractmethod
    def applied(self, tensors: Mapping[str, Tensor], network: Network) -> Network:
        """The network with an adapter of these tensors."""

    @abstractmethod
    def to_json(self, network: Network) -> dict[str, Any]:
        """The part of PEFT's config that is of its kind."""

    @classmethod
    @abstractmethod
    def read(cls, folder: Path, fields: Config) -> NetworkConfig:
        """From PEFT's config. Raises `ModelError` for what lmstate does not run."""


class NetworkAdapter:
    """An adapter, of tensors by their names in a file."""

    def __init__(self, config: NetworkConfig, tensors: Mapping[str, Tensor]) -> None:
        self.config = config
        self._parts = {name: AdapterTensor(tensor) for name, tensor in tensors.items()}

    def parts(self) -> Iterator[tuple[str, AdapterTensor]]:
        """Its tensors under their names."""
        yield from self._parts.items()

    @staticmethod
    def load(folder: Path, config: NetworkConfig) -> NetworkAdapter:
        """Read what PEFT's (or this) `save_pretrained` wrote; `applied` tells whether it fits a model.

        Raises `ModelError` for a damaged one, `OSError` for missing files.
        """
        file, tensors = TensorFile(folder / TENSORS), {}
        for name in file.entries:
            tensor = file.tensor(name)
            if not tensor.is_floating_point():
                raise ModelError(f"{folder} holds {name[:80]} as {tensor.dtype}; expected floats")
            tensors[name] = tensor.float().contiguous().clone()
        return NetworkAdapter(config, tensors)

    def save(self, folder: str | os.PathLike[str], base: tuple[str, str | None], network: Network) -> None:
        """Write it for PEFT. `base`: the repository or the path of the model, and its revision."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_tensors(path / TENSORS, {name: part.storage.detach() for name, part in self.parts()})
        config = {
            "peft_type": self.config.peft_type, "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base[0], "revision": base[1], "inference_mode": True,
        }  # fmt: skip
        write_json(path / CONFIG, config | self.config.to_json(network))

    def applied(self, network: Network) -> Network:
        """The network with it. Raises `ModelError` where it does not fit."""
        expected = self.config.shapes(network)
        held = {name: tuple(part.storage.shape) for name, part in self.parts()}
        if held != expected:
            name = next(name for name in (*expected, *held) if expected.get(name) != held.get(name))
            raise ModelError(
                f"the {self.config.peft_type} adapter is damaged, or of another model: it has {name[:80]!r} "
                f"{list(held.get(name, ()))}, and {list(expected.get(name, ()))} is expected"
            )
        return self.config.applied({name: part.storage for name, part in self.parts()}, network)

    def to(self, device: torch.device) -> None:
        """Move it to where the model is."""
        for _, part in self.parts():
            part.storage = part.storage.to(device)


class NetworkAdapterModel(TrainedAdapter):
    """A model of which an adapter is trained that makes another network of it, over weights of any storage.

    Made by `lmstate.load(..., trainable=PromptTuningConfig())`, say. Parameters have the names that they have in an
    adapter's file.
    """

    def __init__(self, weights: WeightLoader, config: NetworkConfig, adapter: NetworkAdapter | None = None) -> None:
        from lmstate.models.families import build

        built = build(weights)
        self._plain = built.network
        self.adapter = NetworkAdapter(config, config.fresh(self._plain)) if adapter is None else adapter
        self.adapter.to(weights.device)
        for tensor in self.parameters():
            tensor.requires_grad_()
        super().__init__(self.adapter.applied(self._plain), built.dtype, built.context_size)
        self._version = self.version

    def rebuilt(self) -> Model:
        self.network = self.adapter.applied(self._plain)
        return self

    @ordinary_tensors
    def refresh(self) -> None:
        if self._version != self.version or torch.is_grad_enabled():
            self._version, self._fingerprint = self.version, None
            self.rebuilt()

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapter for PEFT, `lmstate.load(..., adapter=folder)` and `lmstate generate --adapter`."""
        self.adapter.save(folder, weights_of(self.name), self._plain)
