"""Wide residual streams under the names that DeepSeek-V4 and Qwen4-Exp have for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from lmstate.checkpoints.loader import WeightLoader
from lmstate.models.families.builders.dims import MAX_SIZE, Dims
from lmstate.models.families.builders.moe import router_weight
from lmstate.models.families.builders.norms import plain_norm
from lmstate.models.layers.hyper_connection import GatedStreams, HyperConnection, StreamMixer


@dataclass(frozen=True)
class Streams:
    """Number of streams, and how parts of blocks read and write them: see `HyperConnection`."""

    count: int
    eps: float
    magnitude: float = 2.0
    output_eps: float = 0.0
    balancings: int = 0


def hyper_connection(w: WeightLoader, prefix: str, shape: Dims, streams: Streams) -> HyperConnection:
    """The connection around a part of a block: `fn`, `base`, and in `scale` a number for each kind of weight."""
    count = streams.count
    kinds = [count, count, count * count] if streams.balancings else [count, count]
    mixer = _mixer(w, f"{prefix}.", shape, streams, kinds)
    return HyperConnection(
        count, mixer.norm, mixer.fn, mixer.base, mixer.scale, mixer.eps, streams.magnitude, streams.output_eps,
        streams.balancings,
    )  # fmt: skip


def hyper_head(w: WeightLoader, prefix: str, shape: Dims, streams: Streams) -> StreamMixer:
    """The mixer after the last block: `hc_fn`, `hc_base` and `hc_scale`."""
    return _mixer(w, f"{prefix}.hc_", shape, streams, [streams.count])


def gated_streams(w: WeightLoader, prefix: str, shape: Dims, count: int, *, reads_only: bool = False) -> GatedStreams:
    """Streams mixed by gates, under Qwen4-Exp's names. `reads_only`: nothing is added to them."""
    width, rank = count * shape.hidden, w.config.int("hc_lowrank", low=1, high=MAX_SIZE, default=320)
    return GatedStreams(
        count,
        plain_norm(w, shape.hidden, shape.eps),
        w.tensor(f"{prefix}.hc_norm.weight", (width,)).view(count, shape.hidden) + 1.0,
        w.linear(f"{prefix}.input_mix_weight_down.weight", shape=(rank, width)),
        w.linear(f"{prefix}.input_mix_weight_up.weight", shape=(width, rank)),
        None if reads_only else router_weight(w, f"{prefix}.block_inject_weight.weight", count, width),
    )


def _mixer(w: WeightLoader, prefix: str, shape: Dims, streams: Streams, kinds: list[int]) -> StreamMixer:
    """`kinds`: how many logits of each kind there are."""
    width, logits = streams.count * shape.hidden, sum(kinds)
    scale = w.tensor(f"{prefix}scale", (len(kinds),))
    return StreamMixer(
        streams.count,
        plain_norm(w, width, shape.eps),
        router_weight(w, f"{prefix}fn", logits, width),
        w.tensor(f"{prefix}base", (logits,)),
        scale.repeat_interleave(torch.tensor(kinds, device=scale.device), output_size=logits),
        streams.eps,
    )
