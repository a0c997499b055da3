"""MiniCPM 3 (2404.06395): latent attention, and parts whose output is scaled by the depth of the model.

x = m_e * embed(tokens)
x = x + m * latent attention(norm(x))    # m falls with the number of layers
x = x + m * mlp(norm(x))
logits = m_h * head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.families.deepseek import latent_attention, latent_scale
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {
    "minicpm3": {
        **b.EPS,
        "num_key_value_heads": 40,
        "tie_word_embeddings": True,
        "kv_lora_rank": 256,
        "q_lora_rank": 768,
        "qk_nope_head_dim": 64,
        "qk_rope_head_dim": 32,
        "scale_emb": 12,
        "scale_depth": 1.4,
        "dim_model_base": 256,
    }
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    if not config.given("v_head_dim"):
        w.config = config = b.completed(config, {"v_head_dim": shape.hidden // shape.heads})
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope_dim = config.int("qk_rope_head_dim", low=2, high=b.MAX_SIZE)
    rope, scale = make_rope(config, rope_dim).to(w.device), latent_scale(config)
    depth = config.float("scale_depth", default=shape.layers**0.5)
    base = config.int("dim_model_base", low=1, high=b.MAX_SIZE, default=shape.hidden)
    block = b.pre_norm(
        b.rms_norms(w, shape),
        lambda _, name: latent_attention(w, name, shape, rope, rope_dim, scale),
        lambda _, name: b.mlp(w, name, shape.hidden, inner, act),
        scale=depth / shape.layers**0.5,
    )
    embed_scale = config.float("scale_emb", default=1.0)
    return b.decoder(w, shape, block, embed_scale=embed_scale, logit_scale=base / shape.hidden)
