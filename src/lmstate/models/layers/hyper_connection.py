"""Wide residual streams: a block reads a mixture of N streams, and writes to all (hyper-connections, 2409.19606)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.block import Block
from lmstate.ops import Norm, Weight
from lmstate.state import LayerState, Step


class StreamConnection(Protocol):
    """Connection around a part of a block: the part reads one stream, and its output is added to each of N."""

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Float32 streams `[R, T, N * E]` -> one `[R, T, E]`, and what `write` asks for."""
        ...

    def write(self, x: Tensor, found: Tensor, output: Tensor) -> Tensor:
        """The streams with the part's output `[R, T, E]` -> `[R, T, N * E]`."""
        ...


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

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture `[R, T, E]`, and the logits."""
        logits = self.logits(x)
        return self.mixed(x, logits), logits

    def write(self, x: Tensor, found: Tensor, output: Tensor) -> Tensor:
        """Streams `[R, T, N * E]` with the output `[R, T, E]` of the part that read them -> `[R, T, N * E]`."""
        logits, count, streams = found, self.streams, x.unflatten(-1, (self.streams, -1))
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


@dataclass(frozen=True, eq=False)
class GatedStreams:
    """Mixes N streams by a gate for each of their features (Qwen4-Exp), and may be a connection around a part.

    Each stream is normed, and the mean is taken of streams times `sigmoid(up silu(down streams / N))`. An output is
    added to each stream with the weight `2 sigmoid(inject streams / N)`. All read normed streams.
    """

    streams: int
    norm: Norm  # [E], of each stream, without weights
    weights: Tensor  # float32 [N, E], of what is normed
    down: Weight  # [rank, N * E]
    up: Weight  # [N * E, rank]
    inject: Weight | None = None  # [N, N * E]; None: it only reads

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 `[R, T, N * E]` -> `[R, T, E]`."""
        return self.read(x)[0]

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """The mixture `[R, T, E]`, and the normed streams `[R, T, N * E]`."""
        streams = (ops.norm(x.unflatten(-1, (self.streams, -1)), self.norm) * self.weights).flatten(-2)
        low = ops.linear(streams, self.down) / self.streams
        gated = ops.sigmoid(ops.linear(low * ops.sigmoid(low), self.up)) * streams
        return MeanOfStreams(self.streams)(gated), streams

    def write(self, x: Tensor, found: Tensor, output: Tensor) -> Tensor:
        """Streams `[R, T, N * E]` with the output `[R, T, E]` of the part that read them -> `[R, T, N * E]`."""
        assert self.inject is not None
        weights = 2.0 * ops.sigmoid(ops.linear(found, self.inject) / self.streams)  # [R, T, N]
        return x + (output[..., None, :] * weights[..., None]).flatten(-2)


@dataclass(frozen=True, eq=False, kw_only=True)
class HyperBlock(Block):
    """A block on N streams, `[R, T, N * E]` side by side."""

    fusable: ClassVar[bool] = False

    around_mixer: StreamConnection
    around_mlp: StreamConnection

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        mixed, found = self.around_mixer.read(x)
        x = self.around_mixer.write(x, found, self.mixer(mixed, step, cache, self.mixer_norm))
        if self.mlp is None:
            return x
        mixed, found = self.around_mlp.read(x)
        return self.around_mlp.write(x, found, self.fed(mixed, step))

    def fed(self, x: Tensor, step: Step) -> Tensor:
        """The output of the feed-forward part for a stream `[R, T, E]`."""
        assert self.mlp is not None
        return self.mlp(x, self.mlp_norm)


@dataclass(frozen=True, eq=False)
class MeanOfStreams:
    """The mean of N streams."""

    streams: int

    def __call__(self, x: Tensor) -> Tensor:
        """Float32 `[R, T, N * E]` -> `[R, T, E]`."""
        first, *others = x.chunk(self.streams, dim=-1)
        for other in others:  # one after the other: a sum over them would go as it likes
            first = first + other
        return first / self.streams


@dataclass(frozen=True, eq=False)
class RepeatedEmbedding:
    """The embedding in each of N streams."""

    reads_tokens: ClassVar[bool] = False

    streams: int

    def __call__(self, x: Tensor, tokens: Tensor, step: Step) -> Tensor:
        return torch.cat([x] * self.streams, dim=-1)


@dataclass(frozen=True, eq=False)
class RepeatedTokens(RepeatedEmbedding):
    """The embedding in each of N streams; blocks read the tokens too."""

    reads_tokens: ClassVar[bool] = True

    def __call__(self, x: Tensor, tokens: Tensor, step: Step) -> Tensor:
        step.extras["tokens"] = tokens
        return super().__call__(x, tokens, step)
