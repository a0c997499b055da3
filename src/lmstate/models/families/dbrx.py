"""DBRX (Databricks, 2024): attention that clips its projections, and experts whose matrices are in one.

x = embed(tokens)
x = x + attention(norm(x))                      # layer norms; queries, keys and values clipped
x = x + sum over chosen e: g_e * expert_e(y)    # y = norm(x)
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

import torch

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import Numbers, WeightLoader
from lmstate.checkpoints.source import floats
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {}

NAMES = ("norm_attn_norm.norm_1", "norm_attn_norm.attn", "norm_attn_norm.norm_2", "ffn")
USUAL = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}


def build(w: WeightLoader) -> Model:
    attends, feeds = (w.config.fields(f"{part}_config") or Config({}) for part in ("attn", "ffn"))
    values = {USUAL.get(name, name): value for name, value in w.config.items()}
    values["num_key_value_heads"] = attends.int("kv_n_heads", low=1, high=b.MAX_SIZE, default=1)
    w.config = Config(values, w.config.where)
    shape = replace(b.Dims.of(w.config), eps=1e-5)
    theta = attends.float("rope_theta", low=1.0, high=1e12, default=10_000.0)
    rope = make_rope(w.config, shape.head_dim, theta=theta).to(w.device)
    clip = attends.float("clip_qkv", low=0.0, default=None)

    def mixer(_: int, prefix: str) -> Attention:
        return replace(b.fused_attention(w, shape, rope, f"{prefix}.Wqkv", f"{prefix}.out_proj"), clip=clip)

    normed = b.layer_norms(w, shape, biased=False)
    block = b.pre_norm(
        normed, mixer, lambda _, name: mixture(w, name, shape, feeds), NAMES, layers="transformer.blocks"
    )
    return b.decoder(w, shape, block, embed="transformer.wte", final_norm=normed("transformer.norm_f"))


def mixture(w: WeightLoader, prefix: str, shape: b.Dims, config: Config) -> MixtureOfExperts:
    count = config.int("moe_num_experts", low=1, high=b.MAX_SIZE, default=4)
    inner = config.int("ffn_hidden_size", low=1, high=b.MAX_SIZE, default=3584)
    named = config.fields("ffn_act_fn") or Config({})
    act = b.ACTIVATIONS[named.str("name", allowed=tuple(b.ACTIVATIONS), default="silu")]
    # Weights are brought to a norm of 1: of the sum, or of none at all.
    power = config.float("moe_normalize_expert_weights", low=1.0, high=1.0, default=None)
    router = Router(
        b.router_weight(w, f"{prefix}.router.layer.weight", count, shape.hidden),
        config.int("moe_top_k", low=1, high=count, default=1),
        normalize=power is not None,
    )
    if w.has(f"{prefix}.experts.0.gate_proj.weight"):  # as GGUF has them
        return MixtureOfExperts(router, b.experts(w, f"{prefix}.experts", count, shape.hidden, inner, act))
    inside = f"{prefix}.experts.mlp"
    for name in ("w1", "v1", "w2"):
        w.expect(f"{inside}.{name}", (count * inner, shape.hidden))

    def expert(index: int) -> FeedForward:
        rows = slice(index * inner, (index + 1) * inner)

        def gate_up(gate: Numbers, up: Numbers) -> Numbers:
            return torch.cat([floats(gate)[rows], floats(up)[rows]])

        return MLP(
            w.derived(
                f"{inside}[{index}]", f"{inside}.w1", f"{inside}.v1", make=gate_up, shape=(2 * inner, shape.hidden)
            ),
            w.derived(
                f"{inside}.w2[{index}]", f"{inside}.w2", make=lambda down: floats(down)[rows].T,
                shape=(shape.hidden, inner),
            ),
            act,
        )  # fmt: skip

    return MixtureOfExperts(router, [expert(index) for index in range(count)])
