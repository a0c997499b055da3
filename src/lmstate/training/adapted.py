"""Models with adapters beside their weights: one for all rows of a batch, one for each, or one that is trained."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.hub import weights_of
from lmstate.checkpoints.loader import Make, Numbers, StackedMatrix, WeightLoader, transpose
from lmstate.checkpoints.source import Source, floats
from lmstate.errors import ModelError, StateError
from lmstate.files.json_object import read_object
from lmstate.models.fingerprint import weights_in
from lmstate.models.model import Model
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.bfloat12 import Bfloat12Weight
from lmstate.ops.weights.grouped import FloatWeight, quantize
from lmstate.ops.weights.lora import LoraWeight, Rescaling, Update
from lmstate.training.adapter import CONFIG, Adapter
from lmstate.training.adapter_config import ALL, AdapterConfig, module_key
from lmstate.training.adaption import AdaptionPromptConfig
from lmstate.training.lora import PEFT_REFUSES
from lmstate.training.model import TrainedAdapter
from lmstate.training.module_names import modules_of
from lmstate.training.network_adapter import NetworkAdapter, NetworkConfig
from lmstate.training.openings import PrefixTuningConfig, PromptTuningConfig

EXPERT = re.compile(r"\.experts\.\d+\.")
NETWORK_KINDS: dict[str, type[NetworkConfig]] = {
    "PROMPT_TUNING": PromptTuningConfig, "P_TUNING": PromptTuningConfig, "PREFIX_TUNING": PrefixTuningConfig,
    "ADAPTION_PROMPT": AdaptionPromptConfig,
}  # fmt: skip
Selection = Sequence[Adapter | None]
"""The adapter of each row; of all rows, if there is one."""


def _matrix_of(source: Source, bias: str) -> str | None:
    """The matrix that a tensor is the bias of; None for any other tensor."""
    name = bias.removesuffix(".bias") + ".weight"
    return name if bias.endswith(".bias") and name in source.names() and len(source.shape(name)) == 2 else None


class AdaptedWeights(WeightLoader):
    """Hands out weights with the updates of adapters beside them, over those of an earlier build, if any."""

    def __init__(self, plain: WeightLoader, selection: Selection, merge: bool = False) -> None:
        self.__dict__.update(vars(plain))
        self._made = {}
        self._selection, self._merge = selection, merge
        if not isinstance(plain, AdaptedWeights):
            self._bases: dict[str, Weight] = {}
        self.ignored: list[str] = []
        self.modules: dict[str, tuple[int, int]] = {}
        self.small: set[str] = set()
        """Modules that no product of its own belongs to: updates are added to their matrices when they are loaded."""
        self.experts: set[str] = set()
        self.places: dict[str, tuple[str, int, Tensor | None]] = {}
        """The shape of each module that an adapter can update; the matrix that it is a part of, its first output
        there, and the order that the outputs of all parts were brought into."""

    def base(self, module: str) -> Weight:
        """The matrix that a module is a part of."""
        return self._bases[self.places[module][0]]

    def norms(self, module: str) -> Tensor:
        """Norm of each row of a module's matrix, float32 `[N]`."""
        _, first, order = self.places[module]
        norms = torch.linalg.vector_norm(self.base(module).dequantize(), dim=1)
        if order is not None:
            norms = norms[order.argsort()]
        return norms[first : first + self.modules[module][0]].clone()

    def tensor(self, name: str, shape: tuple[int, ...] | None = None, optional: bool = False) -> Tensor | None:  # type: ignore[override]
        whole = super().tensor(name, shape, optional)  # type: ignore[call-overload]
        if whole is not None and whole.ndim == 2:
            return self._updated(name, whole)
        if whole is not None and self._merge and (matrix := _matrix_of(self.source, name)) is not None:
            return self._rescaled(matrix, whole)
        return whole

    def _rescaled(self, name: str, bias: Tensor) -> Tensor:
        """The bias `[N]` of a matrix, multiplied where an update multiplies outputs."""
        first, shape, whole = 0, self.shape(name), bias.clone()
        width = shape[1] if shape[0] == len(bias) else shape[0]
        for module, outputs in modules_of(self.source, name, len(bias)):
            update = self._selection[0].update(module, first, (outputs, width)) if self._selection[0] else None
            if isinstance(update, Rescaling) and not update.of_inputs:
                whole[first : first + outputs] *= update.factors
            first += outputs
        return whole

    def derived(
        self,
        label: str,
        *names: str,
        make: Make,
        shape: tuple[int, int],
        stored: str | None = None,
        of: int | None = None,
    ) -> Weight:
        if label in self._made or not any(self._updates(name) for name in names if len(self.shape(name)) == 2):
            return super().derived(label, *names, make=make, shape=shape, stored=stored, of=of)

        def updated(*tensors: Numbers) -> Numbers:
            return make(*map(self._updated, names, map(floats, tensors)))

        self._asked.update(names)
        part = StackedMatrix(names, stored or self.source.stored(names[0]), updated)
        weight, _ = self._convert([part], self._storage([part]), None)
        self._expect(label, weight.shape, shape)
        self._made[label] = self._for_decoding(weight)
        return self._made[label]

    def _updates(self, name: str) -> list[Update]:
        """The updates of a matrix that is loaded whole: one of each of its modules that has one."""
        (height, width), first, updates = self.shape(name), 0, []
        for module, outputs in modules_of(self.source, name, height):
            self.small.add(module)
            rows = [None if each is None else each.update(module, first, (outputs, width)) for each in self._selection]
            if any(rows) and len({id(each) for each in self._selection}) > 1:
                raise ModelError(f"{module} has an update by one adapter of several: choose one adapter for all rows")
            updates += [each for each in rows[:1] if each is not None]
            first += outputs
        outer = any(isinstance(each, Rescaling) and not each.of_inputs for each in updates)
        if outer and not self._merge and name.removesuffix(".weight") + ".bias" in self.source.names():
            raise ModelError(f"the adapter multiplies the outputs of {module}, bias and all: load it with merge=True")
        return updates

    def _updated(self, name: str, matrix: Tensor) -> Tensor:
        updates = self._updates(name) if matrix.ndim == 2 else []
        return LoraWeight(FloatWeight(matrix.float()), [tuple(updates)]).merged() if updates else matrix

    def _matrix(self, label: str, parts: list[Any], order: Tensor | None = None) -> Weight:
        if label not in self._bases:
            self._bases[label] = super()._matrix(label, parts, order)
        self._asked.update(name for part in parts for name in part.names)
        return self._bases[label]

    def linear(
        self,
        *names: str,
        shape: tuple[int | Sequence[int], int] | None = None,
        order: Callable[[], Tensor] | None = None,
        used_as: Sequence[str] = (),
    ) -> Weight:
        shared, label = super().linear(*names, shape=shape, order=order), "+".join(used_as)
        if not used_as or tuple(used_as) == names:
            return shared
        if label not in self._made:
            stack = [(used, *self.shape(name)) for used, name in zip(used_as, names)]
            whole = "+".join(names)
            self._made[label] = self._beside(self._bases[whole], whole, stack)
        return self._made[label]

    def transposed(self, name: str, shape: tuple[int, int]) -> Weight:
        label = f"{name}, transposed"
        base = super().derived(label, name, make=transpose, shape=shape)
        return self._beside(base, label, [(name, *shape)])

    def check_all_used(self, ignore: Iterable[str] = ()) -> None:
        self.ignored = list(ignore)
        super().check_all_used(self.ignored)

    def ignores(self, name: str) -> bool:
        """Whether the model does not read a tensor of this name, also where a checkpoint holds it."""
        return any(fnmatchcase(name, pattern) for pattern in self.ignored)

    def _stack(self, label: str, names: Sequence[str], order: Callable[[], Tensor] | None) -> Weight:
        base = super()._stack(label, names, order)
        return self._beside(base, label, [(name, *self.shape(name)) for name in names], order)

    def _beside(
        self,
        base: Weight,
        label: str,
        stack: Sequence[tuple[Any, ...]],
        order: Callable[[], Tensor] | None = None,
    ) -> Weight:
        """The matrix with the updates of its modules; `stack`: (name, N, K) of each tensor that it is made of."""
        width = stack[0][2]
        heights = [part for name, height, _ in stack for part in modules_of(self.source, name, height)]
        modules, shapes = [module for module, _ in heights], [(height, width) for _, height in heights]
        firsts = [0, *itertools.accumulate(height for height, _ in shapes)]
        places = None if order is None else order().to(self.device)
        # Routed experts are not separate modules in transformers: PEFT has no updates of them either.
        if any(EXPERT.search(module) for module in modules):
            self.experts.update(modules)
        else:
            self.modules.update(zip(modules, shapes))
            self.places.update((module, (label, first, places)) for module, first in zip(modules, firsts))
        known: dict[int, tuple[Update, ...]] = {}
        for adapter in self._selection:
            if adapter is None:
                continue
            updates = (adapter.update(*each) for each in zip(modules, firsts, shapes))
            known[id(adapter)] = tuple(update for update in updates if update is not None)
        rows = [known.get(id(adapter), ()) for adapter in self._selection]
        if not any(rows):
            return base
        weight = LoraWeight(base, rows, places)
        if not self._merge:
            return weight
        kind = "bfloat16" if isinstance(base, Bfloat12Weight) else base.kind
        return self._for_decoding(quantize(weight.merged(), kind).with_activations(base.activations or 16))


