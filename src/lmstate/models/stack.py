"""A stack of blocks, compiled once into a plan: segments of sublayers that run as one native call.

Blocks are plain code, which `run_eager` runs. A `Plan` gives the same to the bit (but for the sigmoid of attention's
gate). It takes each block's description of its parts (`sublayers`), and groups those that follow each other. It falls
back to the block's own code where a native body does not know a part, or cannot take it in this step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, pairwise
from operator import is_
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.block import Block, at_hand
from lmstate.models.layers.base import FusableLayer, add_sublayers, simple_caches
from lmstate.state import KeyValueState, LayerState, RecurrentState, Step


def run_eager(
    blocks: Sequence[Block], x: Tensor, step: Step, layers: Sequence[LayerState], keep: Sequence[int] | None = None
) -> Tensor:
    """The blocks one after the other: x float32 `[R, T, E]` -> `[R, T, E]`.

    keep: how many of each row's last tokens are read; the result is the stream of those, as
    `ops.last_tokens` gives them. None: of all.
    """
    whole = blocks if keep is None else blocks[:-1]
    for block, cache in zip(whole, layers):
        x = at_hand(block, partial(_run_on, arrived(x, block), step.on(block.device), cache))
    if keep is None:
        return x
    last = blocks[-1]
    x, step = arrived(x, last), step.on(last.device)
    return at_hand(last, lambda block: block.last(x, step, layers[len(whole)], keep))


def _run_on(x: Tensor, step: Step, cache: LayerState, block: Block) -> Tensor:
    return block(x, step, cache)


def arrived(x: Tensor, block: Block) -> Tensor:
    """The stream on the device of a block."""
    return x if block.device is None else x.to(block.device)


class PlanOwner(Protocol):
    """A state: it has the layers' caches, and keeps the plan that runs them."""

    decode_plan: object


def run_stack(
    blocks: Sequence[Block],
    x: Tensor,
    step: Step,
    layers: Sequence[LayerState],
    owner: PlanOwner | None,
    keep: Sequence[int] | None = None,
) -> Tensor:
    """Run the blocks by the owner's plan if it still holds, else by a new one; eagerly without an owner.

    keep: as of `run_eager`.
    """
    if owner is None or torch.compiler.is_compiling():
        return run_eager(blocks, x, step, layers, keep)
    plan = owner.decode_plan
    if not isinstance(plan, Plan) or not plan.holds(blocks):
        plan = owner.decode_plan = plan_of(blocks)
    return plan.run(x, step, layers, keep)


def run_tapped(
    blocks: Sequence[Block],
    x: Tensor,
    step: Step,
    layers: Sequence[LayerState],
    owner: PlanOwner | None,
    taps: tuple[int, ...],
) -> tuple[Tensor, list[Tensor]]:
    """`run_stack`, and the stream in front of the blocks of these numbers, which rise."""
    bounds = [0, *taps, len(blocks)]
    if owner is None or torch.compiler.is_compiling():
        parts = [partial(run_eager, blocks[first:stop]) for first, stop in pairwise(bounds)]
        runs: list[Callable[[Tensor, Step, Sequence[LayerState]], Tensor]] = [*parts]
    else:
        plans = owner.decode_plan
        if not isinstance(plans, TappedPlan) or plans.taps != taps or not plans.holds(blocks):
            plans = owner.decode_plan = TappedPlan(blocks, taps)
        runs = [plan.run for plan in plans.parts]
    streams = []
    for run, (first, stop) in zip(runs, pairwise(bounds)):
        x = run(x, step, layers[first:stop]) if first < stop else x  # a tap may be behind the last block
        streams.append(x)
    return x, streams[:-1]


