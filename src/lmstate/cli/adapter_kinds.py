"""The kinds of adapters that `lmstate finetune` trains, and the options of each."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from lmstate.training import AdapterConfig, NetworkConfig


class AdapterKind(StrEnum):
    """Kinds of adapters, by the names that the command line has for them."""

    lora = "lora"
    loha = "loha"
    lokr = "lokr"
    ia3 = "ia3"
    prompt = "prompt"
    prefix = "prefix"
    adaption = "adaption-prompt"


OPTIONS: Mapping[AdapterKind, tuple[str, ...]] = {
    AdapterKind.lora: ("rank", "alpha", "targets", "rslora", "dora"),
    AdapterKind.loha: ("rank", "alpha", "targets"),
    AdapterKind.lokr: ("rank", "alpha", "targets"),
    AdapterKind.ia3: ("targets",),
    AdapterKind.prompt: ("positions",),
    AdapterKind.prefix: ("positions",),
    AdapterKind.adaption: ("positions", "layers"),
}
"""The options of `lmstate finetune` that each kind takes."""


def refuse_options(kind: AdapterKind | None, full: bool, given: Mapping[str, object]) -> None:
    """Raise `typer.BadParameter` for options of `given`, by their names, that the kind of adapter does not take."""
    if full and (kind is not None or given):
        names = [*(["adapter"] if kind is not None else []), *given]
        raise typer.BadParameter(f"{_told(names)} of an adapter, and --full trains none; leave out one of both")
    own = OPTIONS[kind or AdapterKind.lora]
    if others := [name for name in given if name not in own]:
        raise typer.BadParameter(
            f"{_told(others)} not of --adapter {kind or AdapterKind.lora}; it takes "
            + ", ".join(f"--{name}" for name in own)
        )


def adapter_config(kind: AdapterKind | None, given: Mapping[str, Any]) -> AdapterConfig | NetworkConfig:
    """The settings of a new adapter, with the defaults of its kind for what is not given. Raises `ModelError`."""
    from lmstate import training

    values = dict(given)
    if (targets := values.get("targets")) not in (None, "all-linear"):
        values["targets"] = [name.strip() for name in targets.split(",") if name.strip()]
    match kind or AdapterKind.lora:
        case AdapterKind.lora:
            return training.LoraConfig(**values)
        case AdapterKind.loha:
            return training.LoHaConfig(**values)
        case AdapterKind.lokr:
            return training.LoKrConfig(**values)
        case AdapterKind.ia3:
            return training.IA3Config(**values)
        case AdapterKind.prompt:
            return training.PromptTuningConfig(**values)
        case AdapterKind.prefix:
            return training.PrefixTuningConfig(**values)
        case AdapterKind.adaption:
            named = {"positions": "tokens", "layers": "layers"}
            return training.AdaptionPromptConfig(**{named[name]: value for name, value in values.items()})


def _told(names: list[str]) -> str:
    return ", ".join(f"--{name}" for name in names) + (" are" if len(names) > 1 else " is")
