"""Hunyuan 3 (`hy_v3`, Tencent): Qwen3's attention, and experts chosen as DeepSeek-V3 does it beside a shared one.

x = embed(tokens)
x = x + attention(norm(x))                                  # queries and keys normalized head by head
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x); the first layers: an MLP
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "hy_v3": {
        **b.EPS,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "rope_theta": 11_158_840.0,
        "num_shared_experts": 1,
        "router_scaling_factor": 2.826,
        "first_k_dense_replace": 1,
    }
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, sparse = make_rope(config, shape.head_dim).to(w.device), b.sparse_layers(config, shape.layers)
    count, scale = b.expert_count(config), config.float("router_scaling_factor", default=1.0)

    def mixer(_: int, name: str) -> Attention:
        q_norm, k_norm = b.head_norms(w, name, shape)
        return b.attention(w, name, shape, rope, q_norm=q_norm, k_norm=k_norm)

    def feed_forward(index: int, name: str) -> FeedForward:
        if not sparse[index]:
            return b.mlp(w, name, shape.hidden, inner, act)
        gate = b.first_present(w, f"{name}.router.gate.weight", f"{name}.gate.weight")
        correction = b.first_present(w, f"{name}.expert_bias", f"{name}.e_score_correction_bias")
        common = b.first_present(w, f"{name}.shared_mlp.down_proj.weight", f"{name}.shared_experts.down_proj.weight")
        width = b.expert_width(config)
        return MixtureOfExperts(
            b.corrected_router(w, gate, correction, shape.hidden, scale=scale),
            b.experts(w, f"{name}.experts", count, shape.hidden, width, act),
            b.mlp(
                w, common.removesuffix(".down_proj.weight"), shape.hidden, width * config.int("num_shared_experts"), act
            ),
        )

    # A head for multi-token prediction in a layer past the last, which transformers leaves out too.
    ignore = (f"model.layers.{shape.layers}.*",)
    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, feed_forward), ignore=ignore)
