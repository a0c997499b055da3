"""Command R (Cohere) and Command R7B (Cohere 2): attention and feed-forward side by side.

Cohere 2 knows positions only where there is a window. Command R+ normalises queries and keys, each head by weights of
its own.
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.attention import attention
from lmstate.models.families.builders.decoder import decoder
from lmstate.models.families.builders.defaults import LAYER_NORM_EPS, Defaults
from lmstate.models.families.builders.dims import MOST, Dims, windows
from lmstate.models.families.builders.mlp import activation, mlp
from lmstate.models.families.builders.norms import layer_norms
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Norm

DEFAULTS: Defaults = {
    "cohere": {**LAYER_NORM_EPS, "rope_theta": 500_000.0},
    "cohere2": {
        **LAYER_NORM_EPS,
        "vocab_size": 256_000,
        "hidden_size": 8192,
        "intermediate_size": 22_528,
        "num_hidden_layers": 40,
        "num_attention_heads": 64,
        "sliding_window": 4096,
    },
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, Dims.of(w.config, eps="layer_norm_eps")
    second = config.str("model_type") == "cohere2"
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    rope, normed = (
        make_rope(config, shape.head_dim, interleaved=True).to(w.device),
        layer_norms(w, shape, biased=False),
    )
    window = windows(config, shape.layers, full_every=4) if second else [None] * shape.layers
    heads_normed = not second and config.bool("use_qk_norm", default=False)

    def head_norm(name: str, heads: int) -> Norm | None:
        return Norm(w.tensor(f"{name}.weight", (heads, shape.head_dim)), shape.eps, "layer") if heads_normed else None

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        both, size = normed(f"{layer}.input_layernorm"), window[index]
        return Block(
            attention(
                w, f"{layer}.self_attn", shape, None if second and size is None else rope, window=size,
                q_norm=head_norm(f"{layer}.self_attn.q_norm", shape.heads),
                k_norm=head_norm(f"{layer}.self_attn.k_norm", shape.kv_heads),
            ),
            mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            both,
            both,
            parallel=True,
        )  # fmt: skip

    return decoder(
        w,
        shape,
        block,
        final_norm=normed("model.norm"),
        logit_scale=config.float("logit_scale", default=0.0625),
    )
