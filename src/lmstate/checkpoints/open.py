"""Open a checkpoint: a GGUF file or a directory, by its name and through the cache of conversions."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import torch

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.conversion_cache import FORMAT
from lmstate.checkpoints.gguf.reader import parts_of
from lmstate.checkpoints.gguf.source import GgufSource
from lmstate.checkpoints.hub import cache_dir, resolve
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.placement import DevicePlacement, Devices
from lmstate.checkpoints.source import Source
from lmstate.errors import ModelError
from lmstate.files.atomic import atomic_write
from lmstate.files.json_object import read_object
from lmstate.files.mmap_file import fingerprint
from lmstate.text.tokenizer import Tokenizer, TokenizerFiles

LOG = logging.getLogger(__name__)


def open_checkpoint(
    name: str | os.PathLike[str],
    weights: str = "auto",
    dtype: torch.dtype | None = None,
    device: Devices | DevicePlacement | None = None,
    progress: bool = True,
    heads: bool = False,
    activations: int | str = "auto",
    context_size: int | None = None,
) -> tuple[WeightLoader, Tokenizer | None, dict[str, Any]]:
    """Open a model by name: its weights (not read yet), its tokenizer (None without one), its generation defaults.

    The defaults always hold `eos_token_id`, a list of ids that end a text (possibly empty). They hold `bos_token_id`,
    `do_sample`, `temperature`, `top_k`, `top_p`, `min_p` and `repetition_penalty` if generation_config.json sets them,
    and `pooling` if the checkpoint was trained for one (mean, cls, last or another name).
    """
    source = open_cached(resolve(name), cache_dir())
    held = WeightLoader(source, weights, dtype, device, cache_dir(), progress, heads, activations, context_size)
    defaults = generation_defaults(source.generation, source.config)
    files = source.tokenizer_files()
    tokenizer = Tokenizer(files, defaults["eos_token_id"]) if files is not None else None
    if tokenizer is not None:
        defaults["eos_token_id"] = sorted(tokenizer.eos_ids)
    for line in source.conversions:
        LOG.info("%s: %s", source.path, line)
    for note in source.notes:
        warnings.warn(f"{source.path}: {note}", UserWarning, stacklevel=2)
    return held, tokenizer, defaults


def generation_defaults(generation: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    """The part of generation_config.json that lmstate follows, checked; the ids fall back to config.json's."""
    fields, model = Config(generation, "generation_config.json"), Config(config, "config.json")
    checked: dict[str, Any] = {
        "bos_token_id": fields.int("bos_token_id", default=model.int("bos_token_id", default=None)),
        "do_sample": fields.bool("do_sample", default=None),
        "temperature": fields.float("temperature", 0.0, 1e4, default=None),
        "top_k": fields.int("top_k", low=-1, default=None),
        "top_p": fields.float("top_p", 0.0, 1.0, default=None),
        "min_p": fields.float("min_p", 0.0, 1.0, default=None),
        "repetition_penalty": fields.float("repetition_penalty", 1e-3, 1e3, default=None),
    }
    defaults = {name: value for name, value in checked.items() if value is not None}
    if isinstance(pooling := generation.get("pooling"), str):
        defaults["pooling"] = pooling
    defaults["eos_token_id"] = _ids(fields if fields.given("eos_token_id") else model, "eos_token_id")
    return defaults


def _ids(fields: Config, name: str) -> list[int]:
    """Ids that a config gives as one number, a list, or not at all. -1 is how some configs say "none"."""
    value = fields.get(name)
    if value is None or value == -1:
        return []
    return list(fields.ints(name)) if isinstance(value, list) else [fields.int(name)]


def open_source(path: Path) -> Source:
    """Open a .gguf file or a directory as `save_pretrained` writes it.

    Raises `OSError` if it is not there or cannot be read, `ModelError` if it is damaged or of a kind that lmstate does
    not read.
    """
    from lmstate.checkpoints.gguf.source import GgufSource
    from lmstate.checkpoints.huggingface.directory import CheckpointFolder
    from lmstate.checkpoints.renamed import plain

    if path.is_dir():
        return plain(CheckpointFolder(path))
    if not path.exists():
        raise FileNotFoundError(f"no such model file or directory: {path}")
    if path.suffix == ".gguf":
        return GgufSource.open(path)
    raise ModelError(f"{path} is neither a .gguf file nor a directory with config.json and safetensors")


def open_cached(path: Path, cache: Path | None) -> Source:
    """`open_source`, through the cache: a GGUF file that was opened before is not parsed again."""
    if cache is None or path.suffix != ".gguf" or not path.is_file():
        return open_source(path)
    folder = cache / fingerprint(parts_of(path))
    memory, tokenizer = folder / "memory.json", folder / "tokenizer.json"
    recalled = _recall(path, memory, tokenizer)
    if recalled is not None:
        return recalled
    source = GgufSource.open(path)
    files = source.tokenizer_files()
    record: dict[str, Any] = {
        "format": FORMAT,
        "path": str(path.absolute()),
        "source": source.to_json(),
        "settings": None,
    }
    with contextlib.suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        if files is not None and isinstance(files.tokenizer_json, str):
            with atomic_write(tokenizer) as beside:
                beside.write_text(files.tokenizer_json, encoding="utf-8")
            record |= {"settings": files.settings}
        record["digest"] = _digest(record, tokenizer)
        with atomic_write(memory) as beside:
            beside.write_text(json.dumps(record), encoding="utf-8")
    return source


def _recall(path: Path, memory: Path, tokenizer: Path) -> GgufSource | None:
    try:
        record = read_object(memory)
        if record.get("format") != FORMAT or record.pop("digest") != _digest(record, tokenizer):
            return None
        files = None if record["settings"] is None else TokenizerFiles(tokenizer, record["settings"])
        return GgufSource.from_json(path, record["source"], files)
    except (OSError, ModelError, KeyError, TypeError, ValueError, AttributeError):
        return None  # never written, cut short, or edited: opening the file itself puts it right


def _digest(record: dict[str, Any], tokenizer: Path) -> str:
    """Digest of a record and of the tokenizer's file that belongs to it, if one does."""
    digest = hashlib.blake2b(json.dumps(record, sort_keys=True).encode(), digest_size=16)
    if record["settings"] is not None:
        digest.update(tokenizer.read_bytes())
    return digest.hexdigest()
