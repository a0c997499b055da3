"""Mixtures of experts for `model.set_experts_implementation("lmstate")`: few tokens by our native bodies, else as
transformers does by default.

The weights are read where the model has them: of each expert that a token chose a matrix `[N, K]`, once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers.integrations.moe import ExpertsInterface, grouped_mm_experts_forward

from lmstate.integrations.transformers.kernels.linear import MAX_ROWS, product
from lmstate.ops import dispatch
from lmstate.ops.cpu import Library

NAME = "lmstate"


def register() -> None:
    """Make the implementation known to transformers."""
    ExpertsInterface.register(NAME, experts)


def experts(module: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The experts' sum, `[T, E]`, for hidden states `[T, E]` and what each token chose, `[T, k]`.

    `module`: an experts module of transformers, which says by its own attributes how its weights `[experts, N, K]` are.
    """
    gate, into = module.has_gate, module.gate_up_proj if module.has_gate else module.up_proj
    back = module.down_proj
    bias_into = bias_back = None
    if module.has_bias:
        bias_into, bias_back = module.gate_up_proj_bias if gate else module.up_proj_bias, module.down_proj_bias
    library = dispatch.native(hidden_states, into, back, bias_into, bias_back)  # None in a graph too
    if library is None or not _applies(module, hidden_states, into, back):
        return grouped_mm_experts_forward(module, hidden_states, top_k_index, top_k_weights)
    tokens, chosen = top_k_index.shape
    ids, order = top_k_index.flatten().sort(stable=True)  # [T * k]
    which, counts = (x.tolist() for x in ids.unique_consecutive(return_counts=True))
    x = _products(library, hidden_states[order // chosen], into, bias_into, which, counts)
    x = module._apply_gate(x) if gate else module.act_fn(x)
    x = _products(library, x, back, bias_back, which, counts)
    if module.has_post_expert_norm:
        x = module.post_expert_norm(x)
    each = torch.empty_like(x)
    each[order] = x
    weighted = each.view(tokens, chosen, -1) * top_k_weights[..., None]
    return weighted.sum(1).to(hidden_states.dtype)


def _products(
    library: Library, x: Tensor, weight: Tensor, bias: Tensor | None, which: list[int], counts: list[int]
) -> Tensor:
    """x `[n, K]`, sorted by expert, by each expert's weight: `[n, N]`."""
    parts = zip(which, x.split(counts))
    return torch.cat([product(library, part, weight[e], None if bias is None else bias[e]) for e, part in parts])


def _applies(module: Any, x: Tensor, into: Tensor, back: Tensor) -> bool:
    """Whether these are few tokens and plain weights of their type that a body can read, to be multiplied now."""
    return (
        0 < x.shape[0] <= MAX_ROWS.get(x.dtype, 0)
        and not module.is_transposed
        and not module._is_expert_parallel
        and type(x) is Tensor
        and all(type(w) is nn.Parameter and w.dtype == x.dtype and w.is_contiguous() for w in (into, back))
        and not torch.is_autocast_enabled("cpu")
        and not dispatch.is_intercepted()
    )