class Plan:
    """A compiled stack. It belongs to one state: what it captured points to that one's caches."""

    def __init__(self, blocks: Sequence[Block]):
        self.blocks = tuple(blocks)
        self.segments: list[FusedSegment | EagerSegment] | None = None

    def holds(self, blocks: Sequence[Block]) -> bool:
        """Whether it is of these very blocks."""
        return len(blocks) == len(self.blocks) and all(map(is_, blocks, self.blocks))

    def run(self, x: Tensor, step: Step, layers: Sequence[LayerState], keep: Sequence[int] | None = None) -> Tensor:
        """Run the segments in order. Shapes as in `run_eager`."""
        graph = ops.FusedGraph(x, step.starts_t, step.counts_t, step.new_tokens)
        if not graph.enabled:
            return run_eager(self.blocks, x, step, layers, keep)
        if self.segments is None:
            self.segments = compile_blocks(self.blocks)
        *before, last = self.segments
        for segment in before:
            segment.run(graph, step, layers)
        return last.finish(graph, step, layers, keep)

    def __deepcopy__(self, memo: object) -> None:
        """None: a copy of a state makes its own, of its own caches."""

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()


class TappedPlan(Plan):
    """Plans of the blocks between taps, where the stream is read."""

    def __init__(self, blocks: Sequence[Block], taps: tuple[int, ...]):
        super().__init__(blocks)
        self.taps = taps
        self.parts = [plan_of(blocks[first:stop]) for first, stop in pairwise([0, *taps, len(blocks)])]


class SpreadPlan(Plan):
    """Plans of the runs of blocks on one device; the stream moves between them."""

    def __init__(self, blocks: Sequence[Block]):
        super().__init__(blocks)
        self.parts = [Plan(list(run)) for _, run in groupby(blocks, lambda block: block.device)]

    def run(self, x: Tensor, step: Step, layers: Sequence[LayerState], keep: Sequence[int] | None = None) -> Tensor:
        first = 0
        for part in self.parts:
            block, stop = part.blocks[0], first + len(part.blocks)
            kept = keep if stop == len(self.blocks) else None
            x = part.run(arrived(x, block), step.on(block.device), layers[first:stop], kept)
            first = stop
        return x


def plan_of(blocks: Sequence[Block]) -> Plan:
    """The plan of blocks on one device or on several."""
    return SpreadPlan(blocks) if len({block.device for block in blocks}) > 1 else Plan(blocks)


@dataclass(frozen=True, eq=False)
class Part:
    """Sublayers of a block that are fused together or not at all, and the block's own code for them."""

    index: int  # of the block
    sublayers: tuple[ops.Sublayer, ...]  # empty: never fused
    eager: Callable[[Tensor, Step, LayerState], Tensor]
    mixer: FusableLayer | None = None  # which the first of the sublayers are, if it is in the part
    mixes: bool = True  # whether a token's output depends on other tokens, or on its place in the step

    def run(self, graph: ops.FusedGraph, step: Step, layers: Sequence[LayerState]) -> None:
        """Run eagerly, after all that is pending."""
        graph.restart(self.eager(graph.flush(), step, layers[self.index]))

    def fuse(self, graph: ops.FusedGraph, step: Step, layers: Sequence[LayerState]) -> bool:
        """Add it to the graph; False where it cannot be fused in this step."""
        if self.mixer is None:
            return add_sublayers(graph, self.sublayers, (), step, None)
        if not self.mixer.fuses(step):
            return False
        caches = simple_caches(layers[self.index])
        return add_sublayers(graph, self.sublayers, caches, step, self.mixer.rope_tables(step))


def compile_blocks(blocks: Sequence[Block]) -> list[FusedSegment | EagerSegment]:
    """The segments of a stack: parts that native bodies know, and between them those that they do not."""
    parts = [part for index, block in enumerate(blocks) for part in _parts(index, block)]
    grouped = groupby(parts, lambda part: bool(part.sublayers))
    return [FusedSegment(list(group)) if fused else EagerSegment(list(group)) for fused, group in grouped]


def _parts(index: int, block: Block) -> Iterator[Part]:
    if not block.fusable:
        yield Part(index, (), block)
        return
    mixer = block.mixer if isinstance(block.mixer, FusableLayer) else None
    mixing, feeding = (each if ops.packable(each) else () for each in (block.mixer_sublayers, block.mlp_sublayers))
    if block.parallel and block.mlp is not None:
        both = (*mixing, *feeding) if mixing and feeding else ()
        yield Part(index, both, lambda x, step, cache: block.feed(x, block.mix(x, step, cache)), mixer)
    else:
        yield Part(index, mixing, block.mix, mixer)
        if block.mlp is not None:
            yield Part(index, feeding, lambda x, step, cache: block.feed(x, x), mixes=False)
    if (hook := block.output_hook) is not None:
        yield Part(index, (), lambda x, step, cache: hook(x, step))


