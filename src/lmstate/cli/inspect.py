"""`lmstate inspect`: what a model is made of, and what its state costs."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING

from lmstate.cli import options
from lmstate.cli.output import size, table

if TYPE_CHECKING:
    from lmstate.models.decoder import Model


def inspect(model: options.ModelName, weights: options.Weights = options.WeightKind.auto) -> None:
    """Show what a model is made of, and what its state costs.

    \b
    Examples:
      lmstate inspect smollm2
      lmstate inspect path/to/model.gguf --weights int8
    """
    loaded = options.load_model(model, weights)
    facts = [
        ("family", loaded.config.family),
        *_size_rows(loaded),
        ("weights", _weights(loaded)),
        ("computes in", str(loaded.dtype).removeprefix("torch.")),
    ]
    table(model, ("", ""), facts)
    print()
    table("state of one row", ("layers", "kind", "bytes per token", "bytes whatever the length"), state_rows(loaded))


def _size_rows(model: Model) -> list[tuple[str, str]]:
    from lmstate.models.fingerprint import weights_in
    from lmstate.ops import Weight

    counted: dict[int, int] = {}  # tied weights count once
    for _, weight in weights_in(_parts(model)):
        shape = weight.shape if isinstance(weight, Weight) else tuple(weight.shape)
        total = 1
        for extent in shape:
            total *= extent
        counted[id(weight)] = total
    config = model.config
    limit = "unknown" if config.max_positions is None else f"{config.max_positions:,} tokens"
    return [
        ("parameters", f"{sum(counted.values()):,}"),
        ("layers", str(len(model.blocks))),
        ("hidden size", f"{config.hidden_size:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("made for", limit),
    ]


def _weights(model: Model) -> str:
    """Bytes of all weights, and of each storage: "70.3 MiB (int4 61.0 MiB, float32 0.1 MiB)"."""
    from lmstate.models.fingerprint import weights_in
    from lmstate.ops import Weight

    seen: dict[int, tuple[str, int]] = {}
    for _, weight in weights_in(_parts(model)):
        kind = weight.kind if isinstance(weight, Weight) else str(weight.dtype).removeprefix("torch.")
        seen[id(weight)] = (kind, weight.nbytes)
    by_kind: Counter[str] = Counter()
    for kind, count in seen.values():
        by_kind[kind] += count
    parts = ", ".join(f"{kind} {size(count)}" for kind, count in by_kind.most_common())
    return f"{size(sum(by_kind.values()))} ({parts})"


def _parts(model: Model) -> tuple[object, ...]:
    return (model.embed, model.blocks, model.norm, model.head, model.head_bias)


def state_rows(model: Model) -> list[tuple[str, ...]]:
    """Of each kind of layer state: how many layers, bytes per token, and bytes that do not grow.

    Measured, not derived: what a state of two tokens holds more than one of one token.
    """
    from lmstate.state import AttentionState

    layers: Counter[str] = Counter()
    growing: Counter[str] = Counter()
    fixed: Counter[str] = Counter()
    for one, two in zip(
        (part for layer in model.new_state(rows=1, capacity=1, rewind=0).layers for part in layer.parts()),
        (part for layer in model.new_state(rows=1, capacity=2, rewind=0).layers for part in layer.parts()),
    ):
        kind = one.kind
        if isinstance(one, AttentionState) and one.span is not None:
            kind = f"{kind} (the last {one.span + 1:,} tokens)"
        layers[kind] += 1
        growing[kind] += two.nbytes() - one.nbytes()
        fixed[kind] += 2 * one.nbytes() - two.nbytes()
    rows: list[tuple[str, ...]] = [(str(layers[kind]), kind, size(growing[kind]), size(fixed[kind])) for kind in layers]
    if len(rows) > 1:
        rows.append((str(layers.total()), "together", size(growing.total()), size(fixed.total())))
    return rows
