"""Mamba-2 (Dao and Gu 2024), and Codestral Mamba: state space blocks and nothing else.

x = embed(tokens)
x = x + out(norm(silu(z) * (ssd(u, B, C) + D u)))    # [z, u, B, C, dt] = in(norm(x)); u, B, C convolved
logits = head(norm(x))
"""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.model import Block, Model

DEFAULTS: b.Defaults = {}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.attention_free(w.config)
    b.only_silu(config)
    sizes = b.Mamba2Shape(
        config.int("num_heads", low=1, high=b.MAX_SIZE),
        config.int("head_dim", low=1, high=b.MAX_SIZE),
        config.int("state_size", low=1, high=b.MAX_SIZE),
        config.int("n_groups", low=1, high=b.MAX_SIZE),
        config.int("conv_kernel", low=1, high=b.MAX_SIZE),
        shape.eps,
        b.dt_limits(config),
    )

    def block(index: int) -> Block:
        layer = f"backbone.layers.{index}"
        gated = b.gated_norm(w, f"{layer}.mixer.norm.weight", sizes)
        mixer = b.mamba2(w, f"{layer}.mixer", sizes, shape.hidden, norm=gated)
        return Block(mixer, None, b.norm(w, f"{layer}.norm.weight", shape.hidden, shape.eps))

    final = b.norm(w, "backbone.norm_f.weight", shape.hidden, shape.eps)
    return b.decoder(w, shape, block, embed="backbone.embeddings", final_norm=final)
