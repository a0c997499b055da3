"""Gemma (2403.08295): Llama's block with a gate of gelu, norms that are stored less 1, and a scaled embedding.

x = embed(tokens) * sqrt(E)
x = x + attention(norm(x))
x = x + down(gelu(gate(y)) * up(y))    # y = norm(x)
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"gemma": {"head_dim": 256, "tie_word_embeddings": True}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    if config.bool("use_bidirectional_attention", default=False):
        raise ModelError(f"{config.where} asks for attention in both directions; only causal models are supported")
    inner = config.int("intermediate_size", low=1, high=b.MAX_SIZE)
    act = b.activation(config, default="gelu_pytorch_tanh")
    act = "gelu_tanh" if act == "gelu" else act  # the first configs say gelu, and mean the one that was trained
    whole = config.bool("whole_pictures", default=False)  # of PaliGemma
    rope, normed = make_rope(config, shape.head_dim).to(w.device), b.rms_norms(w, shape, plus_one=True)
    block = b.pre_norm(
        normed,
        lambda _, name: b.attention(w, name, shape, rope, whole_pictures=whole),
        lambda _, name: b.mlp(w, name, shape.hidden, inner, act),
    )
    return b.decoder(w, shape, block, final_norm=normed("model.norm"), embed_scale=shape.hidden**0.5)
