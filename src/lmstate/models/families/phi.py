"""Phi-1, 1.5 and 2 (2306.11644): attention and feed-forward side by side after one layer norm, biases everywhere.

x = embed(tokens)
y = norm(x)
x = x + attention(y) + down(gelu(up(y)))
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Norm

DEFAULTS: b.Defaults = {"phi": {**b.LAYER_NORM_EPS, "partial_rotary_factor": 0.5}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config, eps="layer_norm_eps")
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config, default="gelu_new")
    rope, normed = make_rope(config, shape.head_dim).to(w.device), b.layer_norms(w, shape)
    heads_normed = config.bool("qk_layernorm", default=False)

    def head_norm(name: str) -> Norm | None:
        if not heads_normed:
            return None
        weight, bias = (w.tensor(f"{name}.{part}", (shape.head_dim,)) for part in ("weight", "bias"))
        return Norm(weight, shape.eps, "layer", bias)

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        both = normed(f"{layer}.input_layernorm")
        return Block(
            b.attention(
                w, f"{layer}.self_attn", shape, rope, out="dense", biased=True,
                q_norm=head_norm(f"{layer}.self_attn.q_layernorm"), k_norm=head_norm(f"{layer}.self_attn.k_layernorm"),
            ),
            b.ungated_mlp(w, f"{layer}.mlp", shape.hidden, inner, act, ("fc1", "fc2"), biased=True),
            both,
            both,
            parallel=True,
        )  # fmt: skip

    return b.decoder(w, shape, block, final_norm=normed("model.final_layernorm"), head_biased=True)
