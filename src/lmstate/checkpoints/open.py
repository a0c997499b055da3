"""Open a checkpoint: a GGUF file or a directory, through the cache of conversions where there is one."""

from __future__ import annotations

import contextlib
import hashlib
import json
from pathlib import Path
from typing import Any

from lmstate.checkpoints.conversion_cache import FORMAT
from lmstate.checkpoints.gguf.reader import parts_of
from lmstate.checkpoints.gguf.source import GgufSource
from lmstate.checkpoints.source import Source
from lmstate.errors import ModelError
from lmstate.files.atomic import atomic_write
from lmstate.files.json_object import read_object
from lmstate.files.mmap_file import fingerprint
from lmstate.text.tokenizer import TokenizerFiles


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
