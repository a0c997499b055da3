"""Doge (SmallDoge): Llama's block with a learned share of the stream, and keys that weigh by their values.

x = embed(tokens)
x = keep * x + attention(norm(x))                   # queries and keys normalized head by head
x = keep * x + down(silu(gate(y)) * up(y))          # y = norm(x)
logits = head(norm(x))

A score gets `exp(A * softplus(dt(v)))` of its key, a number for each head of keys. It is beside the key, as a feature
that queries multiply. Past `keep_window_size` tokens transformers lets queries see the keys with the largest numbers
alone; published models were made for no longer texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import pad, softplus

from lmstate import ops
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import KeyValueState, LayerState, Step

DEFAULTS: b.Defaults = {"doge": {"max_position_embeddings": 2048, "keep_window_size": 2048}}
BESIDE = 4  # features beside those of a head: native bodies read four at a time


@dataclass(frozen=True, eq=False, kw_only=True)
class WeighedAttention(Attention):
    """Attention whose scores get a number of their key: `exp(A * softplus(weigh v + bias))`, one for each head of keys.

    `weigh [K, K * D]`; `strength` is A, float32 `[K]`.
    """

    weigh: Weight
    weigh_bias: Tensor | None
    strength: Tensor

    @property
    def stored_dim(self) -> int:
        return self.head_dim + BESIDE

    def sublayers(self, norm: Norm | None, post_norm: Norm | None, scale: float) -> tuple[ops.Sublayer, ...]:
        return ()

    def mix(self, qkv: Tensor, step: Step, cache: LayerState, residual: Residual | None = None) -> Tensor:
        """Attention after the projections, `[R, T, (H + 2 * K) * D]` -> `[R, T, E]`."""
        assert isinstance(cache, KeyValueState) and self.q_norm is not None and self.k_norm is not None
        dim, kv_width = self.head_dim, self.kv_heads * self.head_dim
        q, k, v = qkv.split([qkv.shape[-1] - 2 * kv_width, kv_width, kv_width], dim=-1)
        steps = ops.linear(v, self.weigh, self.weigh_bias)  # [R, T, K]
        weights = ops.in_double(torch.exp, self.strength * ops.in_double(softplus, steps))
        q, k, v = (part.unflatten(-1, (-1, dim)) for part in (q, k, v))  # [R, T, H or K, D]
        q, k = pad(ops.norm(q, self.q_norm), (0, BESIDE)), pad(ops.norm(k, self.k_norm), (0, BESIDE))
        q[..., dim], k[..., dim] = 1 / self.scale, weights
        seen = cache.attend(q, (k, pad(v, (0, BESIDE))), step, ops.AttentionParams(self.scale), self.rotation(step))
        return ops.linear(seen[..., :dim].flatten(-2), self.out, self.out_bias, residual=residual)


@dataclass(frozen=True, eq=False, kw_only=True)
class KeepingBlock(Block):
    """A block that keeps a learned share of the stream, float32 `[E]`, in front of each part."""

    fusable: ClassVar[bool] = False

    keeps: tuple[Tensor, Tensor]

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        assert self.mlp is not None
        x = self.mixer(x, step, cache, self.mixer_norm, Residual(x * self.keeps[0]))
        return self.mlp(x, self.mlp_norm, Residual(x * self.keeps[1]))


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    if config.bool("is_moe", default=False):
        raise ModelError(f"{config.where}: experts of Doge are not supported: their choice depends on later tokens")
    kept, made_for = config.int("keep_window_size", low=1), config.int(b.POSITIONS, low=1)
    if kept < made_for:
        raise ModelError(
            f"{config.where}: queries of Doge would see {kept} chosen keys of {made_for}, which is not supported; "
            f"set max_position_embeddings to {kept} or less"
        )
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), config.int("sliding_window", low=1, default=None)
    normed, biased = b.rms_norms(w, shape), config.bool("attention_bias", default=False)

    def mixer(name: str) -> WeighedAttention:
        q_norm, k_norm = b.head_norms(w, name, shape)
        plain = b.attention(w, name, shape, rope, window=window, q_norm=q_norm, k_norm=k_norm)
        return WeighedAttention(
            *(plain.qkv, plain.out, plain.heads, plain.kv_heads, plain.head_dim, plain.scale, rope, window),
            q_norm=q_norm,
            k_norm=k_norm,
            qkv_bias=plain.qkv_bias,
            out_bias=plain.out_bias,
            weigh=b.router_weight(w, f"{name}.dt_proj.weight", shape.kv_heads, shape.kv_heads * shape.head_dim),
            weigh_bias=b.biases(w, f"{name}.dt_proj.bias", wanted=biased),
            strength=w.tensor(f"{name}.A", (shape.kv_heads,)),
        )

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        input_keep, fed_keep = (
            w.tensor(f"{layer}.{part}_residual", (shape.hidden,)) for part in ("input", "post_attention")
        )
        return KeepingBlock(
            mixer(f"{layer}.self_attn"),
            b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            keeps=(input_keep, fed_keep),
        )

    return b.decoder(w, shape, block)
