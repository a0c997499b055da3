"""Nemotron-4 and Minitron (2402.16819): layer norms that are stored less 1, no gate, half of each head rotates."""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.attention import attention
from lmstate.models.families.builders.decoder import decoder, pre_norm
from lmstate.models.families.builders.defaults import Defaults
from lmstate.models.families.builders.dims import MOST, Dims
from lmstate.models.families.builders.mlp import activation, ungated_mlp
from lmstate.models.families.builders.norms import layer_norms
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: Defaults = {"nemotron": {"norm_eps": 1e-5, "partial_rotary_factor": 0.5}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, Dims.of(w.config, eps="norm_eps")
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config, default="relu2")
    rope, normed = make_rope(config, shape.head_dim).to(w.device), layer_norms(w, shape, plus_one=True)
    block = pre_norm(
        normed,
        lambda _, name: attention(w, name, shape, rope),
        lambda _, name: ungated_mlp(w, name, shape.hidden, inner, act),
    )
    return decoder(w, shape, block, final_norm=normed("model.norm"))
