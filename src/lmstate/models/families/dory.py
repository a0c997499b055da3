"""Dory: a normalized transformer (nGPT, 2410.01131) that runs its middle layers several times.

x = embed(tokens)
x = y + rate * (norm(attention(y)) - y)          # y = norm(x); norms give vectors of length 1, without weights
x = y + rate * (norm(mlp(y)) - y)                # y = norm(x)
x = norm(x) + norm(x at the first loop's start)  # in front of each loop over the middle layers
logits = scale * head(norm(x))                   # a scale for each token

Each loop keeps keys and values of its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.renamed import Renamed
from lmstate.checkpoints.source import floats
from lmstate.errors import ModelError
from lmstate.models.block import Block
from lmstate.models.families import builders as b
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.rope import Rope, make_rope
from lmstate.models.model import Model
from lmstate.ops import Norm, Residual
from lmstate.state import LayerState, Step

DEFAULTS: b.Defaults = {
    "dory": {
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "initializer_range": 0.0177,
        "ngpt_alpha_init": 0.05,
        "n_input_layers": 8,
        "n_output_layers": 8,
        "n_recurrent_loops": 2,
    }
}
F, S = "full_attention", "sliding_attention"
THETAS = {F: 10_000_000.0, S: 10_000.0}
EPS = 1e-6
MAX_LOOPS = 64
# Published files count attention and feed-forward parts as layers of their own.
PART = re.compile(r"(layers)\.(\d+)\.(mixer|attn_alpha|mlp_alpha)(?=\.|$)")
RATES = {"attn_alpha": "lambda_1", "mlp_alpha": "lambda_2"}


@dataclass(frozen=True, eq=False, kw_only=True)
class ScaledGates(Attention):
    """Attention whose gates are multiplied by `gate_scale` before they open, float32 `[H * D]`."""

    gate_scale: Tensor

    def forward(self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        projected = ops.linear(x, self.qkv, self.qkv_bias, norm=norm)
        qkv, gates = projected.tensor_split([projected.shape[-1] - self.gates], dim=-1)
        return self.mix(torch.cat([qkv, gates * self.gate_scale], dim=-1), step, cache, residual)


@dataclass(frozen=True, eq=False, kw_only=True)
class SphereBlock(Block):
    """A block that moves the stream, a vector of length 1, towards what its parts give, each at rates float32 `[E]`.

    In a loop, the stream of its first start is beside it, `[R, T, 2 * E]`, and goes through as it is.
    """

    fusable: ClassVar[bool] = False

    rates: tuple[Tensor, Tensor]
    unit: Norm  # of the stream, without weights

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        assert self.mlp is not None
        x, beside = x.tensor_split([len(self.rates[0])], dim=-1)
        x = ops.norm(x, self.unit)
        x = x + self.rates[0] * (ops.norm(self.mixer(x, step, cache), self.unit) - x)
        x = ops.norm(x, self.unit)
        x = x + self.rates[1] * (ops.norm(self.mlp(x), self.unit) - x)
        x = torch.cat([x, beside], dim=-1) if beside.shape[-1] else x
        return x if self.output_hook is None else self.output_hook(x, step)


@dataclass(frozen=True, eq=False)
class LoopStart:
    """In front of a loop: the normalized stream, and added to it that of the first start, which is beside it."""

    unit: Norm

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Float32 `[R, T, E]` at the first start, else `[R, T, 2 * E]` -> `[R, T, 2 * E]`."""
        x, first = x.tensor_split([self.unit.weight.shape[-1]], dim=-1)
        x = ops.norm(x, self.unit)
        first = first if first.shape[-1] else x
        return torch.cat([x + first, first], dim=-1)


@dataclass(frozen=True, eq=False)
class LoopsEnd:
    """Behind the last loop: the stream alone."""

    width: int

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """Float32 `[R, T, 2 * E]` -> `[R, T, E]`."""
        return x[..., : self.width].contiguous()