def build_adapted(weights: AdaptedWeights, selection: Selection) -> Model:
    """The model with adapters. Raises `ModelError` if one of them does not fit."""
    from lmstate.models.families import build

    model = build(weights)
    if any(isinstance(weight, LoraWeight) for weight in (model.embed, model.head)):
        raise ModelError("the adapter updates the embedding or the head, which lmstate does not run")
    for adapter in selection:
        if adapter is None:
            continue
        known = {module_key(module) for module in (*weights.modules, *weights.small)}
        unknown = {key: name for key, name in adapter.names.items() if key not in known}
        if missing := sorted(name for key, name in unknown.items() if not weights.ignores(f"model.{key}.weight")):
            raise ModelError(
                f"the adapter updates {missing[0][:80]!r}"
                + (f" and {len(missing) - 1} more" if len(missing) > 1 else "")
                + f", which a {model.config.family} model has not, or lmstate does not run with an adapter"
            )
    return model


class AdaptedModel(Model):
    """A model with adapters by name, each apart from the weights. Made by `lmstate.load(..., adapter=...)`.

    It runs with the adapter that was chosen; `adapted` gives the same weights with another choice. A state or a
    snapshot of one choice is refused by another.
    """

    def __init__(
        self, weights: WeightLoader, adapters: Mapping[str, Adapter | NetworkAdapter], chosen: str | None
    ) -> None:
        for adapter in adapters.values():
            adapter.to(weights.device)
        self.adapters = dict(adapters)
        self._weights = weights
        built = self._choose([chosen])
        super().__init__(built.network, built.dtype, built.context_size)

    def _choose(self, names: Sequence[str | None]) -> Model:
        """Choose the adapters -> the model that is built of them."""
        for name in names:
            if name is not None and name not in self.adapters:
                raise ModelError(f"there is no adapter {name!r:.80}; this model has {', '.join(self.adapters)}")
        self.chosen = tuple(names)
        chosen = [None if name is None else self.adapters[name] for name in names]
        others = [adapter for adapter in chosen if isinstance(adapter, NetworkAdapter)]
        if others and len(chosen) > 1:
            raise ModelError(
                f"a {others[0].config.peft_type} adapter was chosen for some rows of a batch, and is one for all rows: "
                "choose it alone"
            )
        selection = [adapter if isinstance(adapter, Adapter) else None for adapter in chosen]
        self._weights = AdaptedWeights(self._weights, selection)
        built = build_adapted(self._weights, selection)
        for other in others:
            built.network = other.applied(built.network)
        return built

    def adapted(self, adapter: str | Sequence[str | None] | None) -> AdaptedModel:
        """Copy of this model with another adapter (None: with none), or with one for each row of a batch.

        Weights are shared. With one for each row, states have as many rows. Raises `ModelError` for an unknown name.
        """
        twin = object.__new__(type(self))
        twin.__dict__.update(vars(self))
        names = [adapter] if adapter is None or isinstance(adapter, str) else list(adapter)
        if not names:
            raise ModelError("adapters for no rows were asked for; name one for each row, None for none")
        twin.network, twin._fingerprint = twin._choose(names).network, None
        return twin


