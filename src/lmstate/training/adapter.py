"""Adapters in the format of PEFT: `adapter_config.json` and `adapter_model.safetensors`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.files.json_object import read_object
from lmstate.files.safetensors import TensorFile
from lmstate.files.writing import save_tensors, write_json
from lmstate.ops.weights.lora import AdapterTensor, Update
from lmstate.training.adapter_config import ALL, AdapterConfig, last_word, module_key, named
from lmstate.training.ia3 import IA3Config
from lmstate.training.lora import LoraConfig
from lmstate.training.lycoris import LoHaConfig, LoKrConfig
from lmstate.training.module_names import named_as_in_transformers

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""Prefix of module names in PEFT's files."""
KINDS: dict[str, type[AdapterConfig]] = {
    kind.peft_type: kind for kind in (LoraConfig, IA3Config, LoHaConfig, LoKrConfig)
}


@dataclass(frozen=True, eq=False)
class Adapter:
    """The updates of one adapter by module, each as its parts by name: see `lmstate.ops.weights.lora`."""

    config: AdapterConfig
    modules: Mapping[str, Mapping[str, AdapterTensor]]
    model_type: object = None  # of the model that it is for, which may name its modules in its own way

    @classmethod
    def fresh(
        cls, config: AdapterConfig, shapes: Mapping[str, tuple[int, int]], norms: Callable[[str], Tensor]
    ) -> Adapter:
        """A new one for modules of shapes `[N, K]`, which changes nothing; see `AdapterConfig.fresh`."""
        modules = {
            module: {
                name: AdapterTensor(part.requires_grad_()) for name, part in config.fresh(module, shape, norms).items()
            }
            for module, shape in shapes.items()
            if config.matches(module)
        }
        targets = () if config.targets == ALL else config.targets
        unknown = [name for name in targets if not any(named(module, [name]) for module in shapes)]
        if unknown or not modules:
            ends = sorted({last_word(module) for module in shapes})
            asked = ", ".join(unknown) or repr(config.targets)
            raise ModelError(f"no projection is called {asked:.200}; this model has {', '.join(ends)}")
        return cls(config, modules)

    @classmethod
    def load(cls, folder: str | os.PathLike[str], model_type: object) -> Adapter:
        """Read what PEFT's (or this) `save_pretrained` wrote, for a model of a type.

        Raises `ModelError` for one that is damaged or of a kind that lmstate does not run, `OSError` for missing files.
        """
        path = Path(folder)
        config = _read_config(path)
        file = TensorFile(path / TENSORS)
        found: dict[str, dict[str, Tensor]] = {}
        parts = "|".join(sorted(config.part_names, key=len, reverse=True))
        for name in file.entries:
            match = re.fullmatch(rf"(.*)\.({parts})(?:\.default)?(?:\.weight)?", name)
            if match is None:
                raise ModelError(f"{path}: tensor {name[:80]!r} is not part of a {config.peft_type} that lmstate runs")
            own = found.setdefault(match[1].removeprefix(PREFIX), {})
            if match[2] in own:
                raise ModelError(
                    f"{path}: {match[1][:80]!r} has two tensors {match[2].removeprefix('lora_')}; the file is damaged"
                )
            own[match[2]] = file.tensor(name)
        for module, own in found.items():
            try:
                fits = all(part.is_floating_point() for part in own.values()) and config.shape(own) is not None
            except ModelError as error:
                raise ModelError(f"{path}: the update of {module[:80]!r} {error}") from None
            if not fits:
                told = ", ".join(f"{name} {list(part.shape)}" for name, part in own.items())
                raise ModelError(
                    f"{path}: the update of {module[:80]!r} is {told}, which are not the float tensors of a "
                    f"{config.peft_type} of this config"
                )
        if not found:
            raise ModelError(f"{path / TENSORS} holds no updates")
        modules = {
            module: {
                name: AdapterTensor(own[name].float().contiguous().clone()) for name in config.part_names if name in own
            }
            for module, own in found.items()
        }
        return cls(config, modules, model_type)

    def save(self, folder: str | os.PathLike[str], base: tuple[str, str | None], modules: Iterable[str]) -> None:
        """Write it for PEFT. `base`: the repository or the path of the model, and its revision; `modules`: all that the
        model has, its experts too."""
        path = Path(folder)
        path.mkdir(parents=True, exist_ok=True)
        save_tensors(path / TENSORS, dict(self.named_tensors()))
        config: dict[str, Any] = {
            "peft_type": self.config.peft_type, "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base[0], "revision": base[1], "inference_mode": True,
        }  # fmt: skip
        targets, parameters = list(self.modules), []
        if isinstance(self.config, LoraConfig):
            # A module named as those of the experts: PEFT takes its name for theirs, but not that of its parameter.
            of_experts = {last_word(module) for module in modules if ".experts." in module}
            parameters = sorted(f"{module}.weight" for module in targets if last_word(module) in of_experts)
            targets = [module for module in targets if last_word(module) not in of_experts]
            config["target_parameters"] = parameters
        # The last words of names where these say it.
        ends = {last_word(module) for module in targets}
        others = {last_word(module) for module in set(modules) - set(self.modules)}
        wrapped = any("language_model." in module or "text_model." in module for module in self.modules)
        if not wrapped and not ends & others:  # beside a text model, others have modules of the same names
            targets = [module if last_word(module).isdecimal() else last_word(module) for module in targets]
        write_json(path / CONFIG, config | self.config.to_json(sorted(set(targets)), self.modules))

    @cached_property
    def names(self) -> dict[str, str]:
        """Names of its modules by their keys. Raises `ModelError` if two are of one module."""
        names: dict[str, str] = {}
        for name in self.modules:
            key = module_key(named_as_in_transformers(self.model_type, name))
            if (other := names.setdefault(key, name)) != name:
                raise ModelError(f"the adapter updates {other[:80]!r} and {name[:80]!r}, which are one module")
        return names

    def parts(self) -> Iterator[tuple[str, AdapterTensor]]:
        """The parts of each module under their names in a file."""
        for module, parts in self.modules.items():
            for name, part in parts.items():
                yield f"{PREFIX}{module}.{name}" + (".weight" if name in ("lora_A", "lora_B") else ""), part

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The tensors of `parts`."""
        yield from ((name, part.storage) for name, part in self.parts())

    def update(self, module: str, first: int, shape: tuple[int, int]) -> Update | None:
        """Update of a module of a shape `[N, K]`, which is from output `first` on; None if it has none."""
        name = self.names.get(module_key(module))
        if name is None:
            return None
        parts = self.modules[name]
        made = self.config.shape({part: each.storage for part, each in parts.items()}) or (None, None)
        if any(own not in (None, side) for own, side in zip(made, shape)):
            told = ["?" if side is None else side for side in made]
            raise ModelError(
                f"the adapter is of another model: its update of {module} is [{told[0]}, {told[1]}], "
                f"and the matrix is {list(shape)}"
            )
        return self.config.update(name, first, shape, parts)

    def to(self, device: torch.device) -> None:
        """Move its tensors to where the model is."""
        for _, part in self.parts():
            part.storage = part.storage.to(device)


def _held(parts: Mapping[str, Tensor]) -> dict[str, AdapterTensor]:
    return {name: AdapterTensor(part) for name, part in parts.items()}


def _read_config(path: Path) -> AdapterConfig:
    raw = read_object(path / CONFIG)
    fields = Config(raw, f"{path / CONFIG}")
    kind = KINDS.get(name := fields.str("peft_type", default="LORA"))
    if kind is None:
        raise ModelError(f"{path} is a {name[:40]} adapter; lmstate runs {', '.join(KINDS)}, and learned positions")
    if asked := [name for name in kind.refused if raw.get(name)]:
        raise ModelError(f"{path} asks for {', '.join(asked)}, which lmstate does not run")
    return kind.read(path, fields)
