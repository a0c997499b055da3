"""Short steps as CUDA graphs, which belong to a model and serve every state, fork and engine of it.

A graph is recorded at the first step of its key: how many rows, tokens and blocks it has room for, each a power of two,
and how layers store what they remember. It runs the blocks' own code on stand-ins of the layer states. These read
blocks by tables of addresses, and carries from tensors that never move, which each step fills (`StepBuffers`). So a
replay launches the kernels of an eager step, and gives its bits.

A graph may also hold several steps of one token, each of which reads the likeliest token after the step before it.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from functools import cached_property
from threading import Lock
from typing import Any, NamedTuple, Protocol, TypeAlias, cast

import numpy as np
import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.block import Block, new_layers
from lmstate.models.fingerprint import weights_in
from lmstate.ops import Weight, dispatch
from lmstate.ops.cuda.graphs import GraphPool
from lmstate.ops.cuda.tables import StepBuffers
from lmstate.ops.fused.graph import fuses
from lmstate.ops.types.block_table import BLOCK_TOKENS, BlockTable
from lmstate.ops.types.slab_table import AddressTable, SlabTable
from lmstate.ops.types.sublayers import pointers, requires_grad
from lmstate.ops.weights.lora import LoraWeight
from lmstate.state import LayerState, Layout, RecurrentState, Step
from lmstate.state.kv.policies.storage import Quantized
from lmstate.state.kv.quantized.attention import QuantizedAttentionState
from lmstate.state.kv.quantized.blocks import BlockState
from lmstate.state.layers.attention import AttentionState
from lmstate.state.layers.block_store import BlockStore
from lmstate.state.layers.last_input import LastInputState
from lmstate.state.layers.latent import LatentState
from lmstate.state.layers.shared_kv import SharedState
from lmstate.state.layers.slots import SlotState
from lmstate.state.step import DeviceStep

MOST_ROWS, MOST_WIDTH = 64, 8
MOST_LOGITS = 1 << 25
"""Logits that steps of one graph give together."""
FEWEST_ENTRIES = 8
STORING: tuple[type, ...] = (AttentionState, QuantizedAttentionState, BlockState, LatentState)
SCANNING: tuple[type, ...] = (RecurrentState, LastInputState)

log = logging.getLogger(__name__)


class GraphedNetwork(Protocol):
    """A network, as `models.network` has it: weights, and the stream of a step through them."""

    @property
    def embed(self) -> Weight: ...

    @property
    def blocks(self) -> tuple[Block, ...]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def devices(self) -> list[torch.device]: ...

    @property
    def parts(self) -> tuple[Any, ...]: ...

    @property
    def dynamic_ropes(self) -> Sequence[object]: ...

    @property
    def max_positions(self) -> int | None: ...

    def stream(self, tokens: Tensor, step: Step, layers: Sequence[LayerState]) -> Tensor: ...

    def logits(self, hidden: Tensor) -> Tensor: ...


class Key(NamedTuple):
    """Room of a graph, and the kinds of the layer states that it serves."""

    rows: int
    width: int
    entries: int
    kinds: tuple[Hashable, ...]
    follows: bool = False  # whether each token but the first is the likeliest one after the token before it


class StepGraphs:
    """The graphs of one network. One step runs at a time: they share their memory."""

    def __init__(self, network: GraphedNetwork) -> None:
        self._network = network
        self._made: dict[Key, StepGraph | None] = {}
        """None: a step of this key waits for the device, and runs eagerly."""
        self._pool = GraphPool()
        self._lock = Lock()
        self._addresses: list[int] = []

    def __deepcopy__(self, memo: dict[int, object]) -> StepGraphs:
        return StepGraphs(copy.deepcopy(self._network, memo))

    def run(
        self, tokens: Tensor, step: Step, layers: Sequence[LayerState], keep: Sequence[int] | None
    ) -> Tensor | None:
        """The stream after the blocks of a step, as `Network.stream` gives it; None where no graph runs it."""
        x = self._run(tokens, step, layers, False)
        return x if x is None or keep is None else ops.last_tokens(x, step.counts, keep)

    def follow(
        self, tokens: Tensor, step: Step, layers: Sequence[LayerState]
    ) -> tuple[list[list[int]], Tensor] | None:  # fmt: skip
        """Run T steps of one token each in one replay: tokens int64 `[R, 1]`, and then the likeliest ones.

        Returns the T tokens that each row read, and logits float32 `[R, T, V]`; None where no graph runs it. A row of
        `step` brings T tokens or none.
        """
        logits = self._run(tokens, step, layers, True)
        if logits is None:
            return None
        later = ops.argmax(logits[:, :-1].flatten(0, 1))[1].view(step.rows, -1).tolist()
        return [own + more for own, more in zip(tokens.tolist(), later)], logits

    def _run(self, tokens: Tensor, step: Step, layers: Sequence[LayerState], follows: bool) -> Tensor | None:
        if not self._takes(step, layers):
            return None
        leaves = [leaf for layer in layers for leaf in layer.leaves()]
        kinds = tuple(map(kind, leaves))
        if None in kinds:
            return None
        blocks = -(-step.longest // BLOCK_TOKENS)
        key = Key(power(step.rows), power(step.width), power(blocks, FEWEST_ENTRIES), kinds, follows)
        scans = [leaf.single_scan_carry(step) for leaf in leaves if isinstance(leaf, RecurrentState)]
        if any(carry is None for carry in scans):  # a checkpoint is inside the step
            return None
        if torch.is_grad_enabled() and _is_tracked(leaves, cast(Scans, scans)):
            return None
        with self._lock:
            held = self._held
            if held is None or not self._is_valid(held):
                return None
            self._pool.enter(self._network.device)
            if key in self._made:
                graph = self._made[key]
            else:
                graph = self._recorded(key, tokens, step, layers, cast(Scans, scans))
            return None if graph is None else graph.run(tokens, step, leaves, cast(Scans, scans))

    def _takes(self, step: Step, layers: Sequence[LayerState]) -> bool:
        network = self._network
        if network.embed.device.type != "cuda" or type(step) is not Step or len(layers) != len(network.blocks):
            return False
        if not 0 < step.width <= MOST_WIDTH or not 0 < step.rows <= MOST_ROWS or step.media or not fuses():
            return False
        if any(block.offload is not None for block in network.blocks):
            return False
        if len(set(network.devices)) > 1 or network.dynamic_ropes or network.max_positions is not None:
            return False
        return dispatch.gpu(network.embed.storage)

    @cached_property
    def _held(self) -> list[Tensor] | None:
        """All that graphs read beside a step. None: adapters, whose rows are chosen on the host."""
        held = [part for _, part in weights_in(self._network.parts)]
        if any(isinstance(part, LoraWeight) for part in held):
            return None
        return [part.storage if isinstance(part, Weight) else part for part in held]

    def _is_valid(self, held: list[Tensor]) -> bool:
        """Whether no gradient is to follow. Graphs of weights that moved are dropped."""
        if (addresses := pointers(held)) != self._addresses:
            self._made.clear()
            self._pool = GraphPool()
            self._addresses = addresses
        return not (torch.is_grad_enabled() and any(map(requires_grad, held)))

    def _recorded(
        self, key: Key, tokens: Tensor, step: Step, layers: Sequence[LayerState], scans: Scans
    ) -> StepGraph | None:
        try:
            graph = StepGraph(self._network, key, layers)
            graph.fill(tokens, step, [leaf for layer in layers for leaf in layer.leaves()], scans)
            graph.record(self._pool)
        except Exception as error:  # Triton has errors of its own; nothing is committed yet
            log.warning("steps of %d rows run eagerly: %s", key.rows, str(error).partition("\n")[0])
            self._made[key] = None
            return None
        self._made[key] = graph
        return graph


Scans: TypeAlias = list[tuple[Tensor, ...]]
"""The carries that the recurrent layers of a step scan from."""


def _is_tracked(leaves: Sequence[LayerState], scans: Scans) -> bool:
    """Whether gradients follow what layers remember."""
    stores = stores_of(leaves)
    return any(part.requires_grad for carry in scans for part in carry) or any(
        leaf.stored(name).requires_grad for leaf in stores for name in leaf.buffers
    )


class StepGraph:
    """One graph: its buffers, and the stand-ins of the layer states that it runs on."""

    def __init__(self, network: GraphedNetwork, key: Key, layers: Sequence[LayerState]) -> None:
        self.network, self.key = network, key
        self._replay: Callable[[], None] | None = None
        device = network.device
        leaves = [leaf for layer in layers for leaf in layer.leaves()]
        count = sum(len(leaf.buffers) for leaf in stores_of(leaves))
        self.buffers = StepBuffers(key.rows, 1 if key.follows else key.width, count, key.entries, device)
        layout = Layout(key.rows, device, torch.float32, capacity=1, rewind=0, chunk=key.width, static=True)
        self.layers = new_layers(network.blocks, [_layout_like(layer, layout) for layer in layers])
        own = [leaf for layer in self.layers for leaf in layer.leaves()]
        for leaf, like in zip(own, leaves, strict=True):
            if type(leaf) is not type(like):
                raise RuntimeError(f"layers store {type(leaf).__name__} and {type(like).__name__} side by side")
            if isinstance(leaf, BlockState):
                leaf.layout = cast(BlockState, like).layout
        tables = iter(self.buffers.tables)
        for store, given in zip(stores_of(own), stores_of(leaves), strict=True):
            store.layout, store.buffers = given.layout, given.buffers
            made: dict[str, BlockTable] = {}
            for name, buffer in given.buffers.items():
                heads = buffer.heads[0] if buffer.heads else 1
                made[name] = AddressTable(next(tables), heads, buffer.width, buffer.zeros(0))
            store.content = Addressed(made)
        self.scanning = [leaf for leaf in own if isinstance(leaf, RecurrentState)]

    def fill(self, tokens: Tensor, step: Step, leaves: Sequence[LayerState], scans: Scans) -> None:
        """Send what a step reads: everything but weights."""
        arrays = []
        for store in stores_of(leaves):
            for name in store.buffers:
                table = store.stored(name)
                assert isinstance(table, SlabTable)
                table.prepare_write(step.starts_t, step.counts_t)
                arrays.append(table.address_array())
        # np.asarray: ids of the host, or those of a device, which it waits for.
        self.buffers.send(np.asarray(tokens.cpu()), step.starts, step.counts, arrays)
        into = [part[: step.rows] for part in self._carries("carry")]
        if into:
            torch._foreach_copy_(into, [part for carry in scans for part in carry])

    def record(self, pool: GraphPool) -> None:
        forward = self._followed if self.key.follows else self._forward
        forward()  # compiles the kernels
        self._replay, (self.out, self.inputs) = pool.record(forward, self.network.device)

    def run(self, tokens: Tensor, step: Step, leaves: Sequence[LayerState], scans: Scans) -> Tensor:
        """The stream after the blocks, float32 `[R, T, E]`, or logits where tokens follow; recurrent layers are told
        what was scanned."""
        assert self._replay is not None
        self.fill(tokens, step, leaves, scans)
        self._replay()
        rows, width = step.rows, step.width
        results = [self.out[:rows, :width]]
        for stand_in, inputs in zip(self.scanning, self.inputs):
            results += [inputs[:rows, :width], *(part[:rows] for part in stand_in.next_carry)]
        own = [torch.empty_like(each, memory_format=torch.contiguous_format) for each in results]
        torch._foreach_copy_(own, results)
        x, *rest = own
        parts = iter(rest)
        for leaf in leaves:
            if isinstance(leaf, RecurrentState):
                inputs = next(parts)
                leaf.record(step, step.packed(inputs), tuple(next(parts) for _ in leaf.carry))
        return x

    def _forward(self) -> tuple[Tensor, list[Tensor]]:
        """The stream, and the inputs of recurrent layers."""
        buffers = self.buffers
        step = DeviceStep.at(buffers.starts, buffers.counts, self.key.width)
        out = self.network.stream(buffers.tokens, step, self.layers)
        return out, [leaf.step_inputs for leaf in self.scanning]

    def _followed(self) -> tuple[Tensor, list[Tensor]]:
        """The logits float32 `[R, T, V]` of steps that read what the step before gave, and inputs as in `_forward`."""
        buffers, tokens = self.buffers, self.buffers.tokens
        logits: list[Tensor] = []
        inputs: list[list[Tensor]] = [[] for _ in self.scanning]
        for at in range(self.key.width):
            if at:
                if self.scanning:
                    torch._foreach_copy_(self._carries("carry"), self._carries("next_carry"))
                tokens = ops.argmax(logits[-1])[1][:, None]
            step = DeviceStep.at(buffers.starts + at, buffers.counts.clamp(max=1), 1)
            x = self.network.stream(tokens, step, self.layers)
            logits.append(self.network.logits(x[:, 0]))
            for leaf, own in zip(self.scanning, inputs):
                own.append(leaf.step_inputs[:, :1].clone())
        return torch.stack(logits, 1), [torch.cat(own, 1) for own in inputs]

    def _carries(self, name: str) -> list[Tensor]:
        return [part for leaf in self.scanning for part in getattr(leaf, name)]


def widest_run(rows: int, vocab_size: int) -> int:
    """The most steps of one token that a graph of this number of rows holds."""
    return min(MOST_WIDTH, MOST_LOGITS // max(1, power(rows) * vocab_size)) if rows <= MOST_ROWS else 1


class Addressed(BlockStore):
    """The tables of a stand-in's buffers; blocks are reserved and committed by the state that it stands for."""

    def __init__(self, tables: dict[str, BlockTable]) -> None:
        self.tables, self.views = tables, []


