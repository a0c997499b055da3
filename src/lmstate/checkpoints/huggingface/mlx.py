"""Matrices as MLX stores them: `w = scale * q + bias` in groups of inputs, with numbers of 2 to 8 bits in 32-bit words.

Groups of 32, with numbers of 4 bits, or of 8 where each bias is -128 scales, are the int4 and the int8 of lmstate,
number for number. So what lmstate has quantized is written in this form, and programs that read MLX read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.huggingface.packed import Entries, Get, PackedMatrix, PackedParts
from lmstate.checkpoints.source import GROUP, GroupedQuant
from lmstate.errors import ModelError

SECTIONS = ("quantization", "quantization_config")  # of a config: mlx-lm writes both, alike
BITS = (2, 3, 4, 5, 6, 8)
ENDS = ("weight", "scales", "biases")
EXPERTS = ".switch_mlp."  # where mlx-lm has the matrices of all experts in one tensor
MIDDLE = 128  # added to int8 to have numbers from 0 on


def settings_of(config: Mapping[str, Any], path: Path) -> Config | None:
    """Settings of a checkpoint that MLX quantized; None for others.

    Raises `ModelError` for a mode other than affine.
    """
    whole = Config(config, f"config of {path}")
    found = next((whole.fields(name) for name in SECTIONS if isinstance(whole.get(name), Mapping)), None)
    if found is None or found.given("quant_method") or not found.given("group_size"):
        return None
    mode = found.str("mode", default="affine")
    if mode != "affine":
        raise ModelError(
            f"{path} is quantized by MLX in the mode {mode[:40]!r}; lmstate reads 'affine'. Load a GGUF of this model, "
            'or its original weights with weights="int4"'
        )
    return found


def find(entries: Entries, get: Get, settings: Config, path: Path) -> dict[str, PackedMatrix]:
    """The matrices that MLX packed, by the name that each would have as floats. `get`: a tensor by its name.

    Experts that share a tensor have the names of experts by themselves. Raises `ModelError` for parts that are missing
    or do not fit together.
    """
    found: dict[str, PackedMatrix] = {}
    for name, entry in entries.items():
        if not name.endswith(".weight") or entry.dtype != torch.uint32:
            continue
        stem = name.removesuffix(".weight")
        parts = PackedParts(entries, get, stem, path)
        if len(entry.shape) == 3 and EXPERTS in name:
            for index in range(entry.shape[0]):
                found[name.replace(EXPERTS, f".experts.{index}.")] = _matrix(parts, settings, index)
        else:
            found[name] = _matrix(parts, settings)
    return found


def _matrix(parts: PackedParts, settings: Config, expert: int | None = None) -> PackedMatrix:
    own = settings.fields(parts.stem) if isinstance(settings.get(parts.stem), Mapping) else None
    size = (settings if own is None else own).int("group_size", 1, 2**16)
    *experts, outputs, words = parts.shape("weight")
    *_, groups = parts.shape("scales")
    parts.expect("scales", (*experts, outputs, groups))
    parts.expect("biases", (*experts, outputs, groups))
    inputs = groups * size
    bits = words * 32 // max(inputs, 1)
    if len(experts) != (expert is not None) or bits not in BITS or bits * inputs != words * 32:
        raise parts.damaged(
            f"{parts.stem}.weight of shape {list(parts.shape('weight'))} has no {groups} groups of {size} numbers"
        )

    def read() -> GroupedQuant | Tensor:
        packed, scale, bias = (parts.read(end) if expert is None else parts.read(end)[expert] for end in ENDS)
        scale, bias = scale.float(), bias.float()
        if not bool(scale.isfinite().all() and bias.isfinite().all()):
            raise parts.damaged(f"the scales of {parts.stem}.weight hold infinities or NaN")
        q = _unpacked(packed.contiguous(), bits)
        if size % GROUP == 0 and (bits <= 4 or bool((bias == -MIDDLE * scale).all())):
            scale, bias = (each.repeat_interleave(size // GROUP, 1).contiguous() for each in (scale, bias))
            if bits <= 4:
                return GroupedQuant(q, scale, bias)
            if bits == 8:
                return GroupedQuant((q ^ MIDDLE).view(torch.int8), scale, None)
        groups = q.view(outputs, -1, size).float() * scale[..., None] + bias[..., None]
        return groups.flatten(1)

    fits = size % GROUP == 0 and bits <= 4
    lossy = None if fits or bits == 8 else f"MLX with {bits} bits in groups of {size}"
    return PackedMatrix(parts.names(*ENDS), (outputs, inputs), "int4" if fits else "int8", read, lossy)


def _unpacked(packed: Tensor, bits: int) -> Tensor:
    """uint32 `[N, words]` -> its numbers uint8 `[N, 32 * words / bits]`, lowest bits first."""
    raw = packed.view(torch.uint8)
    if bits == 8:
        return raw.clone()
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        return ((raw.unsqueeze(-1) >> shifts) & (2**bits - 1)).flatten(1)
    each = (raw.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8)) & 1  # numbers are across bytes
    return (each.view(len(raw), -1, bits) << torch.arange(bits, dtype=torch.uint8)).sum(-1, dtype=torch.uint8)


def packed(numbers: GroupedQuant) -> dict[str, Tensor] | None:
    """The tensors of a matrix, by the ends of their names; None for scales that float16 does not hold."""
    scale = numbers.scale.half()
    if numbers.minimum is None:
        q, bias = numbers.q.view(torch.uint8) ^ MIDDLE, scale * -MIDDLE
    else:
        q, bias = numbers.q[:, 0::2] | (numbers.q[:, 1::2] << 4), numbers.minimum.half()
    if not bool(scale.isfinite().all() and bias.isfinite().all()):
        return None
    return {"weight": q.contiguous().view(torch.uint32), "scales": scale, "biases": bias}


def section(kinds: Mapping[str, str]) -> dict[str, Any]:
    """A config's `quantization`, from "int4" or "int8" for each module that is packed."""
    count = [*kinds.values()].count
    most = "int4" if count("int4") >= count("int8") else "int8"
    bits = {"int4": 4, "int8": 8}
    others = {name: {"group_size": GROUP, "bits": bits[kind]} for name, kind in kinds.items() if kind != most}
    return {"group_size": GROUP, "bits": bits[most], "mode": "affine", **others}
