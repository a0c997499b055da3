"""Kolibri 1 (Aleph Alpha): norms around each part, windows, and experts that are chosen by corrected logits.

x = embed(tokens)
x = x + norm(attention(norm(x)))    # queries and keys normalized head by head
x = x + norm(experts(norm(x)))      # beside shared ones
logits = head(norm(x))

Layers without a window know no positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Weight

DEFAULTS: b.Defaults = {"kolibri1": {"head_dim": 128, "sliding_window": 513, "shared_expert_intermediate_size": 512}}


@dataclass(frozen=True, eq=False)
class CorrectedLogits:
    """The experts of the highest logits with `bias` added; the sigmoids of their own logits weigh them."""

    weight: Weight  # [N, E]
    bias: Tensor  # float32 [N]
    top_k: int
    normalize: bool

    @property
    def per_token(self) -> int:
        return self.top_k

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x float32 `[M, E]` -> (weights float32 `[M, top_k]`, expert numbers int64 `[M, top_k]`)."""
        logits = ops.linear(x, self.weight)
        chosen = (logits + self.bias).topk(self.top_k, dim=-1).indices
        scores = torch.sigmoid(logits.gather(-1, chosen).double())  # as in `Router`: the same wherever a token stands
        if self.normalize:
            scores = scores / scores.sum(-1, keepdim=True)
        return scores.float(), chosen


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    rope, act = make_rope(config, shape.head_dim).to(w.device), b.activation(config)
    window = b.layer_windows(config, shape.layers, full_every=5, switch=False)
    count, width = b.expert_count(config), b.expert_width(config)
    common = config.int("shared_expert_intermediate_size", low=1, high=b.MAX_SIZE)
    normed = b.rms_norms(w, shape)

    def mixture(layer: str) -> MixtureOfExperts:
        name = f"{layer}.mlp"
        bias = b.first_present(w, f"{layer}.moe.router.expert_bias", f"{name}.gate.e_score_correction_bias")
        router = CorrectedLogits(
            b.router_weight(w, f"{name}.gate.weight", count, shape.hidden),
            w.tensor(bias, (count,)),
            b.top_k(config, count),
            config.bool("norm_topk_prob", default=False),
        )
        shared = b.mlp(w, f"{name}.shared_experts", shape.hidden, common, act)
        return MixtureOfExperts(router, b.experts(w, f"{name}.experts", count, shape.hidden, width, act), shared)

    def block(index: int) -> Block:
        layer, size = f"model.layers.{index}", window[index]
        q_norm, k_norm = b.head_norms(w, f"{layer}.self_attn", shape)
        after, last = (
            b.first_present(w, f"{layer}.{name}.weight", f"{layer}.{other}.weight").removesuffix(".weight")
            for name, other in (("post_attn_norm", "post_self_attn_layernorm"), ("post_ffn_norm", "post_mlp_layernorm"))
        )
        return Block(
            b.attention(
                w, f"{layer}.self_attn", shape, None if size is None else rope, window=size, q_norm=q_norm,
                k_norm=k_norm,
            ),
            mixture(layer),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            normed(after),
            normed(last),
        )  # fmt: skip

    return b.decoder(w, shape, block)
