"""The tiktoken.model of Kimi's checkpoints: a byte string in base64 and its rank on each line.

The rules that part a text are in the code of a checkpoint, which never runs; they are the same for all of Kimi.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmstate.checkpoints.gguf.splitting import SPLITTINGS
from lmstate.checkpoints.tokenizer_json import added_token, all_splits, byte_level, byte_pieces, document
from lmstate.errors import ModelError
from lmstate.files.regular import open_regular

NAME = "tiktoken.model"
MOST_BYTES = 2**25
MOST_SPECIAL = 4096
RESERVED = 256  # ids of special tokens, named or not


def tiktoken_json(path: Path, settings: Mapping[str, Any]) -> str:
    """The tokenizer.json of a file; `settings`: of the tokenizer_config.json beside it, which names special tokens.

    Raises `ModelError` for files that are damaged.
    """
    with open_regular(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ModelError(f"{path} is too large; a vocabulary has at most {MOST_BYTES} bytes")
    lines = [line.split() for line in data.decode("latin-1").splitlines() if line.strip()]
    for rank, line in enumerate(lines):
        if len(line) != 2 or line[1] != str(rank):
            raise ModelError(f"{path} must have a token and its rank {rank} on line {rank + 1}; it is damaged")
    vocabulary = byte_pieces((line[0] for line in lines), str(path))
    base = len(vocabulary)
    told = settings.get("added_tokens_decoder") or {}
    names = _named(told, base, str(path))
    plain = {id for id in names if told[str(id)].get("special") is False}
    special = [names.get(id, f"<|reserved_token_{id}|>") for id in range(base, max([base + RESERVED - 1, *names]) + 1)]
    ids = vocabulary | {name: base + index for index, name in enumerate(special)}
    if len(ids) != base + len(special):
        raise ModelError(f"{path} and its tokenizer_config.json have a token twice; they are damaged")
    rules = SPLITTINGS["kimi-k2"]
    made = document(ids, all_splits(vocabulary, {}), ignore_merges=rules.whole_words)
    made["pre_tokenizer"] = rules.pre_tokenizer()
    made["decoder"] = byte_level(True)
    made["added_tokens"] = [
        added_token(base + index, name, base + index not in plain) for index, name in enumerate(special)
    ]
    return json.dumps(made, ensure_ascii=False)


def _named(told: Any, base: int, where: str) -> dict[int, str]:
    """The names of special tokens by id."""
    ids = {str(id): id for id in range(base, base + MOST_SPECIAL)}
    names: dict[int, str] = {}
    for id, token in told.items() if isinstance(told, dict) else ():
        name = token.get("content") if isinstance(token, dict) else None
        if id not in ids or not isinstance(name, str) or not name:
            raise ModelError(
                f"{where} has {base} tokens, and the tokenizer_config.json beside it gives {id[:20]!r} to "
                f"{str(token)[:80]}; expected ids from {base} on, each with a content"
            )
        names[ids[id]] = name
    return names
