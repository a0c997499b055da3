"""Mamba-2 (Dao and Gu 2024), and Codestral Mamba: state space blocks and nothing else."""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.decoder import decoder
from lmstate.models.families.builders.defaults import Defaults
from lmstate.models.families.builders.dims import MOST
from lmstate.models.families.builders.mamba import Mamba2Shape, attention_free, dt_limits, gated_norm, mamba2, only_silu
from lmstate.models.families.builders.norms import norm
from lmstate.models.model import Block, Model

DEFAULTS: Defaults = {}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, attention_free(w.config)
    only_silu(config)
    sizes = Mamba2Shape(
        config.int("num_heads", low=1, high=MOST),
        config.int("head_dim", low=1, high=MOST),
        config.int("state_size", low=1, high=MOST),
        config.int("n_groups", low=1, high=MOST),
        config.int("conv_kernel", low=1, high=MOST),
        shape.eps,
        dt_limits(config),
    )

    def block(index: int) -> Block:
        layer = f"backbone.layers.{index}"
        gated = gated_norm(w, f"{layer}.mixer.norm.weight", sizes)
        mixer = mamba2(w, f"{layer}.mixer", sizes, shape.hidden, norm=gated)
        return Block(mixer, None, norm(w, f"{layer}.norm.weight", shape.hidden, shape.eps))

    final = norm(w, "backbone.norm_f.weight", shape.hidden, shape.eps)
    return decoder(w, shape, block, embed="backbone.embeddings", final_norm=final)
