"""GLM-4.5 (2508.06471) and Solar Open: attention that rotates half of each head, and DeepSeek-V3's experts.

x = embed(tokens)
x = x + attention(norm(x))
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x); the first layers: an MLP
logits = head(norm(x))

Sarvam's mixture rotates whole heads, and its checkpoints have names of their own.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial

from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.renamed import Renamed
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.rope import make_rope, position_axes
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "glm4_moe": {**b.EPS, "partial_rotary_factor": 0.5, "first_k_dense_replace": 1, "n_shared_experts": 1},
    "glm4v_moe_text": {
        **b.EPS,
        "vocab_size": 151_424,
        "hidden_size": 4096,
        "intermediate_size": 10_944,
        "num_hidden_layers": 46,
        "num_attention_heads": 96,
        "num_key_value_heads": 8,
        "attention_bias": True,
        "partial_rotary_factor": 0.5,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
    },
    "sarvam_moe": {
        "rms_norm_eps": 1e-6,
        "head_dim": 64,
        "num_key_value_heads": 4,
        "rope_theta": 8e6,
        "use_qk_norm": True,
        "first_k_dense_replace": 1,
        "n_shared_experts": 1,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "routed_scaling_factor": 2.5,
        "moe_intermediate_size": 1024,
    },
    "solar_open": {**b.EPS, "head_dim": 128, "n_shared_experts": 1, "rope_theta": 1e6},
}


SARVAM = (  # what its names have: what those of GLM have
    (r"^model\.word_embeddings\.", "model.embed_tokens."),
    (r"\.attention\.", ".self_attn."),
    (r"\.dense\.", ".o_proj."),
    (r"\.query_layernorm\.", ".q_norm."),
    (r"\.key_layernorm\.", ".k_norm."),
    (r"\.expert_bias$", ".e_score_correction_bias"),
)


def build(w: WeightLoader) -> Model:
    if w.config.str("model_type") == "sarvam_moe":
        pairs = [(_plain(name), name) for name in w.source.names()]
        w, completed = w.over(Renamed(w.source, pairs, w.source.config)), w.config
        w.config = completed
    config, shape = w.config, b.Dims.of(w.config)
    rope = make_rope(config, shape.head_dim).to(w.device)
    if config.str("model_type") == "glm4v_moe_text":
        rope = replace(rope, axes=position_axes(config, len(rope.frequencies), (8, 12, 12)))
    normed = config.bool("use_qk_norm", default=False)

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = b.head_norms(w, prefix, shape) if normed else (None, None)
        fused = f"{prefix}.query_key_value"
        if w.has(f"{fused}.weight"):
            return replace(b.fused_attention(w, shape, rope, fused, f"{prefix}.o_proj"), q_norm=q_norm, k_norm=k_norm)
        return b.attention(w, prefix, shape, rope, q_norm=q_norm, k_norm=k_norm, out_biased=False)

    norms = b.rms_norms(w, shape)
    block = b.pre_norm(norms, mixer, b.deepseek_feed_forward(w, shape))
    names = b.layers_past_the_last(w, shape.layers)
    heads = b.prediction_heads(w, shape, norms, names, partial(block, shape.layers))
    return b.decoder(w, shape, block, heads=heads, ignore=b.mtp_tensors(config, shape))


def _plain(name: str) -> str:
    for there, here in SARVAM:
        name = re.sub(there, here, name)
    return name
