"""Hunyuan (Tencent, 2025), dense or sparse: Llama's block, with queries and keys normalized after they rotate.

x = embed(tokens)
x = x + attention(norm(x))    # queries and keys rotated, then normalized
x = x + mlp(norm(x))          # or experts beside a shared one
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import Rope, make_rope, rope_fields
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "hunyuan_v1_dense": b.EPS,
    "hunyuan_v1_moe": b.EPS,
    "hunyuan_vl_text": {**b.LLAMA, **b.EPS, "vocab_size": 290_943, "tie_word_embeddings": True},
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope = stretched(config, shape.head_dim).to(w.device)
    # The weights of both norms multiply the queries, so that the keys that are stored are rotations and nothing else.
    plain, rope = b.norm_after_rope(w, shape, rope)
    if isinstance(config.get("moe_topk"), list):  # published configs say it of each layer
        chosen = config.ints("moe_topk", shape.layers, low=1, high=b.MAX_SIZE)
    else:
        chosen = (config.int("moe_topk", low=1, high=b.MAX_SIZE, default=1),) * shape.layers

    def mixer(_: int, name: str) -> Attention:
        of_q, of_k = (w.tensor(f"{name}.{part}_layernorm.weight", (shape.head_dim,)) for part in ("query", "key"))
        return replace(b.attention(w, name, shape, rope, q_norm=plain, k_norm=plain), turned_weight=of_q * of_k)

    def feed_forward(index: int, name: str) -> FeedForward:
        if config.str("model_type") != "hunyuan_v1_moe":
            return b.mlp(w, name, shape.hidden, inner, act)
        return mixture(w, name, shape, inner, chosen[index])

    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, feed_forward))


def mixture(w: WeightLoader, prefix: str, shape: b.Dims, inner: int, chosen: int) -> MixtureOfExperts:
    """Experts beside one that every token goes through, all of one width; a token goes to `chosen` of them."""
    count, act = b.expert_count(w.config), b.activation(w.config)
    return MixtureOfExperts(
        Router(b.router_weight(w, f"{prefix}.gate.wg.weight", count, shape.hidden), chosen, normalize=True),
        b.experts(w, f"{prefix}.experts", count, shape.hidden, inner, act),
        b.mlp(w, f"{prefix}.shared_mlp", shape.hidden, inner, act),
    )


def stretched(config: Config, head_dim: int) -> Rope:
    """The rope; one that is called dynamic and has an alpha is slower at any length (NTK-aware scaling)."""
    rope = rope_fields(config)
    alpha = (
        rope.float("alpha", low=0.0, high=1e9, default=0.0) if rope.str("rope_type") in ("dynamic", "xdrope") else 0.0
    )
    if not alpha:
        return make_rope(config, head_dim)
    if head_dim < 4:
        raise ModelError(f"{rope.where}: a rope of {head_dim} features has nothing to stretch")
    theta = rope.float("rope_theta", low=1.0, high=1e12, default=10_000.0) * alpha ** (head_dim / (head_dim - 2))
    return make_rope(Config({"rope_theta": theta}, rope.where), head_dim)