class LoraModel(TrainedAdapter):
    """A model of which one adapter is trained, over weights of any storage that stay as they are.

    Made by `lmstate.load(..., trainable="lora")`, or with a config. Parameters have the names that they have in an
    adapter's file.
    """

    def __init__(self, weights: WeightLoader, config: AdapterConfig, adapter: Adapter | None = None) -> None:
        plain = AdaptedWeights(weights, [None])
        model = build_adapted(plain, [None])
        outside = {
            id(weight) for _, weight in weights_in((model.embed, model.head, model.network.entry, model.network.exit))
        }
        refused = PEFT_REFUSES.get(model.config.family, ()) if config.targets == ALL else ()
        self.modules = {
            module: shape
            for module, shape in plain.modules.items()
            if id(plain.base(module)) not in outside and module.rpartition(".")[2] not in refused
        }
        small = {module_key(module) for module in plain.small}
        if adapter is not None and (fixed := [name for key, name in adapter.names.items() if key in small]):
            raise ModelError(
                f"the adapter updates {fixed[0][:80]!r}, which lmstate runs with an adapter but does not train"
            )
        self._experts = plain.experts
        self.adapter = Adapter.fresh(config, self.modules, plain.norms) if adapter is None else adapter
        self.adapter.to(weights.device)
        for tensor in self.parameters():
            tensor.requires_grad_()
        built = build_adapted(AdaptedWeights(plain, [self.adapter]), [self.adapter])
        super().__init__(built.network, built.dtype, built.context_size)
        self._version = self.version

    def refresh(self) -> None:
        if self._version != self.version:
            self._version = self.version
            self._fingerprint = None

    def save_pretrained(self, folder: str | os.PathLike[str]) -> None:
        """Write the adapter for PEFT, `lmstate.load(..., adapter=folder)` and `lmstate generate --adapter`."""
        self.adapter.save(folder, weights_of(self.name), {*self.modules, *self._experts})


