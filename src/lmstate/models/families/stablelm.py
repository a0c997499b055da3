"""StableLM (2402.17834): Llama's block with layer norms and ropes of a part of each head; StableLM 2 12B has its two
parts side by side, and norms whose weights differ from head to head.

x = embed(tokens)
x = x + attention(norm(x))    # 12B: x + attention(y) + mlp(y), y = norm(x)
x = x + mlp(norm(x))
logits = head(norm(x))

PLaMo, which is read from GGUF, is as the latter with RMS norms.
"""

from __future__ import annotations

import torch

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Norm

DEFAULTS: b.Defaults = {"stablelm": {**b.LAYER_NORM_EPS, "partial_rotary_factor": 0.25}}


def build(w: WeightLoader) -> Model:
    config = w.config
    kind = config.str("norm_type", allowed=("layer", "rms"), default="layer")
    shape = b.Dims.of(config, eps="layer_norm_eps")
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    normed = b.rms_norms(w, shape) if kind == "rms" else b.layer_norms(w, shape)
    rope = make_rope(config, shape.head_dim).to(w.device)
    biased, heads_normed = config.bool("use_qkv_bias", default=False), config.bool("qk_layernorm", default=False)
    parallel = config.bool("use_parallel_residual", default=False)

    def head_norms(name: str, heads: int) -> Norm | None:
        if not heads_normed:
            return None
        if w.has(f"{name}.weight"):  # GGUF has them in one
            return Norm(w.tensor(f"{name}.weight", (heads, shape.head_dim)), shape.eps, "layer")
        weights = [w.tensor(f"{name}.norms.{head}.weight", (shape.head_dim,)) for head in range(heads)]
        return Norm(torch.stack(weights), shape.eps, "layer")

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        first = normed(f"{layer}.input_layernorm")
        return Block(
            b.attention(
                w, f"{layer}.self_attn", shape, rope, biased=biased, out_biased=False,
                q_norm=head_norms(f"{layer}.self_attn.q_layernorm", shape.heads),
                k_norm=head_norms(f"{layer}.self_attn.k_layernorm", shape.kv_heads),
            ),
            b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act),
            first,
            first if parallel else normed(f"{layer}.post_attention_layernorm"),
            parallel=parallel,
        )  # fmt: skip

    return b.decoder(w, shape, block, final_norm=normed("model.norm"))
