"""Files that appear whole: written beside their place and moved there."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path


def replace_file(path: Path, write: Callable[[str], object]) -> None:
    """Have `write` make a file, and put it at `path`. Raises `OSError`; then what was there is still there."""
    beside = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        write(str(beside))
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


def write_json(path: Path, value: object) -> None:
    text = json.dumps(value, indent=2, ensure_ascii=False) + "\n"
    replace_file(path, lambda beside: Path(beside).write_text(text, "utf-8"))
