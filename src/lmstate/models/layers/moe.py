"""Mixtures of experts: a router sends each token to a few feed-forward blocks (Shazeer et al. 2017)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Protocol, TypeGuard

import torch
from torch import Tensor

from lmstate import ops
from lmstate.errors import ModelError
from lmstate.models.layers.mlp import MLP, FeedForward
from lmstate.ops import Norm, Residual, Weight


class RouterFn(Protocol):
    """x float32 `[M, E]` -> (weights float32 `[M, top_k]`, expert numbers int64 `[M, top_k]`), of each token alone."""

    @property
    def per_token(self) -> int:
        """Number of experts that a token goes through."""
        ...

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]: ...


@dataclass(frozen=True, eq=False)
class Router:
    """Router: chooses `top_k` of N experts for each token, and their weights.

    Every expert has a score in 0..1: the softmax over all of them, or the sigmoid of its own logit. The best `top_k`
    are chosen and weighted by their scores, which `normalize` brings to a sum of 1 (after a softmax that is the same as
    a softmax over the chosen alone) and `scale` multiplies.

    `e_score_correction_bias` is added to the scores for the choice and not for the weights; it keeps experts evenly
    used without a loss (Wang et al. 2024). With `groups` > 1 the experts form that many equal groups, and only those of
    the best `topk_groups` groups can be chosen. A group's score is that of its best expert, or the sum of its two best
    (DeepSeek-V2 and V3).
    """

    weight: Weight  # [N, E]; keep it float32, a choice is not to be rounded
    top_k: int
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    normalize: bool = False
    scale: float = 1.0
    bias: Tensor | None = None  # float32 [N], on the logits
    e_score_correction_bias: Tensor | None = None  # float32 [N]
    groups: int = 1
    topk_groups: int = 1
    group_score: Literal["top1", "top2"] = "top1"
    floor: float = 1e-20  # added to the sum that weights are divided by
    expert_scale: Tensor | None = None  # float32 [N], multiplies an expert's weight last
    left_out: float = float("-inf")  # the score of an expert outside the best groups

    def __post_init__(self) -> None:
        experts, least = self.weight.out_features, 2 if self.groups > 1 and self.group_score == "top2" else 1
        size = experts // self.groups
        if experts % self.groups or size < least or self.topk_groups > self.groups:
            raise ModelError(f"{experts} experts cannot lie in {self.groups} groups of which {self.topk_groups} count")
        if self.top_k > self.topk_groups * size:
            raise ModelError(
                f"{self.top_k} of {experts} experts cannot be chosen from {self.topk_groups} of {self.groups} groups"
            )

    @property
    def per_token(self) -> int:
        return self.top_k

    @property
    def params(self) -> ops.RouterParams:
        """The choice as the native bodies are told it; they know neither `expert_scale` nor `left_out`."""
        return ops.RouterParams(
            self.weight, self.top_k, self.scoring, self.normalize, self.scale, self.bias, self.e_score_correction_bias,
            self.groups, self.topk_groups, self.group_score, self.floor,
        )  # fmt: skip

    def __call__(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x float32 `[M, E]` -> (weights float32 `[M, top_k]`, expert numbers int64 `[M, top_k]`)."""
        logits = ops.linear(x, self.weight, self.bias)  # [M, N]
        native = ops.choose_experts(logits, self.params) if self.left_out == float("-inf") else None
        if native is not None:
            return native if self.expert_scale is None else (native[0] * self.expert_scale[native[1]], native[1])
        # In float64 and back: torch rounds a vector's last elements otherwise than its first ones, and a token's
        # experts and weights must not depend on where in a batch it stands.
        wide = logits.double()
        scores = (wide.softmax(-1) if self.scoring == "softmax" else wide.sigmoid()).float()
        choice = scores if self.e_score_correction_bias is None else scores + self.e_score_correction_bias
        if self.groups > 1:
            choice = self._of_best_groups(choice)
        chosen = choice.topk(self.top_k, dim=-1).indices
        weights = scores.gather(-1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + self.floor)
        if self.expert_scale is not None:
            weights = weights * self.expert_scale[chosen]
        return weights * self.scale if self.scale != 1.0 else weights, chosen

    def _of_best_groups(self, choice: Tensor) -> Tensor:
        """`choice` `[M, N]` with the score `left_out` for the experts of the groups that are left out."""
        grouped = choice.unflatten(-1, (self.groups, -1))  # [M, groups, N / groups]
        counted = 1 if self.group_score == "top1" else 2
        best = grouped.topk(counted, dim=-1).values.sum(-1).topk(self.topk_groups, dim=-1).indices
        left_out = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter(-1, best, False)
        return grouped.masked_fill(left_out[..., None], self.left_out).flatten(-2)


