"""Attention to a window and to compressed entries of what is before it (DeepSeek-V4): CSA with an index, and HCA."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.rope import Rope
from lmstate.ops import Norm, Residual, Weight
from lmstate.ops.attention.attend_beside import attend_beside
from lmstate.ops.dense.per_head import per_head_matmul
from lmstate.state import (
    CompressedState,
    LayerState,
    Layout,
    Pooling,
    Step,
    WindowedVectors,
    compressed_state,
)


@dataclass(frozen=True, eq=False)
class Compressor:
    """Makes one vector of the `rate` tokens of an entry, and with `overlaps` of the `rate` before them as well.

    Of each token's inputs there are values and logits, `[D]` each: an entry is the sum of the values by a softmax over
    the tokens, of each feature for itself, normed and rotated by the place of its first token. Where entries overlap a
    token has one of both for the entry that comes after its own, and then one for its own.
    """

    rate: int
    norm: Norm | None
    bias: Tensor  # float32 [rate, D], or [rate, 2 * D], added to the logits by the place in an entry
    rope: Rope | None  # of the last features
    overlaps: bool = False

    @property
    def width(self) -> int:
        """D."""
        return self.bias.shape[1] // (1 + self.overlaps)

    def __call__(self, values: Tensor, logits: Tensor, places: Tensor) -> Tensor:
        """Values and logits `[R, W, J, D or 2 * D]` of tokens at places `[R, W, J]`, -1 for none -> `[R, W, D]`."""
        logits = logits + (torch.cat([self.bias, self.bias]) if self.overlaps else self.bias)
        if self.overlaps:
            values, logits = (self._of_both(part) for part in (values, logits))
        # In float64 and back: what a token gives must not depend on how many entries are made at once.
        missing = (places < 0)[..., None]
        shares = logits.double().masked_fill(missing, float("-inf")).softmax(2).nan_to_num()  # padding has no token
        entry = (values.double() * shares).sum(2).float()
        entry = entry if self.norm is None else ops.norm(entry, self.norm)
        if self.rope is None:
            return entry
        first = places[..., -self.rate].clamp(min=0)
        return last_rotated(entry[:, :, None], self.rope.tables(first))[:, :, 0]

    def _of_both(self, x: Tensor) -> Tensor:
        """Of the tokens of the entry before what they give the next one, of its own tokens what they give this one."""
        before, own = x.tensor_split([self.rate], dim=2)
        return torch.cat([before[..., : self.width], own[..., self.width :]], dim=2)


@dataclass(frozen=True, eq=False)
class EntryIndex:
    """Chooses `budget` entries by Hi small queries and one key each, which a compressor makes too."""

    compressor: Compressor
    query: Weight  # [Hi * Di, Q]
    weights: Weight  # [Hi, E]
    budget: int


class Projected(NamedTuple):
    """New tokens as attention reads them: vectors `[R, T, D]`, queries `[R, T, H, D]` and the latents of these."""

    vector: Tensor
    q: Tensor
    q_latent: Tensor
    tables: ops.RopeTables


@dataclass(frozen=True, eq=False)
class CompressedAttention:
    """Attention of H heads to one vector of each position that is key and value: the last `window`, and entries.

    `compressor` None: to the window alone. Else it makes an entry of several tokens each, and `index` chooses among
    them; None: all are attended to. Queries and vectors are rotated at their last features, and what a head has seen
    is rotated back, so that only distances count.
    """

    down: Weight  # [Q + D, E]: the latent of the query, the vector
    q_norm: Norm
    q_up: Weight  # [H * D, Q]
    head_norm: Norm  # of each query, without weights
    norm: Norm  # of vectors
    sinks: Tensor  # float32 [H]
    out_groups: Tensor  # [G, H * D / G, rank]
    out: Weight  # [E, G * rank]
    window: int
    rope: Rope
    inputs: Weight | None = None  # [F, E]: values and logits for the entries, then those for the keys of the index
    compressor: Compressor | None = None
    index: EntryIndex | None = None

    @property
    def kind(self) -> str:
        return "window" if self.compressor is None else "compressed"

    @property
    def dim(self) -> int:
        """D."""
        return self.norm.weight.shape[0]

    def new_state(self, layout: Layout) -> LayerState:
        pooling = None
        if self.compressor is not None and self.inputs is not None:
            index = 0 if self.index is None else self.index.compressor.width
            pooling = Pooling(self.compressor.rate, self.inputs.shape[0], self.compressor.overlaps, index)
        return compressed_state(layout, self.dim, self.window, pooling)

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        vector, q, q_latent, tables = self.projected(x, step, norm)
        params = ops.AttentionParams(self.dim**-0.5, sinks=self.sinks)
        if isinstance(cache, WindowedVectors):
            cache.store(vector, step)
            held, places = cache.vectors, (step.starts_t, step.counts_t)
            seen = ops.attend(q, held, held, *places, params, ops.CausalMask(self.window))
        else:
            assert isinstance(cache, CompressedState)
            cache.keys.store(vector, step)
            self._compress(x, step, cache, norm)
            seen = attend_beside(
                q, cache.keys.vectors, cache.entries.stored("entry"), self._chosen(x, q_latent, step, cache, norm),
                step.starts_t, step.counts_t, window=self.window, scale=params.scale, sinks=self.sinks,
            )  # fmt: skip
        return self.written(seen, tables, residual)

    def projected(self, x: Tensor, step: Step, norm: Norm | None) -> Projected:
        """Vectors and queries of x `[R, T, E]`, at the positions of a step."""
        q_latent, vector = ops.linear(x, self.down, norm=norm).split([self.down.shape[0] - self.dim, self.dim], dim=-1)
        q_latent = ops.norm(q_latent, self.q_norm)
        tables = self.rope.rotation(step)
        q = ops.norm(ops.linear(q_latent, self.q_up).unflatten(-1, (-1, self.dim)), self.head_norm)  # [R, T, H, D]
        q = last_rotated(q, tables)
        vector = last_rotated(ops.norm(vector, self.norm)[:, :, None], tables)[:, :, 0]
        return Projected(vector, q, q_latent, tables)

    def written(self, seen: Tensor, tables: ops.RopeTables, residual: Residual | None = None) -> Tensor:
        """The output `[R, T, E]` of what the heads have seen `[R, T, H, D]`, turned back first."""
        seen = last_rotated(seen, tables._replace(sin=-tables.sin)).flatten(-2)  # [R, T, H * D]
        groups = per_head_matmul(seen.unflatten(-1, (len(self.out_groups), -1)), self.out_groups)
        return ops.linear(groups.flatten(-2), self.out, residual=residual)

    def _compress(self, x: Tensor, step: Step, cache: CompressedState, norm: Norm | None) -> None:
        """Store the inputs of the new tokens, and the entries that they complete."""
        assert self.inputs is not None and self.compressor is not None
        cache.raw.store(ops.linear(x, self.inputs, norm=norm), step)
        if (found := cache.inputs(step)) is None:
            return
        raw, places = found
        made = {"entry": self.compressor}
        if self.index is not None:
            made["index"] = self.index.compressor
        widths = [each.width * (1 + each.overlaps) for each in made.values() for _ in range(2)]
        parts = iter(raw.split(widths, dim=-1))
        cache.store_entries(step, **{name: each(next(parts), next(parts), places) for name, each in made.items()})

    def _chosen(self, x: Tensor, q_latent: Tensor, step: Step, cache: CompressedState, norm: Norm | None) -> Tensor:
        """The entries that new tokens attend to, int64 `[R, T, k]`, then -1."""
        if self.index is None or max(step.ends, default=0) // cache.rate <= self.index.budget:
            return cache.all_visible(step)
        heads, dim = self.index.weights.shape[0], self.index.compressor.width
        q = ops.linear(q_latent, self.index.query).unflatten(-1, (heads, dim))
        weights = ops.linear(x, self.index.weights, norm=norm) * (heads * dim) ** -0.5
        return cache.choose(last_rotated(q, self.rope.rotation(step)), weights, self.index.budget, step)


def last_rotated(x: Tensor, tables: ops.RopeTables) -> Tensor:
    """Heads `[R, T, H, D]` whose last features rotate."""
    still = x.shape[-1] - 2 * tables.cos.shape[-1]
    return torch.cat([x[..., :still], ops.rope(x[..., still:], *tables)], dim=-1)
