"""Layers of the gated delta rule under their usual Hugging Face names."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families.builders.dims import Dims, first_present
from lmstate.models.families.builders.mamba import only_silu
from lmstate.models.families.builders.norms import norm
from lmstate.models.layers.gated_delta_net import GatedDelta, LowRankProjection
from lmstate.ops.weights.grouped import FloatWeight


def short_conv(w: WeightLoader, prefix: str, width: int, kernel: int) -> Tensor:
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


def channel_delta(
    w: WeightLoader, prefix: str, shape: Dims, heads: int, dim: int, kernel: int, *, floor: float | None = None
) -> GatedDelta:
    """Kimi Delta Attention, a decay a channel: H heads of D features each.

    Decay and output gate are projections of the stream (`f_proj`, `g_proj`), or each goes through a bottleneck of D
    features (`f_a_proj`, `f_b_proj`, ...). `floor`: of the log decay.
    """
    width, hidden = heads * dim, shape.hidden
    decay = first_present(w, f"{prefix}.A_log", f"{prefix}.forget_gate.A_log").removesuffix("A_log")
    straight = w.has(f"{decay}f_proj.weight")
    beside = [f"{prefix}.g_proj.weight"] if straight else [f"{decay}f_a_proj.weight", f"{prefix}.g_a_proj.weight"]
    gates = w.tensor(f"{prefix}.b_proj.weight", (heads, hidden))
    decay_up = gate_up = None
    if straight:
        gates = torch.cat([gates, w.tensor(f"{decay}f_proj.weight", (width, hidden))])
    else:
        decay_up = LowRankProjection(FloatWeight(w.tensor(f"{decay}f_b_proj.weight", (width, dim))))
        gate_up = LowRankProjection(
            w.linear(f"{prefix}.g_b_proj.weight", shape=(width, dim)),
            w.tensor(f"{prefix}.g_b_proj.bias", (width,), optional=True),
        )
    return GatedDelta(
        w.linear(
            *(f"{prefix}.{part}_proj.weight" for part in "qkv"), *beside,
            shape=((width,) * 4 if straight else (width, width, width, dim, dim), hidden),
        ),
        FloatWeight(gates),
        w.linear(f"{prefix}.o_proj.weight", shape=(hidden, width)),
        short_conv(w, prefix, 3 * width, kernel),
        -_of_heads(w, f"{decay}A_log", heads).exp(),
        w.tensor(f"{decay}dt_bias", (width,)),
        norm(w, f"{prefix}.o_norm.weight", dim, shape.eps),
        heads,
        dim,
        dim,
        gate_act="sigmoid",
        floor=floor,
        decay_up=decay_up,
        gate_up=gate_up,
    )  # fmt: skip


def _of_heads(w: WeightLoader, name: str, heads: int) -> Tensor:
    """A number a head `[H]`, which some files keep as `[1, 1, H, 1]`."""
    numbers = w.tensor(name)
    if numbers.numel() != heads:
        w.expect(name, (heads,))
    return numbers.reshape(heads)


def check_shared(w: WeightLoader, heads: int, key_heads: int) -> None:
    """`ModelError` unless every key head serves as many value heads as the others."""
    if heads % key_heads:
        raise ModelError(f"{w.source.path}: {heads} value heads cannot share {key_heads} key heads evenly")