def stores_of(leaves: Sequence[LayerState]) -> list[SlotState]:
    """The parts of layer states that store positions in blocks."""
    parts: list[LayerState] = []
    for leaf in leaves:
        parts += leaf.members if isinstance(leaf, BlockState) else [leaf]
    return [part for part in parts if isinstance(part, SlotState)]


def _layout_like(layer: LayerState, layout: Layout) -> Layout:
    """A stand-in's layout: one under which it stores what the layer does."""
    first, *others = layer.leaves()
    if isinstance(first, BlockState) and not others:
        return replace(layout, kv=Quantized(first.bits), static=False)
    coded = any(isinstance(leaf, QuantizedAttentionState) for leaf in (first, *others))
    return replace(layout, kv=Quantized(bits=8)) if coded else layout


def kind(leaf: LayerState) -> Hashable | None:
    """The storage of a layer state, by which graphs are told apart; None where no stand-in of it runs in a graph."""
    if type(leaf) in STORING:
        stores = stores_of([leaf])
        blocks = all(
            isinstance(each.content, BlockStore) and each.content.spec.slabs is not None for each in stores
        )  # fmt: skip
        return (type(leaf), tuple(tuple(each.buffers.values()) for each in stores)) if blocks else None
    return type(leaf) if type(leaf) in (*SCANNING, SharedState) else None


def power(count: int, least: int = 1) -> int:
    """The smallest power of two that is at least `count`."""
    return max(least, 1 << (count - 1).bit_length())
