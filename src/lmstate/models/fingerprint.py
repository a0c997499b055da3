"""A short name for a model's exact numbers, so that no state is put into another model."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from lmstate.ops import Bfloat12Weight, Weight

VERSION = 2  # of what is hashed: paths of fields are; a change makes the snapshots of before foreign
SAMPLE = 64  # elements hashed of each tensor


def weights_in(thing: Any, path: str = "") -> Iterator[tuple[str, Tensor | Weight]]:
    """Every weight in a tree of dataclasses, lists and tuples, with the path to it."""
    yield from instances(thing, Tensor | Weight, path)


def instances(thing: Any, kind: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Every instance of a class in a tree of dataclasses, lists and tuples, with the path to it."""
    if isinstance(thing, kind):
        yield path, thing
    elif is_dataclass(thing):
        for part in fields(thing):
            yield from instances(getattr(thing, part.name), kind, f"{path}.{part.name}")
    elif isinstance(thing, list | tuple):
        for index, part in enumerate(thing):
            yield from instances(part, kind, f"{path}.{index}")


def fingerprint(config: Any, parts: Any) -> str:
    """The config's values, and a sha256 over every weight's path, shape, storage and an even sample of its content.

    In words of the form name=value, so that two of them tell what differs.
    """
    words = [f"{part.name}={getattr(config, part.name)}" for part in fields(config)]
    digest = hashlib.sha256()
    for path, weight in weights_in(parts):
        for name, shape, sample in _samples(weight):
            digest.update(f"{path}.{name} {tuple(shape)} {sample.dtype};".encode())
            digest.update(sample.contiguous().cpu().view(torch.uint8).numpy().tobytes())
    bits = {path: weight.activations for path, weight in weights_in(parts) if isinstance(weight, Weight)}
    if few := [path for path, count in bits.items() if count == 8]:
        digest.update(",".join(few).encode())
        words.append("activations=" + ",".join(map(str, sorted({count for count in bits.values() if count}))))
    return " ".join([f"fingerprint={VERSION}", *words, f"weights={digest.hexdigest()}"])


def _samples(weight: Tensor | Weight) -> Iterator[tuple[str, Sequence[int], Tensor]]:
    """Name, shape and some elements of each tensor of it."""
    if isinstance(weight, Bfloat12Weight):  # the same model as where its numbers are in a matrix
        n, k = weight.shape
        at = torch.arange(0, n * k, max(1, n * k // SAMPLE))
        yield "matrix", weight.shape, weight.rows(at // k)[torch.arange(len(at)), at % k].to(torch.bfloat16)
        return
    for name, tensor in (weight.tensors() if isinstance(weight, Weight) else {"": weight}).items():
        flat = tensor.detach().reshape(-1)
        yield name, tensor.shape, flat[:: max(1, len(flat) // SAMPLE)]
