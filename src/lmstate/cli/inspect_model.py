"""Facts of a loaded model for `lmstate inspect`."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import fields

from torch import Tensor

from lmstate.checkpoints.placement import ranges
from lmstate.cli.output import size
from lmstate.generation import Sampler
from lmstate.models.describe import parameter_count, told_context, told_devices
from lmstate.models.fingerprint import weights_in
from lmstate.models.model import Model
from lmstate.models.reads import bytes_per_position, state_reads, weight_reads
from lmstate.ops import Weight
from lmstate.ops.types.block_table import BLOCK_TOKENS
from lmstate.state import AttentionState, LayerState
from lmstate.state.layers.compressed import Entries


def model_rows(model: Model) -> list[tuple[str, str]]:
    """Names and values for `lmstate inspect`."""
    config, totals = model.config, model.weight_totals
    return [
        ("family", config.family),
        ("parameters", f"{totals.parameters:,}"),
        ("layers", str(len(model.blocks))),
        ("hidden size", f"{config.hidden_size:,}"),
        ("vocabulary", f"{config.vocab_size:,}"),
        ("context", told_context(config, model.context_size)),
        ("weights", _weights(totals.nbytes)),
        (
            "computes in",
            f"{str(model.dtype).removeprefix('torch.')} on {told_devices(model.devices, model.network.offloaded)}",
        ),
        ("suggested sampling", _sampling(model)),
        *([] if model.mmproj is None else [("pictures", str(model.mmproj))]),
        *([] if model.commit is None else [("commit", model.commit)]),
        *(("note", note) for note in model.notes),
    ]


def _sampling(model: Model) -> str:
    """Sampling that `lmstate generate` and `chat` use by default."""
    sampler = Sampler.suggested(model.defaults)
    plain = Sampler()
    values = [(part.name, getattr(sampler, part.name)) for part in fields(sampler)]
    told = [f"{name} {value}" for name, value in values if value != getattr(plain, name)]
    return ", ".join(told) or "none: the most likely token"


def _weights(by_kind: Mapping[str, int]) -> str:
    """Bytes of all weights, and of each storage: "70.3 MiB (int4 61.0 MiB, float32 0.1 MiB)"."""
    parts = ", ".join(f"{kind} {size(count)}" for kind, count in by_kind.items())
    return f"{size(sum(by_kind.values()))} ({parts})"


def state_rows(model: Model) -> list[tuple[str, ...]]:
    """A line for each kind of layer state: number of layers, bytes per token, and bytes that do not grow."""
    layers, growing, fixed = state_bytes(model)
    rows: list[tuple[str, ...]] = [(str(layers[kind]), kind, size(growing[kind]), size(fixed[kind])) for kind in layers]
    if len(rows) > 1:
        rows.append((str(layers.total()), "together", size(growing.total()), size(fixed.total())))
    return rows


def state_bytes(model: Model) -> tuple[Counter[str], Counter[str], Counter[str]]:
    """By kind of layer state: the number of layers, bytes per token, and bytes that do not grow.

    Measured, not derived: what a state with room for two blocks of tokens holds more than one with room for one.
    """
    layers: Counter[str] = Counter()
    growing: Counter[str] = Counter()
    fixed: Counter[str] = Counter()
    for one, two in zip(*(_with_room(model, blocks * BLOCK_TOKENS) for blocks in (1, 2))):
        kind = one.kind
        if isinstance(one, AttentionState) and one.window_span is not None:
            kind = f"{kind} (the last {one.window_span + 1:,} tokens)"
        layers[kind] += 1
        if isinstance(one, Entries):  # of several tokens each, so that two blocks of tokens may share a block
            growing[kind] += sum(bytes_per_position(one).values()) // one.rate
            continue
        growing[kind] += (two.nbytes() - one.nbytes()) // BLOCK_TOKENS
        fixed[kind] += 2 * one.nbytes() - two.nbytes()
    return layers, growing, fixed


def _with_room(model: Model, tokens: int) -> list[LayerState]:
    """Layer states with room for `tokens` tokens."""
    state = model.new_state(rewind=0)
    state.plan([[0] * tokens])
    return [part for layer in state.layers for part in layer.leaves()]


LENGTHS = (4000, 32_000)


def read_rows(model: Model) -> list[tuple[str, ...]]:
    """A line for each of two lengths: what a decode step of one row reads there, and that as a share of what it would
    read without an index."""
    weights = weight_reads(model.network, 1)
    layers = model.new_state(rewind=0).layers
    rows = []
    for length in LENGTHS:
        read = state_reads(model.network, layers, [length])
        together, of_all = weights + read.total, weights + read.total_of_all
        sizes = (size(each) for each in (weights, read.attended, read.index, read.fixed, together))
        rows.append((f"{length:,}", *sizes, f"{together / of_all:.0%}"))
    return rows


NUMBERS = re.compile(r"\.\d+(?=\.|$)")


def weight_rows(model: Model) -> list[tuple[str, ...]]:
    """Of matrices of one name, storage and shape: their name, storage, bits a number and of what they multiply, shape,
    how many, bytes.

    Matrices of many blocks are in one row, "blocks 0-3, 7: mixer.qkv"; of many experts, too. The last row is all that
    is not a matrix: norms, biases.
    """
    groups: dict[tuple[str, str, int | None, str], tuple[list[int], list[Weight]]] = {}
    small: list[Tensor] = []
    for name, block, weight in _named(model):
        if isinstance(weight, Tensor):
            small.append(weight)
            continue
        key = name, weight.kind, weight.activations, " x ".join(map(str, weight.shape))
        blocks, weights = groups.setdefault(key, ([], []))
        weights.append(weight)
        if block is not None and block not in blocks:
            blocks.append(block)
    rows: list[tuple[str, ...]] = []
    for (name, kind, activations, shape), (blocks, weights) in groups.items():
        nbytes = sum(weight.nbytes for weight in weights)
        bits = 8 * nbytes / max(1, sum(map(parameter_count, weights)))
        where = f"blocks {ranges(blocks)}: {name}" if blocks else name
        multiplied = "floats" if activations is None else f"{activations} bits"
        rows.append((where, kind, f"{bits:.1f}", multiplied, shape, str(len(weights)), size(nbytes)))
    if small:
        rows.append(
            ("no matrices", "float32", "32.0", "", "", str(len(small)), size(sum(each.nbytes for each in small)))
        )
    return rows


def _named(model: Model) -> Iterator[tuple[str, int | None, Tensor | Weight]]:
    """Every weight once: its name with `*` for what is counted, the number of its block, and it."""
    seen: set[int] = set()
    tied = model.head is model.embed
    for path, weight in weights_in(model.network):
        if id(weight) in seen or path.endswith(".frequencies"):
            continue
        seen.add(id(weight))
        _, part, *rest = path.split(".")
        if part == "blocks":
            block, *rest = rest
            yield NUMBERS.sub(".*", ".".join(rest)), int(block), weight
        else:
            name = "embed, head" if tied and part == "embed" else part
            yield NUMBERS.sub(".*", ".".join([name, *rest])), None, weight
