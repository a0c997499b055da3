"""ERNIE 4.5 with experts: interleaved rotation, softmax scores that are corrected for the choice, shared experts.

x = embed(tokens)
x = x + attention(norm(x))
x = x + sum over chosen e: g_e * expert_e(y) + shared(y)    # y = norm(x); some layers: an MLP
logits = head(norm(x))

The text part of ERNIE 4.5 VL keeps the experts of pictures after those of texts, and a router of their own.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.base import Mixer
from lmstate.models.layers.mlp import FeedForward
from lmstate.models.layers.moe import Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Model
from lmstate.ops import FloatWeight

DEFAULTS: b.Defaults = {
    "ernie4_5_moe": b.EPS,
    "ernie4_5_vl_moe_text": {
        **b.EPS,
        "vocab_size": 103_424,
        "hidden_size": 2560,
        "intermediate_size": 12_288,
        "num_hidden_layers": 28,
        "num_attention_heads": 20,
        "num_key_value_heads": 4,
        "moe_num_experts": 64,
        "moe_k": 6,
        "moe_intermediate_size": [1536, 512],
        "tie_word_embeddings": True,
    },
}
OF_PICTURES = ("*.mlp.experts.*", "*.mlp.gate.weight_1", "model.resampler_model.*", "model.vision_model.*")


def build(w: WeightLoader) -> Model:
    sees = w.config.str("model_type") == "ernie4_5_vl_moe_text"
    if sees:  # of a pair of numbers, the first is of texts
        names = ("moe_intermediate_size", "moe_num_experts")
        pairs = {name: value[0] for name in names if isinstance(value := w.config.get(name), list) and value}
        w.config = Config({**w.config, **pairs}, w.config.where)
    config, shape = w.config, b.Dims.of(w.config)
    inner, act, count = (
        config.int("intermediate_size", low=1, high=b.MAX_SIZE),
        b.activation(config),
        b.expert_count(config),
    )
    biased = config.bool("use_bias", default=False)
    rope = make_rope(config, shape.head_dim, theta=500_000.0, interleaved=True).to(w.device)
    first, every = config.int("moe_layer_start_index", default=1), config.int("moe_layer_interval", low=1, default=1)
    last = config.int("moe_layer_end_index", low=-1, default=-1)
    last = shape.layers - 1 if last == -1 else last
    kinds = config.strs("mlp_layer_types", shape.layers, ("dense", "sparse"), default=None)
    shared = config.int("moe_num_shared_experts", high=b.MAX_SIZE, default=2)

    def mixer(index: int, prefix: str) -> Mixer:
        return b.attention(w, prefix, shape, rope, biased=biased)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        sparse = first <= index <= last and (index + 1) % every == 0
        if kinds is not None and index < shape.layers:
            sparse = kinds[index] == "sparse"
        if index >= shape.layers:
            sparse = w.has(f"{prefix}.gate.weight")
        if not sparse:
            return b.mlp(w, prefix, shape.hidden, inner, act, biased=biased)
        statics = "moe_statics.e_score_correction_bias"
        statics = b.first_present(w, f"{prefix}.{statics}", f"{prefix}.gate.{statics}")
        bias = w.tensor(statics)
        if bias.shape not in ((count,), (1 + sees, count)):
            raise ModelError(
                f"{w.source.path}: {statics!r} has the shape {list(bias.shape)}; there are {count} experts"
            )
        gate = f"{prefix}.gate.weight"
        router = Router(
            FloatWeight(w.tensor(gate, (shape.hidden, count)).T.contiguous())
            if sees
            else b.router_weight(w, gate, count, shape.hidden),
            b.top_k(config, count, "moe_k" if config.given("moe_k") else "num_experts_per_tok"),
            normalize=True,
            e_score_correction_bias=bias if bias.ndim == 1 else bias[0].clone(),
            # Theirs is the least that a sum may be, this is added to it: below any sum that is, the two are one.
            floor=config.float("moe_norm_min", low=0.0, high=1e-9, default=1e-12),
        )
        return b.deepseek_mixture(w, prefix, shape, router, shared=shared)

    norms = b.rms_norms(w, shape)
    block = b.pre_norm(norms, mixer, feed_forward)
    heads = b.prediction_heads(
        w, shape, norms, _head_names(w), partial(block, shape.layers), norm=norms("model.norm"), chained_norm=False
    )
    return b.decoder(w, shape, block, head_biased=biased, heads=heads, ignore=("*mtp*", *(OF_PICTURES if sees else ())))


def _head_names(w: WeightLoader) -> Iterator[b.HeadNames]:
    """Heads that read the stream before the last norm, and go through the model's own."""
    for index in range(b.MOST_HEADS):
        if not w.has(f"model.mtp_linear_proj.{index}.weight"):
            return
        embed, hidden, project = (f"model.mtp_{part}.{index}" for part in ("emb_norm", "hidden_norm", "linear_proj"))
        yield b.HeadNames(f"model.mtp_block.{index}", embed, hidden, project, "model.norm")
