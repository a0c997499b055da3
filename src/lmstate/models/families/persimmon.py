"""Persimmon 8B (Adept): one matrix for queries, keys and values, head norms with biases, and no gate.

x = embed(tokens)
x = x + attention(norm(x))          # half of each head rotates
x = x + down(relu2(up(norm(x))))
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model
from lmstate.ops import Norm

DEFAULTS: b.Defaults = {
    "persimmon": {**b.LAYER_NORM_EPS, "hidden_act": "relu2", "qk_layernorm": True, "partial_rotary_factor": 0.5}
}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config, eps="layer_norm_eps")
    shape = replace(shape, kv_heads=shape.heads)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, normed = make_rope(config, shape.head_dim).to(w.device), b.layer_norms(w, shape)
    heads_normed = config.bool("qk_layernorm", default=True)

    def head_norm(name: str) -> Norm | None:
        if not heads_normed:
            return None
        weight, bias = (w.tensor(f"{name}.{part}", (shape.head_dim,)) for part in ("weight", "bias"))
        return Norm(weight, shape.eps, "layer", bias)

    def mixer(_: int, name: str) -> Attention:
        plain = b.fused_attention(w, shape, rope, f"{name}.query_key_value", f"{name}.dense", grouped=True, biased=True)
        return replace(plain, q_norm=head_norm(f"{name}.q_layernorm"), k_norm=head_norm(f"{name}.k_layernorm"))

    block = b.pre_norm(
        normed,
        mixer,
        lambda _, name: b.ungated_mlp(
            w, name, shape.hidden, inner, act, ("dense_h_to_4h", "dense_4h_to_h"), biased=True
        ),
    )
    return b.decoder(w, shape, block, final_norm=normed("model.final_layernorm"))
