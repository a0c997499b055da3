"""The states of layers with entries that stand for several tokens: compressed keys, and keys of an index."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from lmstate.ops.attention.choose import choose_positions, gather_positions
from lmstate.ops.types.block_table import Stored
from lmstate.state.layers.base import LayerState, Layout
from lmstate.state.layers.composite import CompositeState
from lmstate.state.layers.delayed import PooledState
from lmstate.state.layers.slots import SlotState
from lmstate.state.step import Step


class WindowedVectors(SlotState):
    """Vectors `[R, 1, S, D]` of the last positions: keys that are values too, say."""

    def __init__(
        self, layout: Layout, name: str, width: int, window: int, *, kind: str = "window", what: str = "keys",
        dtype: torch.dtype | None = None,
    ):  # fmt: skip
        """`window`: how many positions the next token needs, itself included. `dtype`: None for the layout's."""
        self.kind, self.what, self.name, self.window = kind, what, name, window
        dtypes = {} if dtype is None else {name: dtype}
        super().__init__(layout, {name: (1, width)}, window - 1 + layout.rewind, dtypes)

    @property
    def vectors(self) -> Stored:
        """They as operations read them in the step at hand, `[R, 1, S, D]`."""
        return self.stored(self.name)

    def store(self, new: Tensor, step: Step) -> None:
        """Store the new tokens' vectors `[R, T, D]`."""
        self.store_one(self.name, new, step)

    def lowest(self, position: int) -> int:
        return max(0, position - self.window + 1)


class Entries(SlotState):
    """Vectors `[R, 1, S, D]` that stand for several tokens each: keys that are values too, and keys of an index."""

    def __init__(self, layout: Layout, rate: int, widths: Mapping[str, int], kind: str, what: str):
        """`rate`: tokens of an entry."""
        self.rate, self.kind, self.what = rate, kind, what
        super().__init__(layout, {name: (1, width) for name, width in widths.items()}, None)


class Pooling(NamedTuple):
    """Way in which tokens become entries."""

    rate: int  # tokens of an entry
    inputs: int  # numbers that each token gives
    overlaps: bool = False  # an entry is of the tokens of the one before it as well
    index_width: int = 0  # of an entry's key in the index; 0: there is no index


class PoolingState(CompositeState):
    """A state of each position, the raw inputs of entries that are not there yet, and the entries.

    A compressor does not recur here: it reads the inputs of its tokens again, which are kept as far back as the next
    entry and a rewind need them. So an entry is the same numbers however its tokens came, and commits, rewinds, forks
    and snapshots are those of stored positions.
    """

    def __init__(self, layout: Layout, keys: LayerState, entries: Entries, pooling: Pooling):
        self.rate, self.overlaps = pooling.rate, pooling.overlaps
        self.raw = WindowedVectors(
            layout, "raw", pooling.inputs, self.rate * (1 + self.overlaps), kind="compressor",
            what="inputs of a compressor", dtype=torch.float32,
        )  # fmt: skip
        self.entries = entries
        self.pooled = PooledState([self.entries], self.rate)
        super().__init__([keys, self.raw, self.pooled])

    def inputs(self, step: Step) -> tuple[Tensor, Tensor] | None:
        """The inputs of the entries that a step completes, and where the tokens stand: `[R, W, J, F]`, `[R, W, J]`.

        J is `rate`, or twice that where entries overlap. Positions are -1 where there is no token, and inputs zero.
        None where no entry is completed. The step's own inputs are stored.
        """
        own = self.pooled.step(step)
        if not own.width:
            return None
        places = step.cached(("entries", self.rate, self.overlaps), lambda: self._places(own))
        found = gather_positions(self.raw.vectors, places.flatten(1))
        return found.view(*places.shape, -1), places

    def _places(self, own: Step) -> Tensor:
        before = self.rate if self.overlaps else 0
        first = own.positions * self.rate - before  # [R, W]
        places = first[..., None] + torch.arange(self.rate + before, device=first.device)
        missing = torch.arange(own.width, device=first.device) >= own.counts_t.to(first.device)[:, None]
        return places.masked_fill(missing[..., None] | (places < 0), -1)

    def store_entries(self, step: Step, **new: Tensor) -> None:
        """Store the entries that a step completes, `[R, W, D]` each: `entry`, and `index` where there is one."""
        own = self.pooled.step(step)
        for name, vectors in new.items():
            self.entries.store_one(name, vectors, own)

    def visible(self, step: Step) -> Tensor:
        """Number of entries that each new token sees, int64 `[R, T]`: those that are complete with it."""

        def make() -> Tensor:
            ends = torch.tensor(step.ends, device=step.device)[:, None]
            return torch.minimum(step.positions + 1, ends) // self.rate  # padding sees what is stored

        return step.cached(("entries seen", self.rate), make)

    def all_visible(self, step: Step) -> Tensor:
        """All entries that new tokens see, int64 `[R, T, k]`, then -1; k of the token that sees most."""

        def make() -> Tensor:
            entries = torch.arange(max(step.ends, default=0) // self.rate, device=step.device)
            return entries.where(entries < self.visible(step)[..., None], -1)

        return step.cached(("all entries", self.rate), make)

    def choose(self, q: Tensor, weights: Tensor, budget: int, step: Step) -> Tensor:
        """Entries `[R, T, k]` for queries `[R, T, Hi, Di]` with weights `[R, T, Hi]`: see `choose_positions`."""
        stored = self.entries.stored("index")
        return choose_positions(q, weights, stored, step.starts_t, step.counts_t, budget, rate=self.rate)


class CompressedState(PoolingState):
    """A window of keys that are values too, and entries of all that is before it, with an index or without."""

    def __init__(self, layout: Layout, width: int, window: int, pooling: Pooling):
        """`width`: of keys and entries."""
        self.keys = WindowedVectors(layout, "k", width, window)
        index = {"index": pooling.index_width} if pooling.index_width else {}
        entries = Entries(layout, pooling.rate, {"entry": width, **index}, "compressed", "compressed keys")
        super().__init__(layout, self.keys, entries, pooling)


class PooledIndexState(PoolingState):
    """Keys and values, or latents, of all positions; and one key of an index for each `rate` of them."""

    def __init__(self, layout: Layout, keys: LayerState, pooling: Pooling):
        self.keys = keys
        entries = Entries(layout, pooling.rate, {"index": pooling.index_width}, "index", "index keys")
        super().__init__(layout, keys, entries, pooling)

    def with_rest(self, chosen: Tensor, step: Step) -> Tensor:
        """Chosen entries `[R, T, k]`, and after them the one of each query's last tokens, which is not whole yet.

        In ascending order, then -1: `[R, T, k + 1]`.
        """
        ends = step.positions + 1
        rest = (ends // self.rate).masked_fill(ends % self.rate == 0, -1)[..., None]  # [R, T, 1]
        found = torch.cat([chosen, rest.to(chosen.device)], dim=-1)
        last = torch.iinfo(found.dtype).max
        found = found.masked_fill(found < 0, last).sort(dim=-1).values
        return found.masked_fill(found == last, -1)

    def positions(self, blocks: Tensor, step: Step) -> Tensor:
        """The positions of blocks `[R, T, k]` that queries see, in ascending order, then -1: `[R, T, k * rate]`."""
        last = torch.tensor(step.ends, device=blocks.device)[:, None] - 1
        own = torch.minimum(step.positions.to(blocks.device), last)[..., None, None]
        places = blocks[..., None] * self.rate + torch.arange(self.rate, device=blocks.device)
        return places.masked_fill((blocks[..., None] < 0) | (places > own), -1).flatten(-2)
