"""SantaCoder and StarCoder 1 (2305.06161): GPT-2 whose query heads share one key and one value.

x = embed(tokens) + positions
x = x + attention(norm(x))
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
    "gpt_bigcode": {
        "layer_norm_epsilon": 1e-5,
        "n_positions": 1024,
        "multi_query": True,
        "scale_attn_weights": True,
        "tie_word_embeddings": True,
    }
}


def build(w: WeightLoader) -> Model:
    w.config = b.with_usual_names(w.config, b.GPT2_NAMES)
    config, shape = w.config, b.Dims.of(w.config, eps="layer_norm_epsilon")
    if config.bool("add_cross_attention", default=False):
        raise ModelError(f"{config.where} asks for attention to another text, which lmstate cannot do")
    multi_query = config.bool("multi_query", default=True)
    shape = replace(shape, kv_heads=1 if multi_query else shape.heads)
    inner = config.int("n_inner", low=1, high=b.MAX_SIZE, default=4 * shape.hidden)
    act = b.activation(config, "activation_function", "gelu_pytorch_tanh")
    scaled = config.bool("scale_attn_weights", default=True)

    def mixer(_: int, name: str) -> Attention:
        made = b.fused_attention(
            w, shape, None, f"{name}.c_attn", f"{name}.c_proj", grouped=not multi_query, biased=True
        )
        return made if scaled else replace(made, scale=1.0)

    normed = b.layer_norms(w, shape)
    table = w.tensor("transformer.wpe.weight", (config.int(b.POSITIONS, low=1), shape.hidden))
    block = b.pre_norm(
        normed,
        mixer,
        lambda _, name: b.ungated_mlp(w, name, shape.hidden, inner, act, ("c_fc", "c_proj"), biased=True),
        ("ln_1", "attn", "ln_2", "mlp"),
        layers="transformer.h",
    )
    return b.decoder(
        w,
        shape,
        block,
        embed="transformer.wte",
        entry=LearnedPositions(FloatWeight(table)),
        final_norm=normed("transformer.ln_f"),
        ignore=("transformer.h.*.attn.bias", "transformer.bias"),  # masks, which old checkpoints hold
    )
