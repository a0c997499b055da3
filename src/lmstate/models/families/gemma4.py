"""Gemma 4: layers that share keys and values, embeddings of a token for every layer, experts beside a dense part.

x = embed(tokens) * sqrt(E)
x = x + norm(attention(norm(x)))
x = x + norm(mlp(norm(x)))    # or the sum of an MLP and experts, each between norms
x = gain * (x + per-layer input(x))
logits = softcap(head(norm(x)))
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache

from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.per_layer_inputs import PerLayerInput, PerLayerInputs
from lmstate.models.layers.rope import Rope, make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import Norm, Residual
from lmstate.state import Step

GEMMA4 = {
    "vocab_size": 262_144,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 30,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "sliding_window": 512,
    "rope_scaling": {
        "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
        "sliding_attention": {"rope_theta": 10_000.0},
    },
}
DEFAULTS: b.Defaults = {
    "gemma4_text": GEMMA4,
    "gemma4_unified_text": {
        **GEMMA4,
        "sliding_window": 1024,
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
    },
}

LOCAL, FULL = "sliding_attention", "full_attention"


@dataclass(frozen=True, eq=False)
class DenseAndExperts:
    """A dense part and experts that read the same stream, each between norms of its own; their sum.

    The norm that is given is the dense part's.
    """

    dense: MLP
    after_dense: Norm
    experts: MixtureOfExperts
    expert_norm: Norm
    router_norm: Norm  # of what the router reads
    after_experts: Norm

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        out = ops.norm(self.dense(x, norm), self.after_dense)
        tokens = x.flatten(0, -2)
        chosen = self.experts.router(ops.norm(tokens, self.router_norm))
        mixed = self.experts.routed(ops.norm(tokens, self.expert_norm), *chosen)
        out = out + ops.norm(mixed, self.after_experts).view_as(x)
        return out if residual is None else ops.add_residual(residual, out)


@dataclass(frozen=True, eq=False)
class Ending:
    """The per-layer input is added to the stream, and all of it scaled: `[R, T, E]` -> `[R, T, E]`."""

    per_layer_input: PerLayerInput | None
    gain: Tensor  # float32 [1]

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        added = x if self.per_layer_input is None else x + self.per_layer_input(x, step)
        return added * self.gain


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    kinds = kinds_of(w)
    reads = shared_layers(config, kinds)
    width = config.int("hidden_size_per_layer_input", high=b.MAX_SIZE, default=256)
    return b.decoder(
        w,
        shape,
        blocks(w, kinds, reads),
        embed_scale=shape.hidden**0.5,
        logit_softcap=config.float("final_logit_softcapping", low=1e-6, default=None),
        entry=per_layer_inputs(w, shape, width, config.int("pad_token_id", default=0)) if width else None,
        reads=reads,
        ignore=unread(reads),
    )


def kinds_of(w: WeightLoader) -> list[str]:
    """Each layer's kind; the last one sees everything, whatever the config says."""
    return [*layer_kinds(w.config, w.config.int("num_hidden_layers", low=1, high=4096), full_every=6)[:-1], FULL]


def blocks(w: WeightLoader, kinds: Sequence[str], reads: Sequence[int | None]) -> Callable[[int], Block]:
    """A function that makes the blocks by their numbers; reads: see `shared_layers`."""
    config, shape = w.config, b.Dims.of(w.config)
    directions = config.str("use_bidirectional_attention", default=None)
    if directions == "all":
        raise ModelError(f"{config.where} asks for attention in both directions; only causal models are supported")
    inner, act = (
        config.int("intermediate_size", low=1, high=b.MAX_SIZE),
        b.activation(config, "hidden_activation", "gelu_pytorch_tanh"),
    )
    shapes = [_layer_shape(config, shape, index, kind == FULL) for index, kind in enumerate(kinds)]

    @cache
    def rope(kind: str, head_dim: int) -> Rope:
        return make_rope(config, head_dim, kind=kind, theta=1e6 if kind == FULL else 1e4).to(w.device)

    one_projection = config.bool("attention_k_eq_v", default=False)
    wide = config.bool("use_double_wide_mlp", default=False)
    width = config.int("hidden_size_per_layer_input", high=b.MAX_SIZE, default=256)
    normed = b.rms_norms(w, shape)

    for layer, source in enumerate(reads):
        if source is not None and shapes[layer] != shapes[source]:
            raise ModelError(
                f"{config.where} has layer {layer} read the keys and values of layer {source}, and gives their heads "
                "different sizes"
            )

    def block(index: int) -> Block:
        layer, kind, each = f"model.layers.{index}", kinds[index], shapes[index]
        mixer = sharing_attention(
            w, f"{layer}.self_attn", each, rope(kind, each.head_dim),
            window=config.int("sliding_window", low=1) if kind == LOCAL else None,
            reads=reads[index], value="k_proj" if one_projection and kind == FULL else "v_proj",
            whole_pictures=directions == "vision" and kind == LOCAL,
        )  # fmt: skip
        doubled = 2 if wide and reads[index] is not None else 1
        return Block(
            mixer,
            _feed_forward(w, layer, shape, doubled * inner, act),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.pre_feedforward_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            normed(f"{layer}.post_feedforward_layernorm"),
            output_hook=Ending(
                per_layer_input(w, layer, index, shape, width, act) if width else None,
                w.tensor(f"{layer}.layer_scalar", (1,)),
            ),
        )

    return block


