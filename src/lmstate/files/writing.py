"""Files of text, JSON and tensors, which appear whole."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from lmstate.files.atomic import atomic_write
from lmstate.files.safetensors import write_tensors


def write_text(path: Path, text: str) -> None:
    with atomic_write(path) as part:
        part.write_text(text, "utf-8")


def write_json(path: Path, value: object) -> None:
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file, as transformers and PEFT read it. (Its own writer lets no other user read the file.)"""
    whole = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    with atomic_write(path) as part, part.open("wb") as file:
        write_tensors(file, whole, {"format": "pt"})
