"""GPT-NeoX (2204.06745) and Pythia: attention and feed-forward side by side, each after a layer norm of its own.

x = embed(tokens)
x = x + attention(norm(x)) + down(gelu(up(norm'(x))))
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {
    "gpt_neox": {
        **b.LAYER_NORM_EPS,
        "attention_bias": True,
        "use_parallel_residual": True,
        "rotary_emb_base": 10_000.0,
        "rotary_pct": 0.25,
    }
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config, eps="layer_norm_eps")
    shape = replace(shape, kv_heads=shape.heads)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config, default="gelu")
    names = {"rope_theta": config.get("rotary_emb_base"), "partial_rotary_factor": config.get("rotary_pct")}
    rope, normed = make_rope(Config({**config, **names}), shape.head_dim).to(w.device), b.layer_norms(w, shape)
    biased = config.bool("attention_bias", default=False)
    parallel = config.bool("use_parallel_residual", default=False)
    grouped = config.bool("qkv_grouped", default=True)  # not in a GGUF

    def block(index: int) -> Block:
        layer = f"gpt_neox.layers.{index}"
        inside = f"{layer}.attention"
        return Block(
            b.fused_attention(
                w, shape, rope, f"{inside}.query_key_value", f"{inside}.dense", grouped=grouped, biased=biased
            ),
            b.ungated_mlp(
                w, f"{layer}.mlp", shape.hidden, inner, act, ("dense_h_to_4h", "dense_4h_to_h"), biased=True
            ),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            parallel=parallel,
        )  # fmt: skip

    return b.decoder(
        w,
        shape,
        block,
        embed="gpt_neox.embed_in",
        final_norm=normed("gpt_neox.final_layer_norm"),
        ignore=("*.attention.bias", "*.attention.rotary_emb.inv_freq"),  # which old checkpoints hold: a mask
    )
