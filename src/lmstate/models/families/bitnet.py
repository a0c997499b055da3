"""BitNet b1.58 (2504.12285): Llama's block with a norm before the last matrix of each part.

x = embed(tokens)
x = x + out(norm(attention(norm(x))))
x = x + down(norm(relu2(gate(y)) * up(y)))   # y = norm(x)
logits = head(norm(x))

Weights are three values with a scale in the published files; here they are whichever the checkpoint holds.
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"bitnet": {**b.EPS, "num_key_value_heads": 5, "hidden_act": "relu2", "rope_theta": 500_000.0}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, width = make_rope(config, shape.head_dim).to(w.device), shape.heads * shape.head_dim

    def mixer(_: int, name: str) -> Attention:
        out_norm = b.norm(w, f"{name}.attn_sub_norm.weight", width, shape.eps)
        return replace(b.attention(w, name, shape, rope), out_norm=out_norm)

    def feed_forward(_: int, name: str) -> MLP:
        down_norm = b.norm(w, f"{name}.ffn_sub_norm.weight", inner, shape.eps)
        return replace(b.mlp(w, name, shape.hidden, inner, act), down_norm=down_norm)

    return b.decoder(w, shape, b.pre_norm(b.rms_norms(w, shape), mixer, feed_forward))
