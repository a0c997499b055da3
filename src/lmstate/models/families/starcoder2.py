"""StarCoder 2 (2402.19173): layer norms, a feed-forward part without a gate, biases, and a window on every layer.

x = embed(tokens)
x = x + attention(norm(x))
x = x + down(gelu(up(norm(x))))
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"starcoder2": {"norm_epsilon": 1e-5, "num_key_value_heads": 2, "tie_word_embeddings": True}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config, eps="norm_epsilon")
    inner, act = (
        config.int("intermediate_size", low=1, high=b.MAX_SIZE),
        b.activation(config, default="gelu_pytorch_tanh"),
    )
    rope, normed = make_rope(config, shape.head_dim).to(w.device), b.layer_norms(w, shape)
    window, biased = b.config_window(config, switch=False), config.bool("use_bias", default=True)
    block = b.pre_norm(
        normed,
        lambda _, name: b.attention(w, name, shape, rope, window=window, biased=biased),
        lambda _, name: b.ungated_mlp(w, name, shape.hidden, inner, act, ("c_fc", "c_proj"), biased),
    )
    return b.decoder(w, shape, block, final_norm=normed("model.norm"))