def build(w: WeightLoader) -> Model:
    w = w.over(Renamed(w.source, [(_plain(name), name) for name in w.source.names()], w.source.config))
    w.config = config = _paired(b.completed(w.config, DEFAULTS["dory"]))
    config.str("recurrent_kv_cache_mode", allowed=("per_loop",), default="per_loop")  # others depend on the cut
    shape, base = b.Dims.of(config), config.float("initializer_range", low=1e-9)
    inner, act = config.int("intermediate_size", low=1, high=b.MAX_SIZE), b.activation(config)
    kinds = config.strs("layer_types", shape.layers, (F, S), default=None) or [
        S if (index + 1) % 4 else F for index in range(shape.layers)
    ]
    size, ropes = config.int("sliding_window", low=1), {kind: _rope(w, kind, shape.head_dim) for kind in (F, S)}
    width, unit = shape.heads * shape.head_dim, _unit(w, shape.hidden)
    of_head = _unit(w, shape.head_dim)

    def scaled(name: str, count: int, factor: float) -> Tensor:
        return w.tensor(name, (count,)) * factor

    def mixer(index: int, name: str) -> ScaledGates:
        window = size if kinds[index] == S else None
        plain = b.attention(w, name, shape, ropes[kinds[index]], window=window, gates=("gate_proj", width))
        queries = scaled(f"{name}.sqk", width, shape.head_dim**0.5 / base).square().view(shape.heads, shape.head_dim)
        return ScaledGates(
            *(plain.qkv, plain.out, plain.heads, plain.kv_heads, plain.head_dim, plain.scale, plain.rope, window),
            q_norm=of_head,
            k_norm=of_head,
            qkv_bias=plain.qkv_bias,
            out_bias=plain.out_bias,
            gates=width,
            turned_weight=queries,
            out_norm=_unit(w, width),
            gate_scale=scaled(f"{name}.s_gate", width, shape.hidden**0.25 / base).square(),
        )

    def feed_forward(name: str) -> MLP:
        factors = [scaled(f"{name}.suv_{part}", inner, shape.hidden**0.5) for part in ("gate", "up")]
        plain = b.mlp(w, name, shape.hidden, inner, act)
        return replace(plain, factors=torch.cat(factors), down_norm=_unit(w, inner))

    order, starts, end = _order(config, shape.layers)

    def block(place: int) -> Block:
        index = order[place]
        layer, rate = f"model.layers.{index}", config.float("ngpt_alpha_init", low=0.0) / base
        first, second = (scaled(f"{layer}.lambda_{part}", shape.hidden, rate).abs() for part in (1, 2))
        hook = LoopStart(unit) if place + 1 in starts else LoopsEnd(shape.hidden) if place + 1 == end else None
        return SphereBlock(
            mixer(index, f"{layer}.self_attn"),
            feed_forward(f"{layer}.mlp"),
            output_hook=hook,
            rates=(first, second),
            unit=unit,
        )

    def of_tokens(head: Tensor, scales: Tensor) -> Tensor:
        return floats(head) * (floats(scales).float() / base)[:, None]

    embed = "lm_head.weight" if w.has("lm_head.weight") else "model.embed_tokens.weight"
    w.expect("lm_head.logit_scale", (shape.vocab,))
    head = w.derived(
        "lm_head.weight, scaled", embed, "lm_head.logit_scale", make=of_tokens, shape=(shape.vocab, shape.hidden)
    )
    return b.decoder(w, replace(shape, layers=len(order)), block, final_norm=unit, head=head)


def _plain(name: str) -> str:
    """The name in memory of a tensor, whose file counts parts of layers or layers."""
    name = re.sub(r"^backbone\.", "model.", name).replace(".embeddings.", ".embed_tokens.")
    if found := PART.search(name):
        index, part = int(found[2]), RATES.get(found[3], ("self_attn", "mlp")[int(found[2]) % 2])
        name = f"{name[: found.start()]}layers.{index // 2}.{part}{name[found.end() :]}"
    return name.replace(".self_attn.g_proj.", ".self_attn.gate_proj.")


def _paired(config: Config) -> Config:
    """The config with a kind for each pair of parts, where it counts parts as layers."""
    kinds = config.get("layer_types")
    if not isinstance(kinds, list) or "mlp" not in kinds:
        return config
    counts = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
    halved = {name: config.int(name, low=0, high=b.MAX_SIZE) // 2 for name in counts if config.given(name)}
    return Config({**config, **halved, "layer_types": kinds[::2]}, config.where)


def _order(config: Config, layers: int) -> tuple[Sequence[int], set[int], int]:
    """The layer at each place of the stack, the places where loops start, and the one after the last loop."""
    before, after = (config.int(f"n_{part}_layers", low=1, high=layers) for part in ("input", "output"))
    middle = layers - before - after
    if middle < 1 or config.int("n_recurrent_layers", default=middle) != middle:
        raise ModelError(
            f"{config.where}: {before} input and {after} output layers leave {max(middle, 0)} of {layers} to repeat, "
            f"and n_recurrent_layers is {config.get('n_recurrent_layers')}"
        )
    loops = config.int("n_recurrent_loops", low=1, high=MAX_LOOPS)
    order = [*range(before), *list(range(before, before + middle)) * loops, *range(layers - after, layers)]
    return order, {before + loop * middle for loop in range(loops)}, before + loops * middle


def _unit(w: WeightLoader, width: int) -> Norm:
    """A norm that gives vectors of length 1, as one that gives a mean square of 1."""
    return Norm(torch.full((width,), width**-0.5, dtype=torch.float32, device=w.device), EPS / width)


def _rope(w: WeightLoader, kind: str, head_dim: int) -> Rope:
    return make_rope(w.config, head_dim, theta=THETAS[kind], kind=kind).to(w.device)
