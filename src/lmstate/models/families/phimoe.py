"""Phi-3.5-MoE (2404.14219): layer norms, biases, and two experts a token, each weighed against its near rivals.

x = embed(tokens)
x = x + attention(norm(x))
x = x + g_1 * expert_1(y) + g_2 * expert_2(y)    # y = norm(x)
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.layers.rope import Rope, make_rope, rope_fields
from lmstate.models.model import Model
from lmstate.ops import Weight

DEFAULTS: b.Defaults = {"phimoe": b.EPS}


@dataclass(frozen=True, eq=False)
class SparseMixer:
    """The two experts of the highest scores, one after the other (SparseMixer, 2310.00811).

    Each one's weight is its share in a softmax over those not yet chosen whose scores are near to its own: a distance
    of up to `2 * near` of the greater of its score and the other's size.
    """

    weight: Weight  # [N, E]
    near: float

    @property
    def per_token(self) -> int:
        return 2

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x float32 `[M, E]` -> (weights float32 `[M, 2]`, expert numbers int64 `[M, 2]`)."""
        logits = ops.linear(x, self.weight).double()  # as in `Router`: the same wherever a token stands
        first, best = self._best(logits, logits)
        second, next_best = self._best(logits.scatter(-1, best, float("-inf")), logits)
        return torch.cat([first, second], dim=-1).float(), torch.cat([best, next_best], dim=-1)

    def _best(self, left: Tensor, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The weight and the number of the best of those that are `left`, `[M, 1]` each; the chosen are -inf there."""
        top, best = left.max(dim=-1, keepdim=True)
        far = (top - logits) / logits.abs().maximum(top) > 2 * self.near
        return left.masked_fill(far, float("-inf")).softmax(-1).gather(-1, best), best


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act, count = (
        config.int("intermediate_size", low=1, high=b.MAX_SIZE),
        b.activation(config),
        b.expert_count(config),
    )
    if config.int("num_experts_per_tok", low=1, default=2) != 2 or count < 2:
        raise ModelError(f"{config.where} asks for another choice than of two experts, which is all its router does")
    rope, window = _rope(config, shape.head_dim).to(w.device), b.config_window(config, switch=False)
    near = config.float("router_jitter_noise", low=0.0, default=0.01)
    normed = b.layer_norms(w, shape)

    def mixer(index: int, prefix: str) -> Mixer:
        return b.attention(w, prefix, shape, rope, window=window)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        gate = b.first_present(w, f"{prefix}.router.weight", f"model.layers.{index}.block_sparse_moe.gate.weight")
        inside = gate.removesuffix(".router.weight").removesuffix(".gate.weight")
        each = b.experts(w, f"{inside}.experts", count, shape.hidden, inner, act)
        return MixtureOfExperts(SparseMixer(b.router_weight(w, gate, count, shape.hidden), near), each)

    biased = config.bool("lm_head_bias", default=False)
    block = b.pre_norm(normed, mixer, feed_forward)
    return b.decoder(w, shape, block, head_biased=biased, final_norm=normed("model.norm"))


def _rope(config: Config, head_dim: int) -> Rope:
    """Longrope with one factor on cosines and sines for short texts and another for long ones."""
    rope, fields = make_rope(config, head_dim, theta=1e6), rope_fields(config)
    if fields.str("rope_type") == "default":
        return rope
    if rope.long_frequencies is None or rope.continuous:
        raise ModelError(f"{fields.where} asks for {fields.str('rope_type')!r}, and this family has longrope or none")
    short, long = (fields.float(f"{part}_mscale", low=1e-6, high=1e6) for part in ("short", "long"))
    return replace(rope, scale=short, long_scale=long)
