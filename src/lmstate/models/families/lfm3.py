"""LFM3 (Liquid AI): short convolutions beside windowed and full attention, whose heads are gated; norms all around.

x = embed(tokens)
x = x + norm(mixer(norm(x)))    # a gated short convolution, or gated attention
x = x + norm(mlp(norm(x)))
logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Sequence

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.families.lfm2 import short_conv
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.rope import ropes_by_kind
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {
    "lfm3": {
        "vocab_size": 128_000,
        "hidden_size": 2048,
        "intermediate_size": 7680,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "sliding_window": 256,
        "norm_eps": 1e-5,
        "tie_word_embeddings": True,
    }
}

KINDS = ("conv", "sliding_attention", "full_attention")
ROPES = {
    "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}


def build(w: WeightLoader) -> Model:
    config = w.config
    shape = b.Dims.of(config, eps="norm_eps")
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE)
    kinds, window = _kinds(config, shape.layers), config.int("sliding_window", low=1, default=None)
    settings = Config({**config, "rope_parameters": config.get("rope_parameters") or ROPES}, config.where)
    full, local = (rope.to(w.device) for rope in ropes_by_kind(settings, shape.head_dim, theta=1e6, local_theta=1e4))
    gated = config.bool("use_attention_gate", default=True)
    sandwich, normed = config.bool("use_sandwich_norm", default=True), b.rms_norms(w, shape)

    def mixer(index: int, layer: str) -> Mixer:
        if kinds[index] == "conv":
            return short_conv(w, f"{layer}.conv", shape, kernel=7)
        prefix = f"{layer}.self_attn"
        gate = b.first_present(w, f"{prefix}.g_proj.weight", f"{prefix}.gate_proj.weight").split(".")[-2]
        q_norm, k_norm = b.head_norms(w, prefix, shape)
        gates = (gate, shape.heads) if gated else None
        rope, seen = (local, window) if kinds[index] == "sliding_attention" else (full, None)
        return b.attention(w, prefix, shape, rope, window=seen, q_norm=q_norm, k_norm=k_norm, gates=gates)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, layer),
            b.mlp(w, f"{layer}.feed_forward", shape.hidden, inner, "silu", b.W1_W3_W2),
            normed(f"{layer}.operator_norm"),
            normed(f"{layer}.ffn_norm"),
            normed(f"{layer}.post_operator_norm") if sandwich else None,
            normed(f"{layer}.post_ffn_norm") if sandwich else None,
        )

    return b.decoder(w, shape, block, final_norm=normed("model.embedding_norm"))


def _kinds(config: Config, layers: int) -> Sequence[str]:
    """Each layer's kind; without a list every second one attends, but for the first, by turns far and near."""
    plan = {2: "full_attention", 0: "sliding_attention"}
    default = [plan.get(index % 4, "conv") if index else "conv" for index in range(layers)]
    return config.strs("layer_types", layers, KINDS, default=default)
