"""Phi-3 and Phi-4-mini: Llama's block with its projections already fused in the checkpoint, and LongRoPE."""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.attention import fused_attention
from lmstate.models.families.builders.decoder import decoder, pre_norm
from lmstate.models.families.builders.defaults import EPS, Defaults
from lmstate.models.families.builders.dims import MOST, Dims
from lmstate.models.families.builders.mlp import activation, fused_mlp
from lmstate.models.families.builders.norms import rms_norms
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: Defaults = {"phi3": EPS}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config)
    window = config.int("sliding_window", low=1, default=None)
    rope = make_rope(config, shape.head_dim).to(w.device)
    block = pre_norm(
        rms_norms(w, shape),
        lambda _, name: fused_attention(w, shape, rope, f"{name}.qkv_proj", f"{name}.o_proj", window=window),
        lambda _, name: fused_mlp(w, name, shape.hidden, inner, act),
    )
    return decoder(w, shape, block)
