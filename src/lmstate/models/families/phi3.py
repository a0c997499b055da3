"""Phi-3 and Phi-4-mini: Llama's block with its projections already fused in the checkpoint, and LongRoPE.

x = embed(tokens)
x = x + attention(norm(x))
x = x + down(silu(gate(y)) * up(y))    # y = norm(x)
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"phi3": b.EPS}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    window = config.int("sliding_window", low=1, default=None)
    rope = make_rope(config, shape.head_dim).to(w.device)
    block = b.pre_norm(
        b.rms_norms(w, shape),
        lambda _, name: b.fused_attention(w, shape, rope, f"{name}.qkv_proj", f"{name}.o_proj", window=window),
        lambda _, name: b.fused_mlp(w, name, shape.hidden, inner, act),
    )
    return b.decoder(w, shape, block)
