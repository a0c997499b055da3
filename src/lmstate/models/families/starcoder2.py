"""StarCoder 2 (2402.19173): layer norms, a feed-forward part without a gate, biases, and a window on every layer."""

from __future__ import annotations

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.attention import attention
from lmstate.models.families.builders.decoder import decoder, pre_norm
from lmstate.models.families.builders.defaults import Defaults
from lmstate.models.families.builders.dims import MOST, Dims, config_window
from lmstate.models.families.builders.mlp import activation, ungated_mlp
from lmstate.models.families.builders.norms import layer_norms
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model

DEFAULTS: Defaults = {"starcoder2": {"norm_epsilon": 1e-5, "num_key_value_heads": 2, "tie_word_embeddings": True}}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, Dims.of(w.config, eps="norm_epsilon")
    inner, act = config.int("intermediate_size", low=1, high=MOST), activation(config, default="gelu_pytorch_tanh")
    rope, normed = make_rope(config, shape.head_dim).to(w.device), layer_norms(w, shape)
    window, biased = config_window(config, switch=False), config.bool("use_bias", default=True)
    block = pre_norm(
        normed,
        lambda _, name: attention(w, name, shape, rope, window=window, biased=biased),
        lambda _, name: ungated_mlp(w, name, shape.hidden, inner, act, ("c_fc", "c_proj"), biased),
    )
    return decoder(w, shape, block, final_norm=normed("model.norm"))
