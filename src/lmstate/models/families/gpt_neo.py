"""GPT-Neo (Black et al. 2021): GPT-2 with a window on every other layer, and scores that are not scaled.

x = embed(tokens) + positions
x = x + attention(norm(x))               # scores q k^T, without 1 / sqrt(D)
x = x + down(gelu(up(norm(x))))
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.embedding import LearnedPositions
from lmstate.models.model import Model
from lmstate.ops import FloatWeight

DEFAULTS: b.Defaults = {
    "gpt_neo": {
        "layer_norm_epsilon": 1e-5,
        "max_position_embeddings": 2048,
        "window_size": 256,
        "tie_word_embeddings": True,
    }
}

NAMES = {"num_heads": "num_attention_heads", "num_layers": "num_hidden_layers"}


def build(w: WeightLoader) -> Model:
    w.config = config = b.with_usual_names(w.config, NAMES)
    shape = b.Dims.of(config, eps="layer_norm_epsilon")
    shape = replace(shape, kv_heads=shape.heads)
    if shape.heads * shape.head_dim != shape.hidden:
        raise ModelError(f"{config.where}: {shape.heads} heads cannot share a width of {shape.hidden} evenly")
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE, default=4 * shape.hidden)
    act = b.activation(config, "activation_function", "gelu_new")
    kinds = config.strs("attention_layers", shape.layers, allowed=("global", "local"))
    window = config.int("window_size", low=1)

    def mixer(index: int, name: str) -> Attention:
        return b.attention(
            w, name, shape, None, window=window if kinds[index] == "local" else None, scale=1.0,
            out="out_proj", biased=False, out_biased=True,
        )  # fmt: skip

    normed = b.layer_norms(w, shape)
    table = w.tensor("transformer.wpe.weight", (config.int(b.POSITIONS, low=1), shape.hidden))
    block = b.pre_norm(
        normed,
        mixer,
        lambda _, name: b.ungated_mlp(w, name, shape.hidden, inner, act, ("c_fc", "c_proj"), biased=True),
        ("ln_1", "attn.attention", "ln_2", "mlp"),
        layers="transformer.h",
    )
    return b.decoder(
        w,
        shape,
        block,
        embed="transformer.wte",
        entry=LearnedPositions(FloatWeight(table)),
        final_norm=normed("transformer.ln_f"),
        ignore=("*.attn.attention.bias",),  # masks, which old checkpoints hold
    )
