"""Writing a checkpoint directory as `save_pretrained` of transformers does: safetensors, config, tokenizer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lmstate.checkpoints.huggingface import converted, mlx
from lmstate.checkpoints.source import Source
from lmstate.files.writing import save_tensors, write_json
from lmstate.text.tokenizer import TokenizerFiles

SHARD = 4 << 30
"""Bytes of tensors in a file, at most, where there is more than one tensor."""
BESIDE = ("*.json", "*.jinja", "*.model", "*.txt", "LICENSE*", "additional_chat_templates/*.jinja", "1_Pooling/*.json")
"""Files that belong to a checkpoint beside its config and its tensors."""
OWN = ("config.json", "model.safetensors.index.json")  # of the new folder, not copied


def save_checkpoint(
    folder: str | os.PathLike[str], source: Source, tensors: Iterable[tuple[str, Tensor]], config: Mapping[str, Any]
) -> None:
    """Write tensors, a config, and what else belongs to the checkpoint that `source` is. Raises `OSError`.

    Tensors are taken one by one, and those of one file are in memory at a time.
    """
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    _save_shards(folder, tensors)
    write_json(folder / OWN[0], config)
    if source.generation and not source.path.is_dir():
        write_json(folder / "generation_config.json", source.generation)
    save_tokenizer(folder, source.path, source.tokenizer_files())


def without_quantization(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config, and the config of the text model in it, that say nothing of how matrices are stored."""
    inner = config.get("text_config")
    left = {name: value for name, value in config.items() if name not in (*mlx.SECTIONS, converted.SECTION)}
    return {**left, "text_config": without_quantization(inner)} if isinstance(inner, Mapping) else left


def _save_shards(folder: Path, tensors: Iterable[tuple[str, Tensor]]) -> None:
    shards: list[list[str]] = []
    held: dict[str, Tensor] = {}
    total = size = 0

    def write() -> None:
        shards.append([*held])
        save_tensors(folder / f"part-{len(shards):05d}.safetensors", held)
        held.clear()

    for name, tensor in tensors:
        if held and size + tensor.nbytes > SHARD:
            write()
            size = 0
        held[name] = tensor.detach().cpu()
        size += tensor.nbytes
        total += tensor.nbytes
    write()
    files = _file_names(len(shards))
    for number, file in enumerate(files, 1):
        (folder / f"part-{number:05d}.safetensors").replace(folder / file)
    if len(shards) > 1:
        where = {name: file for file, names in zip(files, shards) for name in names}
        write_json(folder / OWN[1], {"metadata": {"total_size": total}, "weight_map": where})
    else:
        (folder / OWN[1]).unlink(missing_ok=True)


def save_tokenizer(folder: Path, origin: Path, files: TokenizerFiles | None) -> None:
    """Write the tokenizer of a checkpoint: its files as they are, or what a single file holds of it."""
    if origin.is_dir():
        for path in (path for pattern in BESIDE for path in origin.glob(pattern)):
            inside = path.relative_to(origin)
            target = folder / inside
            if path.is_file() and str(inside) not in OWN and path.resolve() != target.resolve():
                target.parent.mkdir(exist_ok=True)
                shutil.copyfile(path, target)
    elif files is not None:
        text = files.tokenizer_json
        text = text.read_text("utf-8") if isinstance(text, Path) else text
        (folder / "tokenizer.json").write_text(text, "utf-8")
        write_json(folder / "tokenizer_config.json", files.settings)


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
