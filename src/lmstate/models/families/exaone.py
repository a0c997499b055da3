"""EXAONE 3 and 3.5 (2408.03541): Llama under the names of GPT-2.

x = embed(tokens)
x = x + attention(norm(x))          # rotary, grouped keys and values
x = x + down(silu(gate(y)) * up(y))   # y = norm(x)
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"exaone": {**b.EPS, "num_key_value_heads": 8, "rope_theta": 500_000.0}}

NAMES = {
    "num_layers": "num_hidden_layers",
    "layer_norm_epsilon": "rms_norm_eps",
    "activation_function": "hidden_act",
}


def build(w: WeightLoader) -> Model:
    w.config = b.with_usual_names(w.config, NAMES)
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    rope, normed = make_rope(config, shape.head_dim).to(w.device), b.rms_norms(w, shape)
    block = b.pre_norm(
        normed,
        lambda _, name: b.attention(w, name, shape, rope, out="out_proj"),
        lambda _, name: b.mlp(w, name, shape.hidden, inner, act, ("c_fc_0", "c_fc_1", "c_proj")),
        ("ln_1", "attn.attention", "ln_2", "mlp"),
        layers="transformer.h",
    )
    return b.decoder(w, shape, block, embed="transformer.wte", final_norm=normed("transformer.ln_f"))
