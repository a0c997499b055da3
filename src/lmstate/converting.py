"""A checkpoint in another storage, written to a folder."""

from __future__ import annotations

import os
import secrets
import shutil
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from lmstate.checkpoints.conversion_bar import ConversionBar
from lmstate.checkpoints.hub import cache_dir, resolve, served_name, weights_of
from lmstate.checkpoints.huggingface import converted, mlx
from lmstate.checkpoints.huggingface.quantization import MXFP4
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_cached
from lmstate.checkpoints.renamed import file_source
from lmstate.checkpoints.saving import save_checkpoint, without_quantization
from lmstate.checkpoints.source import GROUP, GroupedQuant, Source, floats
from lmstate.errors import ModelError
from lmstate.models.families import build
from lmstate.ops.types.weight import FLOAT_KINDS, Weight
from lmstate.ops.weights.grouped import rounded

STEM = ".weight"  # the end of a matrix's name


def convert(name: str | os.PathLike[str], folder: Path, weights: str, progress: bool = True) -> Counter[str]:
    """Write a checkpoint with its matrices in another storage, which loads with the bits of `load(name, weights)`.

    Integers are written as MLX stores them, in groups of 32. Matrices that the model makes of several tensors, or of
    parts of one, stay as they are and are rounded when the folder is loaded. Returns the bytes by storage. Raises
    `ModelError` for a folder that is not empty and for a checkpoint that does not load, `OSError` where it cannot be
    written; the folder is then as it was.
    """
    folder = folder.resolve()
    refuse_used(folder)
    source = open_cached(resolve(name), cache_dir())
    loader = Survey(source, weights, progress=progress)
    build(loader)  # what does not load is not converted; and matrices that are used together are stored alike
    writer = _Conversion(file_source(source), weights, loader.stacks, progress)
    beside = folder.parent / f".{folder.name}.{os.getpid()}-{secrets.token_hex(4)}.part"
    try:
        writer.save(beside)
        card = _card(str(name), weights)
        (beside / "README.md").write_text(card, "utf-8")
        if folder.is_dir():
            folder.rmdir()
        beside.rename(folder)
    finally:
        shutil.rmtree(beside, ignore_errors=True)
    return writer.nbytes


def refuse_used(folder: Path) -> None:
    """Raise `ModelError` for a file, and for a folder that holds anything."""
    if folder.exists() and not folder.is_dir():
        raise ModelError(f"{folder} is a file: name a folder that is empty or not there")
    if folder.is_mount():
        raise ModelError(
            f"{folder} is a mount point, which cannot be replaced when all is written: name a folder in it"
        )
    if folder.is_dir() and any(folder.iterdir()):
        raise ModelError(f"{folder} is not empty: name a folder that is empty or not there")


class Survey(WeightLoader):
    """A loader that learns the storage of each matrix in `stacks`, and keeps none of them."""

    def _for_decoding(self, weight: Weight) -> Weight:
        return weight.to("meta")


class _Conversion:
    """The tensors of a checkpoint, matrix by matrix in their new storage."""

    def __init__(self, source: Source, weights: str, stacks: dict[tuple[str, ...], str], progress: bool) -> None:
        self._source, self._weights = source, weights
        self._bar = ConversionBar(progress, len(source.names()), "writing tensors")
        self._stacks: dict[str, tuple[tuple[str, ...], str]] = {}
        several = Counter(name for names in stacks for name in set(names))
        for names, kind in stacks.items():
            if all(several[name] == 1 for name in names):
                self._stacks |= dict.fromkeys(names, (names, kind))
        self._packed: dict[str, str] = {}
        self._rounded: set[str] = set()
        self.nbytes: Counter[str] = Counter()

    def save(self, folder: Path) -> None:
        config: dict[str, object] = {}
        try:
            save_checkpoint(folder, self._source, self._tensors(config), config)
        finally:
            self._bar.close()

    def _tensors(self, config: dict[str, object]) -> Iterator[tuple[str, Tensor]]:
        """Names and tensors in order; at the end the config that describes them."""
        for name in sorted(self._source.names()):
            yield from self._converted(name).items()
            self._bar.advance(1)
        config.update(self._config())

    def _converted(self, name: str) -> dict[str, Tensor]:
        names, kind = self._stacks.get(name, ((name,), ""))
        numbers = self._source.read(name)
        if kind in ("int4", "int8") and name.endswith(STEM):
            together = [numbers if other == name else self._source.read(other) for other in names]
            if not all(isinstance(each, GroupedQuant) and each.kind == kind for each in together):
                numbers = _grouped(floats(numbers), kind)
        if isinstance(numbers, GroupedQuant) and kind not in FLOAT_KINDS and name.endswith(STEM):
            parts = mlx.packed(numbers)
            if parts is not None:
                stem = name.removesuffix(STEM)
                self._packed[stem] = numbers.kind
                if self._source.activation_bits(name) == 16:
                    self._rounded.add(name)
                self.nbytes[numbers.kind] += sum(part.nbytes for part in parts.values())
                return {f"{stem}.{end}": part for end, part in parts.items()}
        tensor = floats(numbers)
        if kind in FLOAT_KINDS and self._weights != "auto":
            tensor = tensor.to(FLOAT_KINDS[kind])
        self.nbytes[str(tensor.dtype).removeprefix("torch.")] += tensor.nbytes
        return {name: tensor.contiguous()}

    def _config(self) -> dict[str, object]:
        config: dict[str, object] = without_quantization(self._source.config)
        given = self._source.config.get("quantization_config")
        if self._packed:
            config |= dict.fromkeys(mlx.SECTIONS, mlx.section(self._packed))
        if isinstance(given, dict) and given.get("quant_method") == MXFP4:  # of the experts, which stay as they are
            config["quantization_config"] = given
        bits = min(map(self._source.activation_bits, self._source.names()), default=16)
        made = converted.ConvertedCheckpoint(self._weights, bits, frozenset(self._rounded if bits == 8 else ()))
        return {**config, converted.SECTION: made.section()}


def _grouped(matrix: Tensor, kind: str) -> GroupedQuant:
    q, scale, minimum = rounded(matrix.to(torch.float32), kind)
    return GroupedQuant(q, scale, minimum)


def _card(name: str, weights: str) -> str:
    """The model card: the model that it was made of, and how."""
    from lmstate import __version__

    base, _ = weights_of(name)
    known = not Path(base).is_absolute()
    head = f"---\nbase_model: {base}\nbase_model_relation: quantized\n---\n" if known else ""
    return (
        f"{head}# {base if known else served_name(name)}, {weights}\n\n"
        f"Made by `lmstate convert --weights {weights}` (lmstate {__version__}). `lmstate.load(FOLDER)` gives the\n"
        f"bits of the original with `weights={weights!r}`. Integers are as MLX stores them, in groups of {GROUP}.\n"
    )
