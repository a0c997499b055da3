"""Llama 4: a token attends inside its chunk where it knows positions, and to everything where it knows none.

x = embed(tokens)
x = x + attention(norm(x))               # rotary in chunks, or all without positions
x = x + expert_e(g_e * y) + shared(y)    # y = norm(x); some layers: an MLP
logits = head(norm(x))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lmstate.checkpoints.loader import WeightLoader, transpose
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention, Temperature
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import FloatWeight, Weight

DEFAULTS: b.Defaults = {"llama4_text": b.EPS}


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    dense_inner = config.int("intermediate_size_mlp", low=1, high=b.MAX_SIZE, default=inner)
    count = b.expert_count(config)
    step = config.int("interleave_moe_layer_step", low=1, default=1)
    sparse = config.ints("moe_layers", default=None)
    sparse = tuple(range(step - 1, shape.layers, step)) if sparse is None else sparse
    every = config.int("no_rope_layer_interval", low=1, default=4)
    rotates: Sequence[int] = [(index + 1) % every for index in range(shape.layers)]
    if config.get("no_rope_layers"):  # an empty list in early files
        rotates = config.ints("no_rope_layers", shape.layers)
    kinds = config.strs(
        "layer_types", shape.layers, allowed=("chunked_attention", "full_attention"), default=None
    ) or tuple("chunked_attention" if turns else "full_attention" for turns in rotates)
    chunk = config.int("attention_chunk_size", low=1, default=None)
    rope = make_rope(config, shape.head_dim, theta=500_000.0, interleaved=True).to(w.device)
    head_norm = None
    if config.bool("use_qk_norm", default=True):
        head_norm, rope = b.norm_after_rope(w, shape, rope)
    temperature = None
    if config.get("attn_temperature_tuning", True):  # a number in early files
        temperature = Temperature(
            config.int("floor_scale", low=1, default=8192), config.float("attn_scale", low=0.0, default=0.1)
        )

    def mixer(index: int, prefix: str) -> Attention:
        if rotates[index]:
            mixer = b.attention(w, prefix, shape, rope, q_norm=head_norm, k_norm=head_norm)
        else:
            mixer = replace(b.attention(w, prefix, shape, None), temperature=temperature)
        return replace(mixer, chunk=chunk if kinds[index] == "chunked_attention" else None)

    def expert(name: str, index: int, size: tuple[int, int]) -> Weight:
        w.expect(name, (count, *reversed(size)))  # stored [experts, K, N]
        return w.derived(f"{name}[{index}]", name, make=transpose, shape=size, of=index)

    def experts(prefix: str) -> list[MLP]:
        if w.has(f"{prefix}.0.gate_proj.weight"):  # as GGUF has them
            return b.experts(w, prefix, count, shape.hidden, inner, act)
        return [
            MLP(
                expert(f"{prefix}.gate_up_proj", each, (2 * inner, shape.hidden)),
                expert(f"{prefix}.down_proj", each, (shape.hidden, inner)),
                act,
            )
            for each in range(count)
        ]

    def feed_forward(index: int, prefix: str) -> FeedForward:
        if index not in sparse:
            return b.mlp(w, prefix, shape.hidden, dense_inner, act)
        gate = FloatWeight(w.tensor(f"{prefix}.router.weight", (count, shape.hidden)))
        return MixtureOfExperts(
            Router(gate, config.int("num_experts_per_tok", low=1, high=count), "sigmoid"),
            experts(f"{prefix}.experts"),
            shared=b.mlp(w, f"{prefix}.shared_expert", shape.hidden, inner, act),
            scale_input=True,
        )

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        return Block(
            mixer(index, f"{layer}.self_attn"),
            feed_forward(index, f"{layer}.feed_forward"),
            b.norm(w, f"{layer}.input_layernorm.weight", shape.hidden, shape.eps),
            b.norm(w, f"{layer}.post_attention_layernorm.weight", shape.hidden, shape.eps),
        )

    return b.decoder(w, shape, block)