def layer_kinds(config: Config, layers: int, full_every: int) -> Sequence[str]:
    """Each layer's kind; where the config names none, one in `full_every` sees everything."""
    kinds = config.strs("layer_types", layers, (LOCAL, FULL), default=None)
    return kinds or [LOCAL if (index + 1) % full_every else FULL for index in range(layers)]


def shared_layers(config: Config, kinds: Sequence[str]) -> list[int | None]:
    """Index, by layer, of the earlier layer whose keys and values it reads: the last of its kind that has any."""
    count = config.int("num_kv_shared_layers", high=len(kinds), default=0)
    own = len(kinds) - count
    last = {kind: index for index, kind in enumerate(kinds[:own])}
    if missing := set(kinds[own:]) - set(last):
        raise ModelError(
            f"{config.where} has the last {count} of {len(kinds)} layers share keys and values, but none of the others "
            f"is of the kind {', '.join(missing)}"
        )
    return [None if index < own else last[kind] for index, kind in enumerate(kinds)]


def unread(reads: Sequence[int | None]) -> tuple[str, ...]:
    """Unused projections that checkpoints may hold for layers that share keys and values."""
    layers = [f"model.layers.{index}.self_attn" for index, source in enumerate(reads) if source is not None]
    return tuple(f"{layer}.{name}.*" for layer in layers for name in ("k_proj", "v_proj", "k_norm", "v_norm"))


def sharing_attention(
    w: WeightLoader, prefix: str, shape: b.Dims, rope: Rope, *, window: int | None, reads: int | None,
    value: str = "v_proj", whole_pictures: bool = False,
) -> Attention:  # fmt: skip
    """Attention whose queries, keys and values are normalized head by head; the scores have no other scale."""
    q_norm = b.norm(w, f"{prefix}.q_norm.weight", shape.head_dim, shape.eps)
    k_norm = None if reads is not None else b.norm(w, f"{prefix}.k_norm.weight", shape.head_dim, shape.eps)
    v_norm = None if reads is not None else b.plain_norm(w, shape.head_dim, shape.eps)
    return b.attention(
        w, prefix, shape, rope, window=window, q_norm=q_norm, k_norm=k_norm, v_norm=v_norm, scale=1.0, reads=reads,
        value=value, whole_pictures=whole_pictures,
    )  # fmt: skip


def per_layer_inputs(w: WeightLoader, shape: b.Dims, width: int, pictured: int | None = None) -> PerLayerInputs:
    rows = w.config.int("vocab_size_per_layer_input", low=1, high=2**24, default=262_144)
    return PerLayerInputs(
        w.linear("model.embed_tokens_per_layer.weight", shape=(rows, shape.layers * width)),
        w.linear("model.per_layer_model_projection.weight", shape=(shape.layers * width, shape.hidden)),
        b.norm(w, "model.per_layer_projection_norm.weight", width, shape.eps),
        pictured,
    )


def per_layer_input(w: WeightLoader, layer: str, index: int, shape: b.Dims, width: int, act: str) -> PerLayerInput:
    return PerLayerInput(
        index,
        w.linear(f"{layer}.per_layer_input_gate.weight", shape=(width, shape.hidden)),
        act,
        w.linear(f"{layer}.per_layer_projection.weight", shape=(shape.hidden, width)),
        b.norm(w, f"{layer}.post_per_layer_input_norm.weight", shape.hidden, shape.eps),
    )


def _layer_shape(config: Config, shape: b.Dims, index: int, full: bool) -> b.Dims:
    """The sizes of a layer: those that see everything have heads of their own, which newer configs list by layer."""
    head_dim, kv_heads, listed = shape.head_dim, shape.kv_heads, config.fields("per_layer_config")
    if listed is not None:
        # Numbers of layers are as wide as the last one's: 04, of more than ten.
        name = next((name for name in listed if name.isdecimal() and int(name) == index), str(index))
        own = listed.fields(name) or Config({}, listed.where)
        head_dim = own.int("head_dim", low=1, high=b.MAX_SIZE, default=head_dim)
        kv_heads = own.int("num_key_value_heads", low=1, high=b.MAX_SIZE, default=kv_heads)
    elif full:
        head_dim = config.int("global_head_dim", low=1, high=b.MAX_SIZE, default=512)
        if config.bool("attention_k_eq_v", default=False):
            kv_heads = config.int("num_global_key_value_heads", low=1, high=b.MAX_SIZE, default=kv_heads)
    return replace(shape, head_dim=head_dim, kv_heads=kv_heads)


def _feed_forward(w: WeightLoader, layer: str, shape: b.Dims, inner: int, act: str) -> FeedForward:
    config, dense = w.config, b.mlp(w, f"{layer}.mlp", shape.hidden, inner, act)
    if not config.bool("enable_moe_block", default=False):
        return dense
    count = config.int("num_experts", low=1, high=b.MAX_SIZE)
    normed = b.rms_norms(w, shape)
    router = Router(
        b.router_weight(w, f"{layer}.router.proj.weight", count, shape.hidden),
        b.top_k(config, count, "top_k_experts"),
        normalize=True,
        floor=0.0,
        expert_scale=w.tensor(f"{layer}.router.per_expert_scale", (count,)),
    )
    return DenseAndExperts(
        dense,
        normed(f"{layer}.post_feedforward_layernorm_1"),
        MixtureOfExperts(router, b.experts(w, f"{layer}.experts", count, shape.hidden, b.expert_width(config), act)),
        normed(f"{layer}.pre_feedforward_layernorm_2"),
        Norm(w.tensor(f"{layer}.router.scale", (shape.hidden,)) * shape.hidden**-0.5, shape.eps),
        normed(f"{layer}.post_feedforward_layernorm_2"),
    )