def load_adapter(folder: str | os.PathLike[str], model_type: object) -> Adapter | NetworkAdapter:
    """Read an adapter of any kind. Raises as `Adapter.load`."""
    fields = Config(read_object(Path(folder) / CONFIG), f"{Path(folder) / CONFIG}")
    if (kind := NETWORK_KINDS.get(fields.str("peft_type", default="LORA"))) is not None:
        return NetworkAdapter.load(Path(folder), kind.read(Path(folder), fields))
    return Adapter.load(folder, model_type)


def adapted_model(weights: WeightLoader, adapter: object, merge: bool) -> Model:
    """The model of an open checkpoint with one adapter (a folder), or with several by name; see `lmstate.load`."""
    kind = weights.source.config.get("model_type")
    if isinstance(adapter, Mapping):
        if merge:
            raise StateError("merge=True was asked for with several adapters; one can be merged into the weights")
        return AdaptedModel(weights, {name: load_adapter(folder, kind) for name, folder in adapter.items()}, None)
    if not isinstance(adapter, str | os.PathLike):
        raise ModelError(f"adapter={adapter!r:.80} was given; give a folder, or a dict of names and folders")
    one = load_adapter(adapter, kind)
    if merge and isinstance(one, NetworkAdapter):
        raise ModelError(
            f"merge=True was asked for of {adapter}, which has learned positions and no matrices: leave it out"
        )
    if merge:
        assert isinstance(one, Adapter)
        one.to(weights.device)
        return build_adapted(AdaptedWeights(weights, [one], merge=True), [one])
    return AdaptedModel(weights, {"default": one}, "default")
