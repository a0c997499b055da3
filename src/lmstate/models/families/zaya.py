"""ZAYA1 (Zyphra): convolved attention, one expert a token, and a router whose layers tell each other what they saw.

x = affine(embed(tokens))
x = affine(attention(norm(x))) + affine(x)
x = affine(expert_e(norm(x))) + affine(x)    # e: of the stream and of the router before
logits = head(norm(x))
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.cca import CompressedConvAttention
from lmstate.models.layers.moe import MixtureOfExperts, Router
from lmstate.models.layers.rope import Rope, make_rope
from lmstate.models.model import Block, Model
from lmstate.ops import FloatWeight, Norm, Residual, Weight
from lmstate.state import LayerState, Step

DEFAULTS: b.Defaults = {
    "zaya": {
        **b.EPS,
        "vocab_size": 262_272,
        "hidden_size": 2048,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 40,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "num_experts": 16,
        "tie_word_embeddings": True,
    }
}

KINDS = ("hybrid", "hybrid_sliding")
THETAS = {"hybrid": 5e6, "hybrid_sliding": 1e4}
# Heads are divided by their lengths; this only keeps those of length zero.
UNIT_EPS = 1e-16


@dataclass(frozen=True, eq=False)
class Affine:
    """`(x + bias) * scale`, a number a feature."""

    bias: Tensor  # [E]
    scale: Tensor  # [E]

    def __call__(self, x: Tensor) -> Tensor:
        return (x + self.bias) * self.scale


@dataclass(frozen=True, eq=False)
class Sum:
    """Sum of a layer's output and the stream before it, after an affine map of each."""

    part: Affine
    stream: Affine

    def __call__(self, part: Tensor, stream: Tensor) -> Tensor:
        return self.part(part) + self.stream(stream)


@dataclass(frozen=True, eq=False)
class Skip:
    """The expert that does nothing."""

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        nothing = torch.zeros_like(x)
        return nothing if residual is None else ops.add_residual(residual, nothing)


@dataclass(frozen=True, eq=False)
class ChainedMixture:
    """A mixture whose router reads a few features of the token, and of what the router of the layer before read.

    `down` gives those B features; what came from the layer before is added, `state_scale` times it. `first` and
    `second` are the router's MLP, up to its last matrix, which `experts.router` has.
    """

    down: Weight  # [B, E]
    down_bias: Tensor
    state_scale: Tensor | None  # [B]; None: of the first layer
    norm: Norm
    first: Weight  # [B, B]
    first_bias: Tensor
    second: Weight
    second_bias: Tensor
    experts: MixtureOfExperts

    def __call__(self, x: Tensor, before: Tensor) -> tuple[Tensor, Tensor]:
        """x `[R, T, E]`, and what the layer before read, `[R, T, B]` -> `[R, T, E]`, and what this one read."""
        read = ops.linear(x, self.down, self.down_bias)
        if self.state_scale is not None:
            read = read + before * self.state_scale
        features = _gelu(ops.linear(read, self.first, self.first_bias, norm=self.norm))
        features = _gelu(ops.linear(features, self.second, self.second_bias))
        chosen = self.experts.router(features.flatten(0, -2))
        return self.experts.routed(x.flatten(0, -2), *chosen).view_as(x), read


def _gelu(x: Tensor) -> Tensor:
    """GELU in float64: in float32 torch rounds the last numbers of a vector otherwise, and a choice hangs on them."""
    return F.gelu(x.double()).float()


@dataclass(frozen=True, eq=False)
class Opening:
    """Maps the embedding, and puts beside it that no router has read anything: `[R, T, E]` -> `[R, T, E + B]`."""

    reads_tokens: ClassVar[bool] = False

    affine: Affine
    beside: int  # B

    def __call__(self, x: Tensor, tokens: Tensor, step: Step) -> Tensor:
        return F.pad(self.affine(x), (0, self.beside))


@dataclass(frozen=True, eq=False)
class Closing:
    """Drops what is beside the stream: `[R, T, E + B]` -> `[R, T, E]`."""

    width: int  # E

    def __call__(self, x: Tensor) -> Tensor:
        return x[..., : self.width]


@dataclass(frozen=True, eq=False)
class ChainedBlock(Block):
    """A block whose input and output are the stream, and beside it what its router gets told and tells on.

    `mixer_norm`, `mlp_norm`, and the sums after the parts are of the stream alone.
    """

    fusable: ClassVar[bool] = False

    mixture: ChainedMixture | None = None
    after: tuple[Sum, Sum] | None = None

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        """x float32 `[R, T, E + B]` -> `[R, T, E + B]`."""
        assert self.mixture is not None and self.after is not None and self.mlp_norm is not None
        x, before = x.tensor_split([self.mixture.down.in_features], dim=-1)
        x = self.after[0](self.mixer(x, step, cache, self.mixer_norm), x)
        fed, read = self.mixture(ops.norm(x, self.mlp_norm), before)
        return torch.cat([self.after[1](fed, x), read], dim=-1)


