"""Per-layer inputs: what every block gets of a token beside the stream, an embedding of its own (Gemma 3n, Gemma 4)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lmstate import ops
from lmstate.ops import Norm, Weight
from lmstate.state import Step


@dataclass(frozen=True, eq=False)
class PerLayerInputs:
    """Per-layer inputs of L blocks, P numbers each: an embedding of the token plus a projection of the shared one.

    The sum is divided by the root of two. A token that the table is too short for has that of token 0, one of a picture
    that of the token `pictured`, if any.
    """

    reads_tokens: ClassVar[bool] = True

    embed: Weight  # [V, L * P]
    project: Weight  # [L * P, E]
    norm: Norm  # of P numbers
    pictured: int | None = None

    def __call__(self, x: Tensor, tokens: Tensor, step: Step) -> Tensor:
        if self.pictured is not None and step.media:
            tokens = tokens.clone()
            for row, start, stop in step.pictures:
                first = step.starts[row]
                tokens[row, max(start - first, 0) : min(stop - first, step.counts[row])] = self.pictured
        step.extras["per_layer_inputs"] = self.of(x, tokens)
        return x

    def of(self, x: Tensor, tokens: Tensor) -> Tensor:
        """x float32 `[R, T, E]`, tokens int64 `[R, T]` -> float32 `[R, T, L, P]`."""
        width = self.norm.weight.shape[-1]
        known = torch.where(tokens < self.embed.out_features, tokens, 0)
        own = self.embed.rows(known) * width**0.5
        shared = ops.linear(x, self.project) * x.shape[-1] ** -0.5
        shared = ops.norm(shared.unflatten(-1, (-1, width)), self.norm)
        return (shared + own.view_as(shared)) * 2**-0.5


@dataclass(frozen=True, eq=False)
class PerLayerInput:
    """Addition of a block's per-layer input to the stream, through a gate that reads the stream."""

    block: int
    gate: Weight  # [P, E]
    act: str
    out: Weight  # [E, P]
    after: Norm

    def __call__(self, x: Tensor, step: Step) -> Tensor:
        """x float32 `[R, T, E]` -> `[R, T, E]`."""
        own = step.extras["per_layer_inputs"][..., self.block, :]  # [R, T, P]
        gated = ops.glu(torch.cat([ops.linear(x, self.gate), own], dim=-1), self.act)
        return ops.norm(ops.linear(gated, self.out), self.after)
