"""Granite 3 and 4: attention, and from 4 on Mamba-2, with a feed-forward part that is plain, experts, or both.

x = m_e * embed(tokens)
x = x + m * mixer(norm(x))    # attention, or Mamba-2
x = x + m * feed_forward(norm(x))
logits = head(norm(x)) / m_l
"""

from __future__ import annotations

from collections.abc import Callable

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {
    "granite4_vision_text": b.LLAMA,
    "granite_docling_text": {
        **b.EPS,
        "vocab_size": 133_800,
        "hidden_size": 1024,
        "intermediate_size": 2048,
        "num_hidden_layers": 28,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "tie_word_embeddings": True,
        "embedding_multiplier": 12.0,
        "logits_scaling": 4.0,
        "residual_multiplier": 0.263,
        "attention_multiplier": 0.015625,
    },
}


def build(w: WeightLoader) -> Model:
    """Every part's output is scaled before it is added; so are the embedding, the scores and the logits.

    Only hybrids may go without rotary positions.
    """
    config, shape = w.config, b.Dims.of(w.config)
    hybrid = config.str("model_type") == "granitemoehybrid"
    kinds = b.layer_kinds(config, ("layer_types", "layers_block_type"), shape.layers) if hybrid else None
    kinds = kinds or ("mamba" if hybrid else "attention",) * shape.layers
    sizes = b.Mamba2Shape.of(config, shape) if "mamba" in kinds else None
    rotary = not hybrid or config.get("position_embedding_type") == "rope"
    rope = make_rope(config, shape.head_dim).to(w.device) if rotary else None
    scale = config.float("attention_multiplier", default=1.0)

    def mixer(index: int, layer: str) -> Mixer:
        if kinds[index] == "attention" or sizes is None:
            return b.attention(w, f"{layer}.self_attn", shape, rope, scale=scale)
        gated = b.gated_norm(w, f"{layer}.mamba.norm.weight", sizes)
        return b.mamba2(w, f"{layer}.mamba", sizes, shape.hidden, norm=gated)

    normed = b.rms_norms(w, shape)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, layer),
            feed_forward(w, layer, shape),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            scale=config.float("residual_multiplier", default=1.0),
        )

    return granite(w, shape, block)


def granite(w: WeightLoader, shape: b.Dims, block: Callable[[int], Block]) -> Model:
    """The blocks between an embedding and logits that are scaled."""
    config = w.config
    logits_scaling = config.float("logits_scaling", default=1.0)
    if logits_scaling == 0.0:
        raise ModelError(f"{config.where} has logits_scaling = 0, by which logits would be divided")
    return b.decoder(
        w, shape, block, embed_scale=config.float("embedding_multiplier", default=1.0), logit_scale=1 / logits_scaling
    )


def feed_forward(w: WeightLoader, layer: str, shape: b.Dims) -> FeedForward:
    """Experts, a part that every token goes through, or both; one of the older kind if the config has neither."""
    config, act = w.config, b.activation(w.config)
    count = config.int("num_local_experts", high=b.MAX_SIZE, default=0)
    shared = config.int("shared_intermediate_size", high=b.MAX_SIZE, default=0)
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE)
    if not count and not shared:
        return b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act)
    common = shared_mlp(w, f"{layer}.shared_mlp", shape.hidden, shared, act) if shared else None
    if not count and common is not None:
        return common
    moe = f"{layer}.block_sparse_moe"
    router = b.first_present(w, f"{moe}.router.layer.weight", f"{moe}.router.weight")
    each = granite_experts(w, moe, count, shape.hidden, inner, act)
    return MixtureOfExperts(
        Router(b.router_weight(w, router, count, shape.hidden), b.top_k(config, count), normalize=True), each, common
    )


def shared_mlp(w: WeightLoader, prefix: str, hidden: int, inner: int, act: str) -> MLP:
    """A gated feed-forward part with gate and up in one matrix; GGUF has them apart."""
    if w.has(f"{prefix}.gate_proj.weight"):
        return b.mlp(w, prefix, hidden, inner, act)
    return MLP(
        w.linear(f"{prefix}.input_linear.weight", shape=(2 * inner, hidden)),
        w.linear(f"{prefix}.output_linear.weight", shape=(hidden, inner)),
        act,
    )


def granite_experts(w: WeightLoader, prefix: str, count: int, hidden: int, inner: int, act: str) -> list[MLP]:
    """Experts in one tensor each for their ways in and out, under two names; GGUF has them one by one."""
    if not w.has(f"{prefix}.input_linear.weight"):
        return b.experts(w, f"{prefix}.experts", count, hidden, inner, act)
    return [
        MLP(
            w.stacked(f"{prefix}.input_linear.weight", index, shape=(count, 2 * inner, hidden)),
            w.stacked(f"{prefix}.output_linear.weight", index, shape=(count, hidden, inner)),
            act,
        )
        for index in range(count)
    ]
