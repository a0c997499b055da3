"""Facts of a loaded model for `lmstate inspect`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import fields

from torch import Tensor

from lmstate.cli.output import size
from lmstate.generation import Sampler
from lmstate.models.describe import bytes_by_kind, parameter_count, stored_weights
from lmstate.models.model import Model
from lmstate.ops import Weight
from lmstate.state import AttentionState


def model_rows(model: Model) -> list[tuple[str, str]]:
    """Names and values for `lmstate inspect`."""
    config, weights = model.config, stored_weights(model.parts)
    limit = "unknown" if config.max_positions is None else f"{config.max_positions:,} tokens"
    return [
        ("family", config.family),
        ("parameters", f"{sum(map(parameter_count, weights)):,}"),
        ("layers", str(len(model.blocks))),
        ("hidden size", f"{config.hidden_size:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("made for", limit),
        ("weights", _weights(weights)),
        ("computes in", str(model.dtype).removeprefix("torch.")),
        ("suggested sampling", _sampling(model)),
    ]


def _sampling(model: Model) -> str:
    """Sampling that `lmstate generate` and `chat` use by default."""
    sampler = Sampler.suggested(model.defaults)
    plain = Sampler()
    values = [(part.name, getattr(sampler, part.name)) for part in fields(sampler)]
    told = [f"{name} {value}" for name, value in values if value != getattr(plain, name)]
    return ", ".join(told) or "none: the most likely token"


def _weights(weights: Sequence[Tensor | Weight]) -> str:
    """Bytes of all weights, and of each storage: "70.3 MiB (int4 61.0 MiB, float32 0.1 MiB)"."""
    by_kind = bytes_by_kind(weights)
    parts = ", ".join(f"{kind} {size(count)}" for kind, count in by_kind.most_common())
    return f"{size(by_kind.total())} ({parts})"


def state_rows(model: Model) -> list[tuple[str, ...]]:
    """Of each kind of layer state: how many layers, bytes per token, and bytes that do not grow.

    Measured, not derived: what a state of two tokens holds more than one of one token.
    """
    layers: Counter[str] = Counter()
    growing: Counter[str] = Counter()
    fixed: Counter[str] = Counter()
    for one, two in zip(
        (part for layer in model.new_state(rows=1, capacity=1, rewind=0).layers for part in layer.leaves()),
        (part for layer in model.new_state(rows=1, capacity=2, rewind=0).layers for part in layer.leaves()),
    ):
        kind = one.kind
        if isinstance(one, AttentionState) and one.window_span is not None:
            kind = f"{kind} (the last {one.window_span + 1:,} tokens)"
        layers[kind] += 1
        growing[kind] += two.nbytes() - one.nbytes()
        fixed[kind] += 2 * one.nbytes() - two.nbytes()
    rows: list[tuple[str, ...]] = [(str(layers[kind]), kind, size(growing[kind]), size(fixed[kind])) for kind in layers]
    if len(rows) > 1:
        rows.append((str(layers.total()), "together", size(growing.total()), size(fixed.total())))
    return rows
