"""OLMo Hybrid: the gated delta rule with beta up to 2, and OLMo 3's attention in every fourth layer.

x = embed(tokens)
x = x + delta rule(norm(x));  x = x + mlp(norm(x))
x = x + norm(attention(x));   x = x + norm(mlp(x))    # in every fourth layer
logits = head(norm(x))
"""

from __future__ import annotations

import torch

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.gated_delta_net import GatedDelta
from lmstate.models.layers.rope import make_rope, rope_fields
from lmstate.models.model import Block, Model
from lmstate.ops import Norm
from lmstate.ops.weights.grouped import FloatWeight

DEFAULTS: b.Defaults = {}

KINDS = ("linear_attention", "full_attention")
GATED_NORM_EPS = 1e-5  # not in the config: what the model was trained with


def build(w: WeightLoader) -> Model:
    """Attention has its norms after each part, and over whole projections; the delta rule has them before."""
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    kinds = config.strs("layer_types", shape.layers, KINDS, default=None) or [
        KINDS[index % 4 == 3] for index in range(shape.layers)
    ]
    # The released models know no positions but through the recurrence; their config says so by a missing base.
    rope = make_rope(config, shape.head_dim).to(w.device) if rope_fields(config).given("rope_theta") else None

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        feed_forward = b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act)

        def layer_norm(*names: str) -> Norm:
            return b.norm(w, b.first_present(w, *(f"{layer}.{name}.weight" for name in names)), shape.hidden, shape.eps)

        if kinds[index] == "linear_attention":
            return Block(
                delta(w, f"{layer}.linear_attn", shape),
                feed_forward,
                layer_norm("attention_layer_norm", "input_layernorm"),
                layer_norm("feedforward_layer_norm", "post_attention_layernorm"),
            )
        q_norm = b.norm(w, f"{layer}.self_attn.q_norm.weight", shape.heads * shape.head_dim, shape.eps)
        k_norm = b.norm(w, f"{layer}.self_attn.k_norm.weight", shape.kv_heads * shape.head_dim, shape.eps)
        return Block(
            b.attention(w, f"{layer}.self_attn", shape, rope, q_norm=q_norm, k_norm=k_norm),
            feed_forward,
            # transformers saves the first under the name that it gives to the delta rule's second norm.
            mixer_post_norm=layer_norm("post_attention_layernorm", "feedforward_layer_norm"),
            mlp_post_norm=layer_norm("post_feedforward_layernorm"),
        )

    return b.decoder(w, shape, block)


def delta(w: WeightLoader, prefix: str, shape: b.Dims) -> GatedDelta:
    config = w.config
    key_heads = config.int("linear_num_key_heads", low=1, high=b.MAX_SIZE, default=shape.heads)
    heads = config.int("linear_num_value_heads", low=1, high=b.MAX_SIZE, default=shape.heads)
    key_dim = config.int("linear_key_head_dim", low=1, high=b.MAX_SIZE, default=int(0.75 * shape.hidden / key_heads))
    value_dim = config.int("linear_value_head_dim", low=1, high=b.MAX_SIZE, default=2 * key_dim)
    b.check_shared(w, heads, key_heads)
    keys, values = key_heads * key_dim, heads * value_dim
    gates = [w.tensor(f"{prefix}.{part}_proj.weight", (heads, shape.hidden)) for part in "ba"]
    return GatedDelta(
        w.linear(
            *(f"{prefix}.{part}_proj.weight" for part in "qkvg"), shape=((keys, keys, values, values), shape.hidden)
        ),
        FloatWeight(torch.cat(gates)),
        w.linear(f"{prefix}.o_proj.weight", shape=(shape.hidden, values)),
        b.short_conv(w, prefix, 2 * keys + values, config.int("linear_conv_kernel_dim", low=1, high=256, default=4)),
        -w.tensor(f"{prefix}.A_log", (heads,)).exp(),
        w.tensor(f"{prefix}.dt_bias", (heads,)),
        b.norm(w, f"{prefix}.o_norm.weight", value_dim, GATED_NORM_EPS),
        key_heads,
        key_dim,
        value_dim,
        beta_scale=2.0 if config.bool("linear_allow_neg_eigval", default=True) else 1.0,
    )
