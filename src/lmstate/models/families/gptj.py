"""GPT-J (Wang and Komatsuzaki 2021) and CodeGen (2203.13474): attention and feed-forward part side by side.

x = embed(tokens)
y = norm(x)                             # one norm for both parts
x = x + attention(y) + out(gelu(in(y)))   # neighboring features rotate, the first `rotary_dim` of each head
logits = head(norm(x))                  # with a bias
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {
    name: {"layer_norm_epsilon": 1e-5, "rotary_dim": 64, "n_positions": 2048} for name in ("codegen", "gptj")
}

SHARDS = 4  # that CodeGen was trained in; each stores its queries, its values and its keys


def build(w: WeightLoader) -> Model:
    w.config = b.with_usual_names(w.config, b.GPT2_NAMES)
    config, shape = w.config, b.Dims.of(w.config, eps="layer_norm_epsilon")
    sharded = config.str("model_type") == "codegen"
    if shape.heads * shape.head_dim != shape.hidden:
        raise ModelError(f"{config.where}: {shape.heads} heads cannot share a width of {shape.hidden} evenly")
    if sharded and shape.hidden % SHARDS:
        raise ModelError(f"{config.where}: a width of {shape.hidden} cannot be split into {SHARDS} shards evenly")
    shape = replace(shape, kv_heads=shape.heads)
    inner = config.int("n_inner", low=1, high=b.MAX_SIZE, default=4 * shape.hidden)
    act = b.activation(config, "activation_function", "gelu_new")
    rotary = config.int("rotary_dim", low=2, high=shape.head_dim)
    rope, normed = make_rope(config, rotary, interleaved=True).to(w.device), b.layer_norms(w, shape)

    def order() -> Tensor:
        """Rows of CodeGen's projection in the order of queries, keys, values, int64 `[3 * E]`."""
        queries, values, keys = torch.arange(3 * shape.hidden).view(SHARDS, 3, -1).unbind(1)
        return torch.cat([queries.flatten(), keys.flatten(), values.flatten()])

    def mixer(name: str) -> Attention:
        if not sharded:
            return b.attention(w, name, shape, rope, out="out_proj", biased=False)
        qkv = w.linear(f"{name}.qkv_proj.weight", shape=(3 * shape.hidden, shape.hidden), order=order)
        out = w.linear(f"{name}.out_proj.weight", shape=(shape.hidden, shape.hidden))
        return Attention(qkv, out, shape.heads, shape.heads, shape.head_dim, shape.head_dim**-0.5, rope)

    def block(index: int) -> Block:
        layer = f"transformer.h.{index}"
        both = normed(f"{layer}.ln_1")
        feed_forward = b.ungated_mlp(w, f"{layer}.mlp", shape.hidden, inner, act, ("fc_in", "fc_out"), biased=True)
        return Block(mixer(f"{layer}.attn"), feed_forward, both, both, parallel=True)

    return b.decoder(
        w,
        shape,
        block,
        embed="transformer.wte",
        head_biased=True,
        final_norm=normed("transformer.ln_f"),
        ignore=("*.attn.bias", "*.attn.causal_mask"),  # masks, which old checkpoints hold
    )
