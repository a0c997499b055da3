"""Grouped-query attention over the keys and values of its own layer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
from torch import Tensor
from torch.nn.functional import softplus

from lmstate import ops
from lmstate.models.layers.adaption import AdaptionPrompt
from lmstate.models.layers.base import FusableLayer
from lmstate.models.layers.opening import LearnedKeys
from lmstate.models.layers.rope import Rope
from lmstate.models.layers.whole_pictures import with_whole_pictures
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import KeyValueState, LayerState, Layout, Step, attention_state

GateAct: TypeAlias = Literal["sigmoid", "softplus"]


@dataclass(frozen=True)
class Temperature:
    """Queries grow by `1 + strength * log(1 + n)` past n times `every` tokens, so that long texts do not flatten what
    they see (2501.19399). `first`: the number of the first token."""

    every: int
    strength: float
    first: int = 1

    def at(self, step: Step) -> Tensor:
        """The factors of a step's queries, float32 `[R, T, 1, 1]`."""
        return step.cached(self, lambda: self._factors(step.positions)[..., None, None])

    def _factors(self, positions: Tensor) -> Tensor:
        return 1.0 + self.strength * torch.log1p(((positions + self.first) // self.every).float())


@dataclass(frozen=True, eq=False)
class Attention(FusableLayer):
    """Attention of H query heads over K key/value heads (Vaswani et al. 2017; Ainslie et al. 2023).

    `qkv [H * D + 2 * K * D, E]` are the three projections in one matrix. `q_norm` and `k_norm` normalize each head, or
    the whole projection if they are as wide as it is; `v_norm` each head of the values. `rope` None: the layer knows no
    positions. `gate`: each query head's rows are followed by as many of a gate, whose sigmoid multiplies what the head
    has seen (Qwen3-Next). `gates`: that many last rows of `qkv` give a gate of one number a head (LFM3), or of as many
    as it has features; `gate_act` opens it. `reads`: the number of an earlier layer whose keys and values it attends
    to, and `qkv` are queries alone.

    `clip`: clamps q, k and v to +-clip. `turned_weight` float32 `[D]` or `[H, D]` multiplies queries after they are
    rotated: where a norm comes after the rotation, that part is left of it there. `out_norm`: of the heads together,
    before `out`. `slopes` float32 `[H]`, `biases` float32 `[H, M]`: see `ops.AttentionParams`.
    `whole_pictures`: each token of a picture sees all of it, see `with_whole_pictures`; with `beyond_window` also what
    of it is farther back than a window. `learned`: keys and values of the first positions, in place of the projected
    ones. `prompt`: learned tokens that queries also attend to.
    """

    qkv: Weight
    out: Weight
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None = None
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    sinks: Tensor | None = None
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate: bool = False
    gates: int = 0
    gate_act: GateAct = "sigmoid"
    temperature: Temperature | None = None
    v_norm: Norm | None = None
    reads: int | None = None
    clip: float | None = None
    turned_weight: Tensor | None = None
    out_norm: Norm | None = None
    slopes: Tensor | None = None
    biases: Tensor | None = None
    whole_pictures: bool = False
    beyond_window: bool = False
    learned: LearnedKeys | None = None
    prompt: AdaptionPrompt | None = None

    @property
    def kind(self) -> str:
        if self.reads is not None:
            return "shared"
        return "attention" if self.window is None and self.chunk is None else "window"

    @property
    def stored_dim(self) -> int:
        """Features of a key, and of a value, as they are stored."""
        return self.head_dim

    def new_state(self, layout: Layout) -> LayerState:
        return attention_state(
            layout, self.kv_heads, self.stored_dim, mask=ops.CausalMask(self.window, self.chunk),
            rotate_by=self.rope.rotate_by if self.rope is not None else None, heads=self.heads, scale=self.scale,
        )  # fmt: skip

    def sublayers(self, norm: Norm | None, post_norm: Norm | None, scale: float) -> tuple[ops.Sublayer, ...]:
        parts = self.temperature, self.clip, self.turned_weight, self.out_norm, self.slopes, self.biases
        unknown = any(part is not None for part in (*parts, self.learned, self.prompt))
        if unknown or self.gates not in (0, self.heads) or self.gate_act != "sigmoid":
            return ()
        sublayer = ops.AttentionSublayer(
            self.qkv, self.out, self.heads, self.kv_heads, self.head_dim,
            ops.AttentionParams(self.scale, self.softcap, self.sinks), self.q_norm, self.k_norm, self.v_norm,
            self.qkv_bias, self.out_bias, self.gate, self.gates, self.reads is not None,
            norm=norm, post_norm=post_norm, scale=scale,
        )  # fmt: skip
        return (sublayer,)

    def fuses(self, step: Step) -> bool:
        """Not where a token also sees what comes after it in its picture."""
        return not (self.whole_pictures and step.media and step.pictures)

    def rope_tables(self, step: Step) -> ops.RopeTables | None:
        return None if self.rope is None else self.rope.fused_rotation(step)

    def rotation(self, step: Step) -> ops.RopeTables | None:
        """The rotation of a step's queries and keys, a table for each of its positions."""
        return None if self.rope is None else self.rope.rotation(step)

    def forward(self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        return self.mix(ops.linear(x, self.qkv, self.qkv_bias, norm=norm), step, cache, residual)

    def mix(self, qkv: Tensor, step: Step, cache: LayerState, residual: Residual | None = None) -> Tensor:
        """Attention after the projections, from the output of `qkv` -> `[R, T, E]`."""
        assert isinstance(cache, KeyValueState)
        qkv, behind = qkv.tensor_split([qkv.shape[-1] - self.gates], dim=-1)
        kv_width = 0 if self.reads is not None else self.kv_heads * self.head_dim
        qkv = qkv if self.clip is None else qkv.clamp(-self.clip, self.clip)
        q, k, v = qkv.split([qkv.shape[-1] - 2 * kv_width, kv_width, kv_width], dim=-1)
        gate = None
        if self.gate:
            q, gate = (part.flatten(-2) for part in q.unflatten(-1, (self.heads, -1)).chunk(2, dim=-1))  # [R, T, H * D]
        q = _normed(q, self.q_norm, self.head_dim)
        new = None
        if self.reads is None:
            new = _normed(k, self.k_norm, self.head_dim), _normed(v, self.v_norm, self.head_dim)  # [R, T, K, D] each
        if self.temperature is not None:
            q = q * self.temperature.at(step)  # a number a token, which no rotation touches
        rotation = self.rotation(step)
        if self.turned_weight is not None and rotation is not None:
            q = ops.rope(q, *rotation) * self.turned_weight
            new = None if new is None else (ops.rope(new[0], *rotation), new[1])
            rotation = None
        if self.learned is not None and new is not None:
            q, new = self.learned.applied(q, new, rotation, step)
            rotation = None
        params = ops.AttentionParams(self.scale, self.softcap, self.sinks, self.slopes, self.biases)
        seen = cache.attend(q, new, step, params, rotation)
        if not self.fuses(step):
            seen = with_whole_pictures(
                seen, q, rotation, step, cache, params, self.kv_heads, self.window, self.beyond_window
            )
        if self.prompt is not None and not self.prompt.behind:
            seen = seen + self.prompt.attend(q, rotation, step, self.scale)
        if self.gates:
            seen = gated(seen, behind, self.gate_act)
        mixed = seen.flatten(-2) if gate is None else ops.gated(seen.flatten(-2), gate)
        out = ops.linear(mixed, self.out, self.out_bias, norm=self.out_norm, residual=residual)
        if self.prompt is None or not self.prompt.behind:
            return out
        return out + self.prompt.attend(q, rotation, step, self.scale).flatten(-2)


def gated(seen: Tensor, gate: Tensor, act: GateAct = "sigmoid") -> Tensor:
    """Outputs of heads `[R, T, H, D]` times their gates, a head's `[R, T, H]` or a feature's `[R, T, H * D]`."""
    if act == "sigmoid":
        each = gate.unflatten(-1, (seen.shape[-2], -1)).expand_as(seen)
        return ops.gated(seen.flatten(-2), each.flatten(-2)).view_as(seen)
    opened = softplus(gate.double()).float()  # in float64 and back, as `ops.sigmoid` is
    return seen * opened.unflatten(-1, (seen.shape[-2], -1))


def _normed(x: Tensor, norm: Norm | None, head_dim: int) -> Tensor:
    """Heads `[R, T, heads, D]` of `[R, T, heads * D]`, normalized each, or whole before they are parted."""
    if norm is not None and norm.weight.shape[-1] != head_dim:
        x = ops.norm(x, norm)
        norm = None
    heads = x.unflatten(-1, (-1, head_dim))
    return heads if norm is None else ops.norm(heads, norm)
