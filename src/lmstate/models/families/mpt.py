"""MPT (MosaicML, 2023): attention that knows positions by a slope of each head (ALiBi), and no biases.

x = embed(tokens)
x = x + attention(norm(x))                  # q k - slope * distance
x = x + down(gelu(up(norm(x))))
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import replace

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.model import Model

DEFAULTS: b.Defaults = {"mpt": {"layer_norm_epsilon": 1e-5, "tie_word_embeddings": True}}
NAMES = ("norm_1", "attn", "norm_2", "ffn")
USUAL = {
    "d_model": "hidden_size",
    "n_heads": "num_attention_heads",
    "n_layers": "num_hidden_layers",
    "max_seq_len": "max_position_embeddings",
}


def build(w: WeightLoader) -> Model:
    w.config = config = b.with_usual_names(w.config, USUAL)
    attends = config.fields("attn_config") or Config({})
    if not attends.bool("alibi", default=True):
        raise ModelError(f"{config.where} has alibi=False in its attn_config; lmstate runs MPT with ALiBi alone")
    shape = b.Dims.of(config, eps="layer_norm_epsilon")
    shape = replace(shape, kv_heads=shape.heads)
    scale = attends.float("softmax_scale", low=0.0, default=shape.head_dim**-0.5)
    clip = attends.float("clip_qkv", low=0.0, default=None) or None
    most = attends.float("alibi_bias_max", low=0.0, high=1024.0, default=8.0)
    normed, slopes = b.layer_norms(w, shape, biased=False), b.alibi_slopes(shape.heads, most).to(w.device)

    def mixer(_: int, name: str) -> Attention:
        made = b.fused_attention(w, shape, None, f"{name}.Wqkv", f"{name}.out_proj")
        return replace(made, scale=scale, clip=clip, slopes=slopes)

    block = b.pre_norm(
        normed,
        mixer,
        lambda _, name: b.ungated_mlp(w, name, shape.hidden, 4 * shape.hidden, "gelu", biased=False),
        NAMES,
        layers="transformer.blocks",
    )
    return b.decoder(w, shape, block, embed="transformer.wte", final_norm=normed("transformer.norm_f"))
