"""Qwen3, dense and mixture of experts: queries and keys are normalised head by head before they rotate."""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.attention import attention
from lmstate.models.families.builders.decoder import decoder, pre_norm
from lmstate.models.families.builders.dims import Dims, config_window, windows
from lmstate.models.families.builders.moe import qwen_feed_forward
from lmstate.models.families.builders.norms import head_norms, rms_norms
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model


def build(w: WeightLoader) -> Model:
    config, shape = w.config, Dims.of(w.config)
    rope, window = make_rope(config, shape.head_dim).to(w.device), windows(config, shape.layers)
    family = config.str("model_type")
    if family == "qwen3_moe":  # its config may name layers, which its published code does not ask
        window = [config_window(config, switch=True)] * shape.layers
    elif family == "qwen3_vl_moe_text":
        window = [None] * shape.layers

    def mixer(index: int, prefix: str) -> Mixer:
        q_norm, k_norm = head_norms(w, prefix, shape)
        return attention(w, prefix, shape, rope, window=window[index], q_norm=q_norm, k_norm=k_norm)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        return qwen_feed_forward(w, index, prefix, shape, normalize=family == "qwen3_vl_moe_text")

    return decoder(w, shape, pre_norm(rms_norms(w, shape), mixer, feed_forward))
