"""Norms under their usual Hugging Face names."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal, TypeAlias

import torch

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.dims import Dims
from lmstate.models.layers.rope import Rope
from lmstate.ops import Norm

NormBuilder: TypeAlias = Callable[[str], Norm]
"""The norm of that name, without its `.weight`."""


def norm(w: WeightLoader, name: str, width: int, eps: float, *, plus_one: bool = False) -> Norm:
    """An RMS norm's weight; `plus_one` where the checkpoint stores w - 1."""
    weight = w.tensor(name, (width,))
    return Norm(weight + 1.0 if plus_one else weight, eps)


def rms_norms(w: WeightLoader, shape: Dims, *, plus_one: bool = False) -> NormBuilder:
    """RMS norms of the residual stream."""
    return lambda name: norm(w, f"{name}.weight", shape.hidden, shape.eps, plus_one=plus_one)


def layer_norms(w: WeightLoader, shape: Dims, *, biased: bool = True, plus_one: bool = False) -> NormBuilder:
    """Layer norms of the residual stream."""

    def layer_norm(name: str) -> Norm:
        weight = w.tensor(f"{name}.weight", (shape.hidden,))
        bias = w.tensor(f"{name}.bias", (shape.hidden,)) if biased else None
        return Norm(weight + 1.0 if plus_one else weight, shape.eps, "layer", bias)

    return layer_norm


def plain_norm(w: WeightLoader, width: int, eps: float, kind: Literal["rms", "layer"] = "rms") -> Norm:
    """A norm without weights."""
    return Norm(torch.ones(width, dtype=torch.float32, device=w.device), eps, kind)


def norm_after_rope(w: WeightLoader, shape: Dims, rope: Rope) -> tuple[Norm, Rope]:
    """A norm of each head without weights that comes after its rotation: one that may come before, and that rotation.

    A rotation keeps lengths. A factor on all features the norm would take away again, but for its share in epsilon.
    """
    return plain_norm(w, shape.head_dim, shape.eps / rope.scale**2), replace(rope, scale=1.0)


def head_norms(
    w: WeightLoader, prefix: str, shape: Dims, names: tuple[str, str] = ("q_norm", "k_norm")
) -> tuple[Norm, Norm]:
    """The norms of each head's queries and keys; `names`: theirs under `prefix`."""
    q_norm, k_norm = (norm(w, f"{prefix}.{name}.weight", shape.head_dim, shape.eps) for name in names)
    return q_norm, k_norm


def whole_norms(w: WeightLoader, prefix: str, shape: Dims) -> tuple[Norm, Norm]:
    """The norms of the whole query projection and the whole key projection."""
    q_norm, k_norm = (
        norm(w, f"{prefix}.{part}_norm.weight", heads * shape.head_dim, shape.eps)
        for part, heads in (("q", shape.heads), ("k", shape.kv_heads))
    )
    return q_norm, k_norm
