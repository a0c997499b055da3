"""OPT (2205.01068), BioGPT (2210.10341) and XGLM (2112.10668): the decoders of fairseq.

x = embed(tokens) + positions            # learned; sinusoids in XGLM
x = x + attention(norm(x))
x = x + fc2(act(fc1(norm(x))))
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.embedding import LearnedPositions
from lmstate.models.model import Model
from lmstate.ops import FloatWeight, Norm

DEFAULTS: b.Defaults = {
    "biogpt": {"scale_embedding": True, "hidden_act": "gelu", "max_position_embeddings": 1024},
    "opt": {"hidden_act": "relu", "max_position_embeddings": 2048},
    "xglm": {
        "scale_embedding": True,
        "hidden_act": "gelu",
        "vocab_size": 256_008,
        "max_position_embeddings": 2048,
        "pad_token_id": 1,
    },
}

NAMES = {
    "activation_function": "hidden_act",
    "attention_heads": "num_attention_heads",
    "d_model": "hidden_size",
    "ffn_dim": "intermediate_size",
    "num_layers": "num_hidden_layers",
}
# Family -> the prefix of its tensors, and its final norm.
PLACES = {
    "biogpt": ("biogpt", "layer_norm"),
    "opt": ("model.decoder", "final_layer_norm"),
    "xglm": ("model", "layer_norm"),
}
EPS = 1e-5  # whatever the config says
OFFSET = 2  # rows of a table of positions before the first one
MAX_TABLE = 2**16  # positions in a table
UNUSUAL = {"do_layer_norm_before": True, "_remove_final_layer_norm": False, "add_cross_attention": False}


def build(w: WeightLoader) -> Model:
    w.config = config = b.with_usual_names(w.config, NAMES)
    family = config.str("model_type")
    prefix, last = PLACES[family]
    shape = b.Dims.of(config)
    shape = replace(shape, kv_heads=shape.heads, eps=EPS)
    _check(config, shape)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    biased = config.bool("enable_bias", default=True)
    weighted = config.bool("layer_norm_elementwise_affine", default=True)
    layer_norm = b.layer_norms(w, shape)

    def normed(name: str) -> Norm:
        return layer_norm(name) if weighted else b.plain_norm(w, shape.hidden, shape.eps, "layer")

    block = b.pre_norm(
        normed,
        lambda _, name: b.attention(w, name, shape, None, out="out_proj", biased=biased),
        lambda _, name: b.ungated_mlp(w, name.removesuffix(".fc"), shape.hidden, inner, act, ("fc1", "fc2"), biased),
        ("self_attn_layer_norm", "self_attn", "final_layer_norm", "fc"),
        layers=f"{prefix}.layers",
    )
    count = config.int(b.POSITIONS, low=1, high=MAX_TABLE)
    if family == "xglm":  # nothing is computed for a width that the weights do not have
        w.expect(f"{prefix}.embed_tokens.weight", (shape.vocab, shape.hidden))
        table = b.fairseq_sinusoids(count + OFFSET, shape.hidden, config.int("pad_token_id", default=None)).to(w.device)
    else:
        table = w.tensor(f"{prefix}.embed_positions.weight", (count + OFFSET, shape.hidden))
    return b.decoder(
        w,
        shape,
        block,
        prefix=prefix,
        embed_scale=shape.hidden**0.5 if config.bool("scale_embedding", default=False) else 1.0,
        entry=LearnedPositions(FloatWeight(table[OFFSET:])),
        final_norm=normed(f"{prefix}.{last}"),
        ignore=(f"{prefix}.embed_positions.weights",),  # XGLM's sinusoids, which old checkpoints hold
    )


def _check(config: Config, shape: b.Dims) -> None:
    for name, usual in UNUSUAL.items():
        if config.bool(name, default=usual) != usual:
            raise ModelError(f"{config.where} has {name!r} = {not usual}, which lmstate cannot do")
    if (width := config.int("word_embed_proj_dim", default=shape.hidden)) != shape.hidden:
        raise ModelError(
            f"{config.where}: embeddings of width {width} in a model of width {shape.hidden} are not supported"
        )
    if shape.heads * shape.head_dim != shape.hidden:
        raise ModelError(f"{config.where}: {shape.heads} heads cannot share a width of {shape.hidden} evenly")
