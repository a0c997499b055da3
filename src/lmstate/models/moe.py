"""Mixtures of experts: a router sends each token to a few feed-forward blocks (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.mlp import FeedForward
from lmstate.ops import Norm

Route = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(eq=False)
class SoftmaxRouter:
    """The `top_k` experts of highest probability, weighted by it; the weights sum to 1 if `normalise`."""

    weight: Tensor  # float32 [experts, E]
    top_k: int
    normalise: bool

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x float32 `[M, E]` -> (weights float32 `[M, top_k]`, expert numbers int64 `[M, top_k]`)."""
        weights, chosen = torch.topk((x @ self.weight.T).softmax(-1), self.top_k, dim=-1)
        return weights / weights.sum(-1, keepdim=True) if self.normalise else weights, chosen


@dataclass(eq=False)
class MixtureOfExperts:
    """Each token goes through the experts that `router` chose, weighted, and through `shared` where there is one."""

    router: Route
    experts: list[FeedForward]
    shared: FeedForward | None = None

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Tensor | None = None) -> Tensor:
        if norm is not None:
            x = ops.norm(x, norm)
        tokens = x.flatten(0, -2)  # [M, E]
        weights, chosen = self.router(tokens)
        out = torch.zeros_like(tokens) if self.shared is None else self.shared(x).flatten(0, -2)
        for index in chosen.unique().tolist():
            token, place = (chosen == index).nonzero(as_tuple=True)
            done = self.experts[index](tokens[token]) * weights[token, place, None]
            out = out.index_add(0, token, done)
        out = out.view_as(x)
        return out if residual is None else out + residual
