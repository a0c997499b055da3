"""Gemma 3n: several streams of which each block works on one (AltUp, 2301.13310), beside what Gemma 4 kept of it.

s = [x, projections of x]         # x = embed(tokens) * sqrt(E): N streams
s = s + predict(s)                # how, stream a says
y = norm(s_a)
z = (s_a + norm(attention(y)) + y + norm(low rank(y))) / sqrt(2)
z = z + norm(mlp(norm(z)))
s = s + correct(z) * (z - s_a)    # and an input of the layer's own is added to all but the first
logits = softcap(head(norm(mean of s)))
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar

import torch
from torch import Tensor

from lmstate import ops
from lmstate.checkpoints.config import Config
from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families import builders as b
from lmstate.models.families.gemma4 import (
    FULL,
    LOCAL,
    layer_kinds,
    per_layer_input,
    per_layer_inputs,
    shared_layers,
    sharing_attention,
    unread,
)
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.models.layers.per_layer_inputs import PerLayerInput, PerLayerInputs
from lmstate.models.layers.rope import ropes_by_kind
from lmstate.models.model import Block, Model
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import LayerState, Step

DEFAULTS: b.Defaults = {
    "gemma3n_text": {
        "vocab_size": 262_400,
        "hidden_size": 2048,
        "intermediate_size": 16_384,
        "num_hidden_layers": 35,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "head_dim": 256,
        "sliding_window": 512,
        "final_logit_softcapping": 30.0,
        "num_kv_shared_layers": 15,
        "laurel_rank": 64,
    }
}


@dataclass(frozen=True, eq=False)
class SparseMLP:
    """A gated part of whose gates only those count that are `deviations` above their mean."""

    mlp: MLP
    deviations: float

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        gate, up = ops.linear(x, self.mlp.up, self.mlp.up_bias, norm=norm).chunk(2, dim=-1)
        gate = (gate - gate.mean(-1, keepdim=True) - self.deviations * gate.std(-1, correction=0, keepdim=True)).relu()
        hidden = torch.cat([gate, up], dim=-1)
        return ops.linear(hidden, self.mlp.down, self.mlp.down_bias, gate=self.mlp.act, residual=residual)


@dataclass(frozen=True, eq=False, kw_only=True)
class StreamsBlock(Block):
    """A block that works on one of N streams, `[R, T, N * E]` side by side, and from its result corrects them all.

    Before, each stream is predicted from all; how, and how far the correction goes, a small router says. Beside the
    mixer runs a product of low rank (LAuReL, 2411.07501).
    """

    fusable: ClassVar[bool] = False

    streams: int
    active: int
    router_norm: Norm
    router: Tensor  # float32 [N, E]
    predict: Tensor  # float32 [N * N, N]
    correct: Tensor  # float32 [N, N]
    corrected_scale: Tensor | None  # float32 [E]
    left: Weight  # [rank, E]
    right: Weight  # [E, rank]
    low_rank_norm: Norm
    per_layer_input: PerLayerInput

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        streams = x.unflatten(-1, (self.streams, -1))  # [R, T, N, E]
        mix = _small(self._modes(streams[..., self.active, :]), self.predict).unflatten(-1, (self.streams, -1))
        moved = streams[..., 0, None, :] * mix[..., 0, None]
        for n in range(1, self.streams):  # one after the other: a product would sum them as it likes
            moved = moved + streams[..., n, None, :] * mix[..., n, None]
        streams = streams + moved
        active = streams[..., self.active, :]
        assert self.mixer_norm is not None
        given = ops.norm(active, self.mixer_norm)
        beside = given + ops.norm(ops.linear(ops.linear(given, self.left), self.right), self.low_rank_norm)
        mixed = (self.mix(active, step, cache) + beside) * 2**-0.5
        done = self.feed(mixed, mixed)
        share = _small(self._modes(done), self.correct) + 1.0  # [R, T, N]
        streams = streams + (done - active)[..., None, :] * share[..., None]
        first = streams[..., self.active, :]
        first = first if self.corrected_scale is None else first * self.corrected_scale
        added = self.per_layer_input(first, step)
        return torch.cat([streams[..., :1, :], streams[..., 1:, :] + added[..., None, :]], dim=-2).flatten(-2)

    def _modes(self, x: Tensor) -> Tensor:
        """x float32 `[R, T, E]` -> `[R, T, N]`."""
        modes = _small(ops.norm(x, self.router_norm), self.router)
        return modes.double().tanh().float()  # in float64 and back, as `ops.sigmoid` is


@dataclass(frozen=True, eq=False)
class IntoStreams:
    """The embedding, and projections of it as large as it is, side by side: `[R, T, E]` -> `[R, T, N * E]`."""

    reads_tokens: ClassVar[bool] = True

    inputs: PerLayerInputs
    projections: Sequence[Weight]  # [E, E] each

    def __call__(self, x: Tensor, tokens: Tensor, step: Step) -> Tensor:
        self.inputs(x, tokens, step)
        return torch.cat([x, *(_as_large(ops.linear(x, each), x) for each in self.projections)], dim=-1)


@dataclass(frozen=True, eq=False)
class OutOfStreams:
    """The mean of the first stream and of projections of the others, as large as that one."""

    projections: Sequence[Weight]  # [E, E] each

    def __call__(self, x: Tensor) -> Tensor:
        first, *others = x.chunk(len(self.projections) + 1, dim=-1)
        projected = [_as_large(ops.linear(other, each), first) for other, each in zip(others, self.projections)]
        return torch.stack([first, *projected]).mean(0)


def _small(x: Tensor, matrix: Tensor) -> Tensor:
    """x `[..., K]` times a small matrix `[N, K]`, float32, alike for however many tokens."""
    return ops.linear(x, ops.FloatWeight(matrix))


def _as_large(x: Tensor, like: Tensor) -> Tensor:
    """x with the root mean square of another vector."""
    return x * (_mean_square(like).sqrt() / _mean_square(x).clamp(min=1e-5).sqrt())


def _mean_square(x: Tensor) -> Tensor:
    return x.square().mean(-1, keepdim=True)


def build(w: WeightLoader) -> Model:
    config, shape = w.config, b.Dims.of(w.config)
    act = b.activation(config, "hidden_activation", "gelu_pytorch_tanh")
    kinds = layer_kinds(config, shape.layers, full_every=5)
    reads = shared_layers(config, kinds)
    full, local = ropes_by_kind(config, shape.head_dim, theta=1_000_000.0, local_theta=10_000.0)
    ropes = {FULL: full.to(w.device), LOCAL: local.to(w.device)}
    inner, sparsity = _inner(config, shape.layers), _sparsity(config, shape.layers)
    streams = config.int("altup_num_inputs", low=2, high=64, default=4)
    active = config.int("altup_active_idx", high=streams - 1, default=0)
    rank = config.int("laurel_rank", low=1, high=b.MAX_SIZE)
    width = config.int("hidden_size_per_layer_input", low=1, high=b.MAX_SIZE, default=256)
    normed = b.rms_norms(w, shape)

    def feed_forward(index: int, prefix: str) -> FeedForward:
        dense = b.mlp(w, prefix, shape.hidden, inner[index], act)
        return dense if not sparsity[index] else SparseMLP(dense, NormalDist().inv_cdf(sparsity[index]))

    def block(index: int) -> Block:
        layer = f"model.layers.{index}"
        router_norm = normed(f"{layer}.altup.router_norm")
        return StreamsBlock(
            sharing_attention(
                w, f"{layer}.self_attn", shape, ropes[kinds[index]],
                window=config.int("sliding_window", low=1) if kinds[index] == LOCAL else None, reads=reads[index],
            ),
            feed_forward(index, f"{layer}.mlp"),
            normed(f"{layer}.input_layernorm"),
            normed(f"{layer}.pre_feedforward_layernorm"),
            normed(f"{layer}.post_attention_layernorm"),
            normed(f"{layer}.post_feedforward_layernorm"),
            per_layer_input=per_layer_input(w, layer, index, shape, width, act),
            streams=streams,
            active=active,
            router_norm=Norm(router_norm.weight / shape.hidden, shape.eps),
            router=w.tensor(f"{layer}.altup.modality_router.weight", (streams, shape.hidden)),
            predict=w.tensor(f"{layer}.altup.prediction_coefs.weight", (streams**2, streams)),
            correct=w.tensor(f"{layer}.altup.correction_coefs.weight", (streams, streams)),
            corrected_scale=w.tensor(f"{layer}.altup.correct_output_scale", (shape.hidden,))
            if config.bool("altup_correct_scale", default=True)
            else None,
            left=w.linear(f"{layer}.laurel.linear_left.weight", shape=(rank, shape.hidden)),
            right=w.linear(f"{layer}.laurel.linear_right.weight", shape=(shape.hidden, rank)),
            low_rank_norm=normed(f"{layer}.laurel.post_laurel_norm"),
        )  # fmt: skip

    def projections(name: str) -> list[Weight]:
        square = (shape.hidden, shape.hidden)
        return [w.linear(f"model.{name}.{other}.weight", shape=square) for other in range(streams - 1)]

    return b.decoder(
        w,
        shape,
        block,
        embed_scale=shape.hidden**0.5,
        logit_softcap=config.float("final_logit_softcapping", low=1e-6, default=None),
        entry=IntoStreams(per_layer_inputs(w, shape, width), projections("altup_projections")),
        exit=OutOfStreams(projections("altup_unembed_projections")),
        reads=reads,
        ignore=(*unread(reads), "*.altup.correct_output_scale"),
    )


def _inner(config: Config, layers: int) -> Sequence[int]:
    """The width inside each layer's feed-forward part: one for all, or one each."""
    if isinstance(config.get("intermediate_size"), (list, tuple)):
        return config.ints("intermediate_size", layers, low=1, high=b.MAX_SIZE)
    return [config.int("intermediate_size", low=1, high=b.MAX_SIZE)] * layers


def _sparsity(config: Config, layers: int) -> Sequence[float]:
    """The share of each layer's gates that does not count; where the config says nothing, much of the first ten."""
    default = [0.95] * 10 + [0.0] * (layers - 10) if layers > 10 else [0.0] * layers
    return config.floats("activation_sparsity_pattern", layers, low=0.0, high=0.999999, default=None) or default
