"""Mamba (Gu and Dao 2023) and Falcon-Mamba, which normalizes dt, B and C without weights.

x = embed(tokens)
x = x + out(silu(z) * (scan(u) + D u))    # [u, z] = in(norm(x)), u = silu(conv(u))
logits = head(norm(x))
"""

from __future__ import annotations

import torch

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.model import Block, Model
from lmstate.ops import Norm

DEFAULTS: b.Defaults = {}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.attention_free(w.config)
    b.only_silu(config)
    sizes = b.MambaShape(
        # Falcon-Mamba is published with a factor of 16, and a width of twice the hidden size, which goes before it.
        config.int("intermediate_size", low=1, high=b.MAX_SIZE, default=b.expanded(config, "expand", shape.hidden)),
        config.int("state_size", low=1, high=b.MAX_SIZE, default=16),
        b.dt_rank(config, "time_step_rank", shape.hidden),
        config.int("conv_kernel", low=1, high=b.MAX_SIZE, default=4),
    )
    norms: tuple[Norm, ...] = ()
    if config.str("model_type") == "falcon_mamba":
        eps = config.float("mixer_rms_eps", low=0.0, high=1.0, default=1e-6)
        widths = (sizes.rank, sizes.state_size, sizes.state_size)
        norms = tuple(Norm(torch.ones(width, dtype=torch.float32, device=w.device), eps) for width in widths)

    def block(index: int) -> Block:
        layer = f"backbone.layers.{index}"
        mixer = b.mamba(w, f"{layer}.mixer", sizes, shape.hidden, norms)
        return Block(mixer, None, b.norm(w, f"{layer}.norm.weight", shape.hidden, shape.eps))

    final = b.norm(w, "backbone.norm_f.weight", shape.hidden, shape.eps)
    return b.decoder(w, shape, block, embed="backbone.embeddings", final_norm=final)
