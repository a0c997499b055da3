"""OLMo 1 (2402.00838): Llama's block with layer norms without weights; what is projected may be clipped.

x = embed(tokens)
x = x + attention(norm(x))
x = x + mlp(norm(x))
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope = make_rope(config, shape.head_dim).to(w.device)
    clip = config.float("clip_qkv", low=0.0, default=None)
    norm = b.plain_norm(w, shape.hidden, 1e-5, "layer")

    def mixer(_: int, name: str) -> Attention:
        return replace(b.attention(w, name, shape, rope), clip=clip)

    block = b.pre_norm(lambda _: norm, mixer, lambda _, name: b.mlp(w, name, shape.hidden, inner, act))
    return b.decoder(w, shape, block, final_norm=norm)
