"""dots.3 Note: latent attention to chosen positions in some layers and to a window in the others, and experts.

x = embed(tokens)
x = x + out(gate(y) * latent attention(y))                  # y = norm(x); a gate of one number a head
x = x + sum over chosen e: g_e * expert_e(z) + shared(z)    # z = norm(x); some layers: an MLP
logits = head(norm(x))

The latents of queries and keys are scaled by the root of how much narrower they are than the stream. The rope key has a
norm of its own, and a head's output a gate. Layers with a window have other sizes.
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.families.deepseek import latent_attention, position_index
from lmstate.models.layers.mla import MultiHeadLatentAttention
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import Rope, make_rope, rope_fields
from lmstate.models.model import Model
from lmstate.ops import Norm

DEFAULTS: b.Defaults = {
    "dots3_note_text": {
        **b.EPS,
        "vocab_size": 152_064,
        "hidden_size": 5120,
        "intermediate_size": 13_824,
        "moe_intermediate_size": 1536,
        "num_hidden_layers": 46,
        "num_attention_heads": 128,
        "n_shared_experts": 1,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "kv_lora_rank": 512,
        "q_lora_rank": 1024,
        "qk_rope_head_dim": 64,
        "qk_nope_head_dim": 128,
        "v_head_dim": 128,
        "first_k_dense_replace": 1,
        "shared_experts_intermediate_size": 1536,
    }
}
FULL, INDEXED, SLIDING = "full_attention", "indexed_attention", "sliding_attention"
# Sizes of layers with a window, where the config says nothing of them.
SLIDING_SIZES = {
    "num_attention_heads": 64,
    "q_lora_rank": 1024,
    "kv_lora_rank": 1024,
    "head_dim": 256,
    "qk_nope_head_dim": 192,
    "v_head_dim": 128,
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    shared = config.int("n_shared_experts", low=1, high=b.MAX_SIZE) * config.int(
        "shared_experts_intermediate_size", low=1, high=b.MAX_SIZE
    )
    kinds, sparse = _kinds(config, shape.layers), b.sparse_layers(config, shape.layers)
    normed = b.rms_norms(w, shape)
    ropes: dict[tuple[str, int], Rope] = {}
    rescaled = config.bool("apply_mla_qkv_lora_rescale", default=True)  # GGUF has the scale in the norms

    def mixer(index: int, prefix: str) -> MultiHeadLatentAttention:
        kind = kinds[index]
        own = _config_of(config, index, kind)
        rope_dim = own.int("qk_rope_head_dim", low=2, high=b.MAX_SIZE)
        if (kind, rope_dim) not in ropes:
            ropes[kind, rope_dim] = _rope(config, kind, rope_dim).to(w.device)
        rope, width = ropes[kind, rope_dim], own.int("qk_nope_head_dim", low=1, high=b.MAX_SIZE) + rope_dim
        heads = own.int("num_attention_heads", low=1, high=b.MAX_SIZE)
        with w.configured(own):
            made = latent_attention(
                w, prefix, replace(shape, heads=heads, kv_heads=heads), rope, rope_dim, width**-0.5,
                gates=("g_proj", heads), eps=shape.eps,
            )  # fmt: skip
            found = position_index(w, f"{prefix}.indexer", shape, rope, True) if kind == INDEXED else None
        assert made.q_norm is not None
        return replace(
            made,
            q_norm=_scaled(made.q_norm, shape.hidden) if rescaled else made.q_norm,
            latent_norm=_scaled(made.latent_norm, shape.hidden) if rescaled else made.latent_norm,
            rope_key_norm=b.norm(w, f"{prefix}.k_rope_only_layernorm.weight", rope_dim, shape.eps),
            window=config.int("sliding_window", low=1) if kind == SLIDING else None,
            index=found,
        )

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if not sparse[index]:
            return b.mlp(w, prefix, shape.hidden, inner, act)
        routed = b.deepseek_mixture(w, prefix, shape, shared=0)
        return replace(routed, shared=b.mlp(w, f"{prefix}.shared_experts", shape.hidden, shared, act))

    ignore = (f"model.layers.{shape.layers}.*", "mtp.*", "model.mtp.*")
    return b.decoder(w, shape, b.pre_norm(normed, mixer, feed_forward), ignore=ignore)


def _scaled(norm: Norm, hidden: int) -> Norm:
    """A latent's norm, with the factor that follows it."""
    return replace(norm, weight=norm.weight * (hidden / norm.weight.shape[0]) ** 0.5)


def _kinds(config: Config, layers: int) -> list[str]:
    """The kind of each layer's attention. In published configs those with an index are called full."""
    indexed = config.bool("use_dsa", default=not config.given("per_layer_config"))
    given = config.strs("layer_types", layers, allowed=(FULL, INDEXED, SLIDING), default=None)
    if given is None:
        slides = config.bool("use_sliding_window", default=True)
        given = tuple(FULL if not slides or at < 2 or at % 4 == 1 else SLIDING for at in range(layers))
        indexed = config.bool("use_dsa", default=True)
    return [INDEXED if kind == FULL and indexed else kind for kind in given]


def _config_of(config: Config, index: int, kind: str) -> Config:
    """The config of a layer: `per_layer_config`, or for those with a window fields that begin with `swa_`."""
    by_layer = config.fields("per_layer_config")
    if by_layer is not None:
        return Config({**config, **(by_layer.fields(str(index)) or {})}, config.where)
    if kind != SLIDING:
        return config
    sizes = {name: config.get(f"swa_{name}", default) for name, default in SLIDING_SIZES.items()}
    own = Config({**config, **sizes}, config.where)
    rope = own.int("head_dim", low=1, high=b.MAX_SIZE) - own.int("qk_nope_head_dim", low=1, high=b.MAX_SIZE)
    return Config({**own, "qk_rope_head_dim": config.get("swa_qk_rope_head_dim", rope)}, config.where)


def _rope(config: Config, kind: str, rope_dim: int) -> Rope:
    """Rope of all of the `rope_dim` features, whatever part of a head they are."""
    theta = config.float("swa_rope_theta", low=1.0, default=50_000.0) if kind == SLIDING else 80_000_000.0
    settings = {**rope_fields(config, kind), "partial_rotary_factor": 1.0}
    if kind == SLIDING and not config.given("rope_parameters") and not config.given("rope_scaling"):
        settings["rope_theta"] = theta
    own = Config({**config, "rope_parameters": settings, "rope_scaling": None}, config.where)
    return make_rope(own, rope_dim, theta=theta, interleaved=True)