def _expert(expert: MLP) -> ops.Expert:
    return ops.Expert(expert.up, expert.down, expert.act, expert.up_bias, expert.down_bias)


def _plain(expert: FeedForward) -> TypeGuard[MLP]:
    """Whether the native body knows what an expert is made of."""
    return isinstance(expert, MLP) and expert.gated and expert.factors is None and expert.down_norm is None


@dataclass(frozen=True, eq=False)
class MixtureOfExperts:
    """Each token goes through the experts that `router` chose, and through `shared` where there is one.

    A weight multiplies what its expert gives, or what it is given if `scale_input` (Llama 4). `shared_gate` `[1, E]`:
    the sigmoid of its product with the token weighs the shared expert.
    """

    router: RouterFn
    experts: Sequence[FeedForward]
    shared: FeedForward | None = None
    shared_gate: Weight | None = None
    scale_input: bool = False

    def __call__(self, x: Tensor, norm: Norm | None = None, residual: Residual | None = None) -> Tensor:
        if norm is not None:
            x = ops.norm(x, norm)
        out = self.routed(x.flatten(0, -2), *self.router(x.flatten(0, -2))).view_as(x)
        if self.shared is not None:
            common = self.shared(x)
            out = out + (
                common
                if self.shared_gate is None
                else ops.gated(common, ops.linear(x, self.shared_gate).expand_as(common))
            )
        return out if residual is None else ops.add_residual(residual, out)

    def sublayers(
        self, norm: Norm | None, post_norm: Norm | None, scale: float, parallel: bool
    ) -> tuple[ops.Sublayer, ...]:
        """The mixture with the norms around it as native bodies know it; empty where they do not."""
        experts, shared = [expert for expert in self.experts if _plain(expert)], self.shared
        if parallel or len(experts) < len(self.experts) or not (shared is None or _plain(shared)):
            return ()
        if not isinstance(self.router, Router) or self.router.expert_scale is not None:
            return ()
        if self.router.left_out != float("-inf"):
            return ()
        sublayer = ops.MoESublayer(
            self.router.params, tuple(_expert(expert) for expert in experts),
            None if shared is None else _expert(shared), self.shared_gate, self.scale_input,
            norm=norm, post_norm=post_norm, scale=scale,
        )  # fmt: skip
        return (sublayer,)

    def routed(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The routed experts: x `[M, E]`, weights and chosen `[M, top_k]` -> `[M, E]`.

        Routes (a token and an expert) are sorted by expert, so that each expert runs once over all of its tokens. The
        outputs of a token are added in the order of the experts, whatever other tokens there are.
        """
        if torch.compiler.is_compiling():
            return self._of_all(x, weights, chosen)
        if self._all_plain is not None:
            found = self._all_plain(x, weights, chosen, self.scale_input)
            if found is not None:
                return found
        order = chosen.flatten().argsort(stable=True)  # of the M * top_k routes
        token = order // chosen.shape[1]
        weight = weights.flatten()[order, None]
        routed = x[token] * weight if self.scale_input else x[token]
        counts = chosen.flatten().bincount(minlength=self.count).tolist()
        done = torch.cat(self.outputs(routed.split(counts)) or [routed])
        return torch.zeros_like(x).index_add(0, token, done if self.scale_input else done * weight)

    @cached_property
    def _all_plain(self) -> ops.RoutedExperts | None:
        plain = tuple(_expert(expert) for expert in self.experts if _plain(expert))
        return ops.RoutedExperts(plain) if len(plain) == len(self.experts) else None

    @property
    def count(self) -> int:
        """Number of experts."""
        return len(self.experts)

    def outputs(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Outputs of the experts, each of its part of the routes; those without any are left out."""
        return [expert(part) for expert, part in zip(self.experts, parts) if len(part)]

    def _of_all(self, x: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """`routed` for a traced graph, whose shapes cannot follow the router: every expert sees every token."""
        blank = x.new_zeros(x.shape[0], len(self.experts))
        share = blank.scatter(-1, chosen, weights)  # [M, N]
        selected = blank.bool().scatter(-1, chosen, True)
        out = torch.zeros_like(x)
        for n, expert in enumerate(self.experts):
            weight = share[:, n, None]
            part = expert(x * weight) if self.scale_input else expert(x) * weight
            out = out + torch.where(selected[:, n, None], part, 0.0)
        return out