class EagerSegment:
    """Parts that run one by one."""

    def __init__(self, parts: list[Part]):
        self.parts = parts

    def run(self, graph: ops.FusedGraph, step: Step, layers: Sequence[LayerState]) -> None:
        for part in self.parts:
            part.run(graph, step, layers)

    def finish(
        self, graph: ops.FusedGraph, step: Step, layers: Sequence[LayerState], keep: Sequence[int] | None
    ) -> Tensor:
        """Run as the last of a stack: its stream, as `run_eager` gives it."""
        if keep is None or self.parts[-1].mixes:
            self.run(graph, step, layers)
            return graph.flush(keep)
        EagerSegment(self.parts[:-1]).run(graph, step, layers)
        last, x = self.parts[-1], graph.flush(keep)
        return last.eager(x, step, layers[last.index]) if any(keep) else x


class Captured(NamedTuple):
    """A segment's sublayers as they ran in a step, and the mixers of which each gives one of their rope tables."""

    graph: ops.CapturedGraph
    ropes: list[FusableLayer]


class Caches(NamedTuple):
    """The caches of a segment's mixers among a state's layers."""

    layers: Sequence[LayerState]
    attending: list[KeyValueState]
    recurrent: list[RecurrentState]


class FusedSegment:
    """Parts that run as one native call, captured in one step and replayed in the next ones."""

    def __init__(self, parts: list[Part]):
        self.parts = parts
        self._mixers = [(part.index, part.mixer) for part in parts if part.mixer is not None]
        self._captured: Captured | None = None
        self._caches = Caches((), [], [])

    def run(self, graph: ops.FusedGraph, step: Step, layers: Sequence[LayerState]) -> None:
        """Add the parts to the graph; where one cannot be fused in this step, it runs eagerly in between."""
        if self._captured is not None and self._replay(self._captured, graph, step, layers):
            return
        whole = True
        for part in self.parts:
            if not part.fuse(graph, step, layers):
                part.run(graph, step, layers)
                whole = False
        if whole and (captured := graph.capture()) is not None:
            ropes = {id(mixer.rope_tables(step)): mixer for _, mixer in self._mixers}
            self._captured = Captured(captured, [ropes[id(tables)] for tables in captured.tables])

    def finish(
        self, graph: ops.FusedGraph, step: Step, layers: Sequence[LayerState], keep: Sequence[int] | None
    ) -> Tensor:
        """Run as the last of a stack: its stream, as `run_eager` gives it."""
        self.run(graph, step, layers)
        return graph.flush(keep)

    def _replay(self, captured: Captured, graph: ops.FusedGraph, step: Step, layers: Sequence[LayerState]) -> bool:
        """Add all parts as in the captured step; False where that does not hold any more."""
        if step.media and not all(mixer.fuses(step) for _, mixer in self._mixers):
            return False
        caches = self._caches_of(layers)
        scans = [start for each in caches.recurrent if (start := each.fused_scan_start(step)) is not None]
        views = [view for each in caches.attending if (view := each.view(step)) is not None]
        if len(scans) < len(caches.recurrent) or len(views) < len(caches.attending):
            return False
        tables = [each for mixer in captured.ropes if (each := mixer.rope_tables(step)) is not None]
        results = graph.replay(captured.graph, views, scans, tables)
        if results is None:
            return False
        for cache, result in zip(caches.recurrent, results, strict=True):
            cache.record(step, *result, fused=True)
        return True

    def _caches_of(self, layers: Sequence[LayerState]) -> Caches:
        if self._caches.layers is not layers:
            simple = [cache for index, _ in self._mixers for cache in simple_caches(layers[index])]
            attending = [cache for cache in simple if isinstance(cache, KeyValueState)]
            self._caches = Caches(layers, attending, [cache for cache in simple if isinstance(cache, RecurrentState)])
        return self._caches
