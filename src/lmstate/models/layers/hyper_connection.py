"""Wide residual streams: a block reads a mixture of N streams, and writes to all (hyper-connections, 2409.19606)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.block import Block
from lmstate.ops import Norm, Weight
from lmstate.state import LayerState, Step


@dataclass(frozen=True, eq=False)
class StreamMixer:
    """Mixes N streams, `[R, T, N * E]` side by side, into one: each weighs `sigmoid(its logit) + eps`.

    The logits are M >= N products of all streams, normed together: `scale * (fn norm(streams)) + base`.
    """

    streams: int
    norm: Norm  # [N * E], without weights
    fn: Weight  # [M, N * E], which stays float32
    base: Tensor  # float32 [M]
    scale: Tensor  # float32 [M]
    eps: float

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 `[R, T, N * E]` -> `[R, T, E]`."""
        return self.mixed(x, self.logits(x))

    def logits(self, x: Tensor) -> Tensor:
        """Float32 `[R, T, M]`."""
        return ops.linear(x, self.fn, norm=self.norm) * self.scale + self.base

    def mixed(self, x: Tensor, logits: Tensor) -> Tensor:
        """The streams mixed by the first N logits."""
        weights = ops.sigmoid(logits[..., : self.streams]) + self.eps
        first, *others = (part * weights[..., n, None] for n, part in enumerate(x.chunk(self.streams, dim=-1)))
        for other in others:  # one after the other: a product would sum them as it likes
            first = first + other
        return first


@dataclass(frozen=True, eq=False)
class HyperConnection(StreamMixer):
    """Connection around a part of a block: it reads one stream, and its output is added to each of N with a weight.

    A weight is `magnitude * sigmoid(its logit) + output_eps`, of the second N logits. With `balancings` a matrix of the
    last N * N logits mixes the streams first. Its rows are softmaxed, then divided in turn by the sums of columns
    and rows until all are near 1 (Sinkhorn and Knopp 1967; DeepSeek-V4).
    """

    magnitude: float = 2.0
    output_eps: float = 0.0
    balancings: int = 0

    def write(self, x: Tensor, logits: Tensor, output: Tensor) -> Tensor:
        """Streams `[R, T, N * E]` with the output `[R, T, E]` of the part that read them -> `[R, T, N * E]`."""
        count, streams = self.streams, x.unflatten(-1, (self.streams, -1))
        weights = self.magnitude * ops.sigmoid(logits[..., count : 2 * count]) + self.output_eps  # [R, T, N]
        if self.balancings:
            shares = self._shares(logits[..., 2 * count :].unflatten(-1, (count, count)))  # [R, T, from, to]
            mixed = streams[..., 0, None, :] * shares[..., 0, :, None]
            for n in range(1, count):
                mixed = mixed + streams[..., n, None, :] * shares[..., n, :, None]
            streams = mixed
        return (streams + output[..., None, :] * weights[..., None]).flatten(-2)

    def _shares(self, logits: Tensor) -> Tensor:
        """Of each stream (rows) in each new one (columns). In float64 and back, as `ops.sigmoid` is."""
        shares = logits.double().softmax(-1) + self.eps
        shares = shares / (shares.sum(-2, keepdim=True) + self.eps)
        for _ in range(self.balancings - 1):
            shares = shares / (shares.sum(-1, keepdim=True) + self.eps)
            shares = shares / (shares.sum(-2, keepdim=True) + self.eps)
        return shares.float()


@dataclass(frozen=True, eq=False, kw_only=True)
class HyperBlock(Block):
    """A block on N streams, `[R, T, N * E]` side by side."""

    fusable: ClassVar[bool] = False

    around_mixer: HyperConnection
    around_mlp: HyperConnection

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        logits = self.around_mixer.logits(x)
        output = self.mixer(self.around_mixer.mixed(x, logits), step, cache, self.mixer_norm)
        x = self.around_mixer.write(x, logits, output)
        logits = self.around_mlp.logits(x)
        return self.around_mlp.write(x, logits, self.fed(self.around_mlp.mixed(x, logits), step))

    def fed(self, x: Tensor, step: Step) -> Tensor:
        """The output of the feed-forward part for a stream `[R, T, E]`."""
        assert self.mlp is not None
        return self.mlp(x, self.mlp_norm)


@dataclass(frozen=True, eq=False)
class RepeatedEmbedding:
    """The embedding in each of N streams."""

    streams: int

    def __call__(self, x: Tensor, tokens: Tensor, step: Step) -> Tensor:
        return torch.cat([x] * self.streams, dim=-1)
