"""BLOOM (2211.05100): a norm on the embedding, and attention that knows positions by a slope of each head (ALiBi).

x = norm(embed(tokens))
x = x + attention(norm(x))                  # q, k and v of a head beside each other; q k - slope * distance
x = x + out(gelu(in(norm(x))))
logits = head(norm(x))

JAIS (2308.16149), which is read from GGUF, has no norm on the embedding, and gates.
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.embedding import NormedEmbedding
from lmstate.models.layers.mlp import MLP
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"bloom": {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}}
NAMES = ("input_layernorm", "self_attention", "post_attention_layernorm", "mlp")


def build(w: WeightLoader) -> Model:
    w.config = config = b.with_usual_names(w.config, b.GPT2_NAMES)
    if config.bool("apply_residual_connection_post_layernorm", default=False):
        raise ModelError(f"{config.where} has norms in the stream itself, which lmstate does not do for BLOOM")
    shape = b.Dims.of(config, eps="layer_norm_epsilon")
    shape = replace(shape, kv_heads=shape.heads)
    grouped = config.bool("qkv_grouped", default=True)  # not in a GGUF
    normed = b.layer_norms(w, shape)
    slopes = b.alibi_slopes(shape.heads, config.float("alibi_bias_max", default=8.0)).to(w.device)
    scale = config.float("attention_scale", default=shape.head_dim**-0.5)
    first = normed("transformer.word_embeddings_layernorm") if config.bool("embedding_norm", default=True) else None
    gated = config.int("gated_size", low=1, high=b.MAX_SIZE, default=None)

    def mixer(_: int, name: str) -> Attention:
        fused, out = f"{name}.query_key_value", f"{name}.dense"
        made = b.fused_attention(w, shape, None, fused, out, grouped=grouped, biased=True)
        return replace(made, slopes=slopes, scale=scale)

    def feed_forward(_: int, name: str) -> MLP:
        if gated is not None:
            return b.mlp(w, name, shape.hidden, gated, "silu", biased=True)
        return b.ungated_mlp(
            w, name, shape.hidden, 4 * shape.hidden, "gelu_tanh", ("dense_h_to_4h", "dense_4h_to_h"), biased=True
        )

    block = b.pre_norm(
        normed,
        mixer,
        feed_forward,
        NAMES,
        layers="transformer.h",
    )
    return b.decoder(
        w,
        shape,
        block,
        embed="transformer.word_embeddings",
        final_norm=normed("transformer.ln_f"),
        entry=NormedEmbedding(first) if first else None,
    )
