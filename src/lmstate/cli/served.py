"""The models that `lmstate serve` serves: those that are named, those of a folder, and adapters by name."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from lmstate.checkpoints.hub import served_name
from lmstate.cli import options

if TYPE_CHECKING:
    from lmstate.engine import Engine
    from lmstate.models.model import Model
    from lmstate.serve.answer.pool import ModelSource
    from lmstate.training import AdaptedModel

# Files that are part of another model: all but the first of one that is split, and vision towers.
BESIDE = re.compile(r"-(?!0*1-of)\d+-of-\d+\.gguf$|(?i:mmproj)")


@dataclass(frozen=True)
class EngineOptions:
    """Options of loading a model, and of the engine that runs it."""

    weights: options.WeightKind
    activations: options.ActivationBits
    adapter: Path | Mapping[str, Path] | None
    context_size: int | None
    threads: str | None
    device: str | None
    parallel: int
    parallel_mode: options.ParallelModes
    draft: str
    rows: int | None
    memory: int
    store: str | None
    kv: Any
    carries: int
    queue: int
    max_itl: float | None
    stall: float | None
    mmproj: str | None = None

    def load(self, name: str) -> Model:
        loaded = options.load_model(
            name,
            self.weights,
            self.threads,
            self.adapter,
            self.draft,
            self.device,
            self.activations,
            self.context_size,
            self.parallel,
            self.parallel_mode,
            self.mmproj,
        )
        loaded.on_part = None  # of many requests at a time no single one is followed
        return loaded

    def engine(self, model: Model) -> Engine:
        from lmstate.engine import Engine
        from lmstate.engine.options import default_rows, refuse_sources

        refuse_sources(model)
        return Engine(
            model,
            rows=self.rows or default_rows(model.device),
            memory=self.memory,
            store=self.store,
            kv=self.kv,
            carries=self.carries,
            draft=options.load_drafter(self.draft, self.device),
            queue=self.queue,
            max_itl=self.max_itl,
            stall=self.stall,
        )


def models_in(folder: Path) -> list[str]:
    """The models of a folder: its .gguf files, and its folders with a config.json. Raises `OSError` if it has none."""
    found = [
        str(path)
        for path in sorted(folder.iterdir())
        if (path.is_dir() and (path / "config.json").is_file())
        or (path.suffix == ".gguf" and path.is_file() and not BESIDE.search(path.name))
    ]
    if not found:
        raise FileNotFoundError(f"{folder} holds no model: no .gguf file, and no folder with a config.json")
    return found


def sources(names: Sequence[str], how: EngineOptions) -> list[ModelSource]:
    """Models that are loaded when they are asked for."""
    from lmstate.serve.answer.pool import ModelSource

    return [
        ModelSource(served_name(name), partial(_loaded, name, how), name, _nbytes(Path(name)), partial(_config, name))
        for name in names
    ]


def _loaded(name: str, how: EngineOptions) -> Engine:
    return how.engine(how.load(name))


def _config(name: str) -> dict[str, Any]:
    from lmstate.checkpoints.hub import cache_dir, resolve
    from lmstate.checkpoints.open import open_cached

    return open_cached(resolve(name), cache_dir()).config


def _nbytes(path: Path) -> int:
    """Bytes of a model's files; 0 for one that is not on the disk under its name."""
    from lmstate.checkpoints.gguf.reader import parts_of

    if path.is_dir():
        files = list(path.glob("*.safetensors"))
    else:
        files = parts_of(path) if path.is_file() else []
    return sum(file.stat().st_size for file in files if file.exists())


def read_adapters(given: Sequence[str]) -> dict[str, Path]:
    """Adapters by name, from NAME=FOLDER. Raises `typer.BadParameter` for anything else."""
    adapters: dict[str, Path] = {}
    for text in given:
        name, equals, folder = text.partition("=")
        if not (name and equals and folder) or name in adapters:
            raise typer.BadParameter(f"--lora is NAME=FOLDER, each name once, as sql=adapters/sql; {text!r} was given")
        if not Path(folder).is_dir():
            raise typer.BadParameter(f"--lora {text}: there is no folder {folder}")
        adapters[name] = Path(folder)
    return adapters


def adapted_sources(name: str, adapters: Mapping[str, Path], how: EngineOptions) -> list[ModelSource]:
    """A model without its adapters, and with each: they share its weights, and no state."""
    from lmstate.serve.answer.pool import ModelSource
    from lmstate.training import AdaptedModel

    model = replace(how, adapter=adapters).load(name)
    assert isinstance(model, AdaptedModel)
    how = replace(how, memory=how.memory // (1 + len(adapters)))
    named: list[tuple[str, str | None]] = [(served_name(name), None), *((each, each) for each in adapters)]
    return [ModelSource(asked, partial(_adapted, model, adapter, how), asked) for asked, adapter in named]


def _adapted(model: AdaptedModel, adapter: str | None, how: EngineOptions) -> Engine:
    return how.engine(model.adapted(adapter))
