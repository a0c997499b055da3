"""Parameters of whole recurrent mixers, between their projections."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lmstate.ops.types.params import Gate, Norm


class GatedDeltaParams(NamedTuple):
    """A gated delta rule of H heads of Dv features that read Hk heads of Dk = `key_dim` features."""

    conv: Tensor  # [2 * Hk * Dk + H * Dv, C]
    A: Tensor  # [H], negative
    dt_bias: Tensor  # [H], or [H * Dk]: then the decay is one a channel, as wide as this
    norm: Norm  # of each head's Dv features
    key_heads: int
    key_dim: int
    gate_act: Gate = "silu"
    beta_scale: float = 1.0
    floor: float | None = None
    """A bound on the log decay, which is then floor * sigmoid(-A (decay + dt_bias)) (Ling 3.0)."""


class Mamba2Params(NamedTuple):
    """A Mamba-2 of H heads of P = `head_dim` features, their states N wide, in G groups.

    A, D, dt_bias, groups, dt_limits are as in `ssd`; norm, norm_groups, gate_last as in `gated_norm`. Without a norm,
    the output is y * silu(gate).
    """

    conv: Tensor  # [H * P + 2 * G * N, C]
    conv_bias: Tensor | None
    A: Tensor
    D: Tensor | None
    dt_bias: Tensor | None
    head_dim: int
    groups: int = 1
    dt_limits: tuple[float, float] = (0.0, float("inf"))
    norm: Norm | None = None
    norm_groups: int = 1
    gate_last: bool = False
