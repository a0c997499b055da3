"""Draws of the next token, on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops.cuda import dense
from lmstate.ops.cuda.device import launch, padded

PART = 1024
HEAD = 1024
"""The largest numbers among which top-p is looked for first."""
LARGEST = torch.finfo(torch.float32).max
LEAST = torch.iinfo(torch.int64).min


def sample(
    logits: Tensor, uniform: Tensor, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> Tensor:
    """`ops.sample` of float32 logits; the arguments are those there."""
    from lmstate.ops.cuda.kernels import sampling as kernels

    rows, width = logits.shape
    x, picked = logits.contiguous(), torch.empty(rows, dtype=torch.int64, device=logits.device)
    if not picked.numel():
        return picked
    tops, _ = dense.argmax(x)
    by, parts = min(1 / temperature, LARGEST), -(-width // PART)
    unit = float(1 << (61 - width.bit_length()))  # so that all weights together are an int64
    thresholds = torch.full_like(picked, LEAST)
    if top_k is not None and top_k < width:
        thresholds = ranks(x).topk(top_k, dim=-1, sorted=False).values.amin(-1)
    if top_p is not None and top_p < 1.0:
        thresholds = _nucleus(x, tops, thresholds, by, unit, top_p)
    sums = torch.empty(rows, parts, dtype=torch.int64, device=x.device)
    given, chosen = (x, tops, thresholds, sums), (width, parts, by, min_p or 0.0, unit)
    launch(kernels.weigh_parts, (rows, parts), *given, *chosen, WIDTH=PART)
    at = uniform.to(x.device, torch.float64)
    launch(kernels.draw, (rows,), *given, at, picked, *chosen, WIDTH=PART, PARTS=padded(parts))
    return picked


def ranks(x: Tensor) -> Tensor:
    """Numbers int64 `[R, V]` in the order of x, of equal ones the first is the largest: no two are the same."""
    bits = x.view(torch.int32)
    upper = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits).long()
    return (upper << 32) + (0xFFFFFFFF - torch.arange(x.shape[1], device=x.device))


def _nucleus(x: Tensor, tops: Tensor, thresholds: Tensor, by: float, unit: float, top_p: float) -> Tensor:
    """The least rank of the most likely tokens that hold `top_p` together, of those from `thresholds` on."""
    ranked = ranks(x)
    weights = (((x - tops[:, None]) * by).double().exp() * unit).nan_to_num().long()
    weights = weights.masked_fill(ranked < thresholds[:, None], 0)
    target = weights.sum(-1, keepdim=True).double() * top_p
    best = ranked.topk(min(HEAD, x.shape[1]), dim=-1).values
    if best.shape[1] < x.shape[1] and bool((_held(best, weights)[:, -1:].double() < target).any()):
        best = ranked.sort(-1, descending=True).values
    held = _held(best, weights)
    count = (held.double() < target).sum(-1, keepdim=True)  # those before the last one that is needed
    least = best.gather(1, count.clamp(max=best.shape[1] - 1))[:, 0]
    return torch.maximum(least, thresholds)


def _held(best: Tensor, weights: Tensor) -> Tensor:
    """Weights of the best tokens with all that are better, int64 `[R, n]`."""
    return weights.gather(1, 0xFFFFFFFF - (best & 0xFFFFFFFF)).cumsum(-1)
