"""Writing a checkpoint directory as `save_pretrained` of transformers does: safetensors, config, tokenizer."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from lmstate.checkpoints.source import Source, dtype_name, floats
from lmstate.text.tokenizer import TokenizerFiles
from lmstate.training.files import save_tensors, write_json

SHARD = 4 << 30
"""Bytes of tensors in a file, at most, where there is more than one tensor."""
BESIDE = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def save_checkpoint(
    folder: str | os.PathLike[str], source: Source, tensors: Mapping[str, Tensor], without: Iterable[str] = ()
) -> None:
    """Write `tensors`, and all that `source` holds beside them but for `without`. Raises `OSError`."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    names = [*tensors, *sorted(source.names() - set(tensors) - set(without))]
    shards: list[dict[str, Tensor]] = [{}]
    size = 0
    for name in names:
        tensor = tensors[name].detach() if name in tensors else floats(source.read(name))
        if shards[-1] and size + tensor.nbytes > SHARD:
            shards.append({})
            size = 0
        shards[-1][name] = tensor.contiguous().cpu()
        size += tensor.nbytes
    files = _file_names(len(shards))
    for file, shard in zip(files, shards):
        save_tensors(folder / file, shard)
    index = folder / "model.safetensors.index.json"
    if len(shards) > 1:
        where = {name: file for file, shard in zip(files, shards) for name in shard}
        total = sum(tensor.nbytes for shard in shards for tensor in shard.values())
        write_json(index, {"metadata": {"total_size": total}, "weight_map": where})
    else:
        index.unlink(missing_ok=True)
    config = {name: value for name, value in source.config.items() if name != "quantization_config"}
    config.pop("torch_dtype", None)
    config["dtype"] = max((dtype_name(tensor.dtype) for tensor in tensors.values()), key=_width)
    write_json(folder / "config.json", config)
    if source.generation:
        write_json(folder / "generation_config.json", source.generation)
    save_tokenizer(folder, source.path, source.tokenizer_files())


def save_tokenizer(folder: Path, origin: Path, files: TokenizerFiles | None) -> None:
    """Write the tokenizer of a checkpoint: its files as they are, or what a single file holds of it."""
    if origin.is_dir():
        for name in BESIDE:
            if (origin / name).is_file() and (origin / name).resolve() != (folder / name).resolve():
                shutil.copyfile(origin / name, folder / name)
    elif files is not None:
        text = files.tokenizer_json
        text = text.read_text("utf-8") if isinstance(text, Path) else text
        (folder / "tokenizer.json").write_text(text, "utf-8")
        write_json(folder / "tokenizer_config.json", files.settings)


def _width(dtype: str) -> int:
    return ("float16", "bfloat16", "float32").index(dtype)


def _file_names(count: int) -> list[str]:
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]
