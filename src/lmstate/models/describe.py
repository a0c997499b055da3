"""A model in a few lines, for `repr`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lmstate.checkpoints.placement import ranges, runs_of
from lmstate.models.config import ModelConfig
from lmstate.models.fingerprint import weights_in
from lmstate.models.network import Network
from lmstate.ops import Weight


def stored_weights(parts: Any) -> list[Tensor | Weight]:
    """Every weight of a tree once (an embedding may be the head too); not rope frequencies, which a config gives."""
    found = {id(weight): weight for path, weight in weights_in(parts) if not path.endswith(".frequencies")}
    return list(found.values())


def parameter_count(weight: Tensor | Weight) -> int:
    """Elements of a weight, however they are stored."""
    return weight.numel() if isinstance(weight, Tensor) else weight.out_features * weight.in_features


def bytes_by_kind(weights: Sequence[Tensor | Weight]) -> Counter[str]:
    """Bytes of each storage: int4, bfloat16, float32, ..."""
    kinds: Counter[str] = Counter()
    for weight in weights:
        kinds[str(weight.dtype).removeprefix("torch.") if isinstance(weight, Tensor) else weight.kind] += weight.nbytes
    return kinds


@dataclass(frozen=True)
class WeightTotals:
    """The weights of a model together. `nbytes`: by storage, the largest first."""

    parameters: int
    nbytes: dict[str, int]

    @staticmethod
    def of(network: Network) -> WeightTotals:
        """Those of a network."""
        weights = stored_weights(network)
        return WeightTotals(sum(map(parameter_count, weights)), dict(bytes_by_kind(weights).most_common()))


def describe(name: str, network: Network, context_size: int | None, dtype: torch.dtype) -> str:
    """Family, size, layers by kind, storage of the weights."""
    config, blocks, heads = network.config, network.blocks, len(network.heads)
    totals = WeightTotals.of(network)
    kinds = Counter(block.mixer.kind for block in blocks)
    layers = ", ".join(f"{count} {kind}" for kind, count in kinds.items())
    stored = ", ".join(f"{kind} {size / 2**20:,.1f} MiB" for kind, size in totals.nbytes.items())
    layers += f"; {heads} multi-token prediction" if heads else ""
    return (
        f"Model({name or config.family}: {config.family}, {totals.parameters:,} parameters\n"
        f"  layers: {len(blocks)} ({layers}), hidden size {config.hidden_size:,}, vocabulary {config.vocab_size:,}\n"
        f"  weights: {stored}; computes in {str(dtype).removeprefix('torch.')} on "
        f"{told_devices(network.devices, network.offloaded)}\n"
        f"  context: {told_context(config, context_size)})"
    )


def told_devices(devices: Sequence[torch.device], offloaded: Sequence[int] = ()) -> str:
    """Name the devices of blocks, with the blocks of each where there are several.

    offloaded: the blocks whose weights are in host memory.
    """
    runs = runs_of(devices)
    behind = f"; weights of blocks {ranges(offloaded)} in host memory" if offloaded else ""
    if len(runs) == 1:
        return f"{devices[0]}{behind}"
    return ", ".join(f"{device} (blocks {ranges(range(first, stop))})" for device, first, stop in runs) + behind


def told_context(config: ModelConfig, size: int | None) -> str:
    """Name the tokens that a model was made for, and those that it takes."""
    made_for = config.max_positions
    if made_for is None:
        return "any length" if size is None else f"{size:,} tokens"
    if size is None or size == made_for:
        return f"made for {made_for:,} tokens"
    return f"{size:,} tokens, {'stretched by YaRN from' if size > made_for else 'of'} {made_for:,}"
