"""What the families of the gated delta rule share."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.errors import ModelError
from lmstate.models.families.state_space import only_silu
from lmstate.models.weights.weights import Weights


def short_conv(w: Weights, prefix: str, width: int, kernel: int) -> Tensor:
    """The convolutions of q, k and v in one, `[F, C]`: stored so (`conv1d`), or in three parts (`q_conv1d`, ...)."""
    only_silu(w.config)  # follows them
    if w.has(f"{prefix}.conv1d.weight"):
        return w.tensor(f"{prefix}.conv1d.weight", (width, 1, kernel))[:, 0]
    # Some files are cut in three equal parts and not between q, k and v, so only their sum is known.
    parts = [w.tensor(f"{prefix}.{part}_conv1d.weight") for part in "qkv"]
    if any(part.shape[1:] != (1, kernel) for part in parts) or sum(map(len, parts)) != width:
        shapes = [list(part.shape) for part in parts]
        raise ModelError(
            f"{w.source.path}: the convolutions in {prefix} are {shapes}; together they must be [{width}, 1, {kernel}]"
        )
    return torch.cat(parts)[:, 0]


def check_shared(w: Weights, heads: int, key_heads: int) -> None:
    """`ModelError` unless every key head serves as many value heads as the others."""
    if heads % key_heads:
        raise ModelError(f"{w.source.path}: {heads} value heads cannot share {key_heads} key heads evenly")
