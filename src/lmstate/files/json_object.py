"""JSON from outside: bounded, and with errors that name the file."""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

from lmstate.errors import ModelError
from lmstate.files.regular import open_regular

SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")
MOST_BYTES = 256 * 2**20  # the largest tokenizer.json in use is near 35 MB


def parse_object(text: str | bytes, where: str) -> dict[str, Any]:
    """The JSON object in `text`; a name given twice, another kind of value or broken JSON is a `ModelError`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        values = dict(pairs)
        if len(values) != len(pairs):
            twice, _ = Counter(name for name, _ in pairs).most_common(1)[0]
            raise ModelError(f"{where} gives {twice[:80]!r} twice; the file is damaged")
        return values

    try:
        value = json.loads(text, object_pairs_hook=unique)
    except ModelError:
        raise
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{where} is not valid JSON ({error}); the file is damaged or incomplete") from error
    if SURROGATE.search(text if isinstance(text, str) else text.decode("latin-1")):  # or they would cost a copy of it
        try:
            json.dumps(value, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise ModelError(f"{where} has half a surrogate pair in a text; the file is damaged") from None
    if not isinstance(value, dict):
        raise ModelError(f"{where} must hold a JSON object, and holds a {type(value).__name__}")
    return value


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises `OSError` if it cannot be read, `ModelError` if it is not one."""
    with open_regular(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ModelError(f"{path} is too large; a JSON file of a checkpoint has at most {MOST_BYTES} bytes")
    return parse_object(data, str(path))