def build(w: WeightLoader) -> Model:
    config = w.config
    shape = b.Dims.of(config)
    normed = b.rms_norms(w, shape)
    kinds = config.strs("layer_types", shape.layers, KINDS, default=["hybrid"] * shape.layers)
    window = config.int("sliding_window", low=1) if "hybrid_sliding" in kinds else None
    ropes = {kind: _rope(config, shape.head_dim, kind).to(w.device) for kind in set(kinds)}

    def affine(prefix: str, part: str) -> Affine:
        return Affine(*(w.tensor(f"{prefix}.{part}_{number}", (shape.hidden,)) for number in ("bias", "scale")))

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        sums = [
            Sum(*(affine(f"{layer}.post_{which}_residual_scale", part) for part in ("hidden_states", "residual")))
            for which in ("attention", "mlp")
        ]
        return ChainedBlock(
            convolved_attention(
                w, f"{layer}.self_attn", shape, ropes[kinds[index]], window if kinds[index] != "hybrid" else None
            ),
            None,
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            mixture=mixture(w, f"{layer}.mlp", shape, first=index == 0),
            after=(sums[0], sums[1]),
        )

    opening = Opening(affine("model", "input_hidden_states"), router_width(config))
    biased = config.bool("lm_head_bias", default=False)
    return b.decoder(w, shape, block, head_biased=biased, entry=opening, exit=Closing(shape.hidden))


def _rope(config: Config, head_dim: int, kind: str) -> Rope:
    """Rope of a kind of layers. Without one in the config, half of a head's features rotate."""
    if config.fields("rope_parameters") is None:
        rope: dict[str, Any] = {"rope_theta": THETAS[kind], "partial_rotary_factor": 0.5}
        config = Config({**config, "rope_parameters": rope}, config.where)
    return make_rope(config, head_dim, kind=kind)


def convolved_attention(
    w: WeightLoader, prefix: str, shape: b.Dims, rope: Rope, window: int | None
) -> CompressedConvAttention:
    config, dim, inside = w.config, shape.head_dim, f"{prefix}.qkv_proj"
    first, second = (config.int(name, low=1, high=256, default=2) for name in ("cca_time0", "cca_time1"))
    heads = shape.heads + shape.kv_heads
    width, half = heads * dim, shape.kv_heads * dim // 2
    names = [f"{inside}.{part}" for part in ("q_proj", "k_proj", "v_proj_delayed", "v_proj_current")]
    heights = (shape.heads * dim, shape.kv_heads * dim, half, half)
    qkv = w.linear(*(f"{name}.weight" for name in names), shape=(heights, shape.hidden))
    biased = config.bool("attention_bias", default=False)
    bias, late = b.biases(w, *(f"{name}.bias" for name in names), wanted=biased), None
    if bias is not None:
        late = bias[width : width + half].clone()
        bias[width : width + half] = 0
    kernel = max(first, 2)  # as long as it takes to see the token before
    taps = torch.zeros(width + half, kernel, dtype=torch.float32, device=w.device)
    taps[:width, kernel - first :] = w.tensor(f"{inside}.conv_qk_depthwise.weight", (width, 1, first))[:, 0]
    taps[width:, -2] = 1.0
    matrices = w.tensor(f"{inside}.conv_qk_grouped.weight", (width, dim, second))
    matrices = matrices.view(heads, dim, dim, second).permute(0, 3, 2, 1).flatten(1, 2)  # [H + K, C * D, D]
    # The first convolution's bias goes through the second: a constant, for that one sees it before a text as well.
    inner = w.tensor(f"{inside}.conv_qk_depthwise.bias", (width,)).view(heads, 1, dim).repeat(1, 1, second)
    through = (inner.double() @ matrices.double()).flatten()
    attention = Attention(
        qkv,
        w.linear(f"{prefix}.o_proj.weight", shape=(shape.hidden, shape.heads * dim)),
        shape.heads,
        shape.kv_heads,
        dim,
        dim**-0.5,
        rope,
        window,
        qkv_bias=bias,
        out_bias=b.biases(w, f"{prefix}.o_proj.bias", wanted=biased),
    )
    return CompressedConvAttention(
        attention,
        taps,
        matrices.contiguous(),
        (w.tensor(f"{inside}.conv_qk_grouped.bias", (width,)).double() + through).float(),
        b.plain_norm(w, dim, UNIT_EPS),
        w.tensor(f"{prefix}.qk_norm.temp", (shape.kv_heads,)),
        late,
    )


def router_width(config: Config) -> int:
    """B, the features that a router reads of a token."""
    return config.int("router_hidden_size", low=1, high=b.MAX_SIZE, default=256)


def mixture(w: WeightLoader, prefix: str, shape: b.Dims, *, first: bool) -> ChainedMixture:
    config, count, router = w.config, b.expert_count(w.config), f"{prefix}.gate"
    config.int("num_experts_per_tok", low=1, high=1, default=1)
    size = router_width(config)
    inner, act = config.int("moe_intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)

    def matrix(name: str, inputs: int, outputs: int = size) -> Weight:
        return FloatWeight(w.tensor(f"{router}.{name}.weight", (outputs, inputs)))

    def bias(name: str) -> Tensor:
        return w.tensor(f"{router}.{name}.bias", (size,))

    last = Router(
        matrix("router_mlp.out_proj", size, count + 1),
        top_k=1,
        e_score_correction_bias=w.tensor(f"{router}.balancing_biases", (count + 1,)),
    )
    return ChainedMixture(
        matrix("down_proj", shape.hidden),
        bias("down_proj"),
        None if first else w.tensor(f"{router}.router_states_scale", (size,)),
        b.norm(w, f"{router}.router_mlp.norm.weight", size, shape.eps),
        matrix("router_mlp.fc1", size),
        bias("router_mlp.fc1"),
        matrix("router_mlp.fc2", size),
        bias("router_mlp.fc2"),
        MixtureOfExperts(last, [*b.experts(w, f"{prefix}.experts", count, shape.hidden, inner, act), Skip()]),
    )
