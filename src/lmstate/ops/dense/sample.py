"""Draws from the distribution of the next token, after temperature, top-k, top-p and min-p."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cuda import sampling as cuda

# Top-p looks among this many best tokens first: sorting the whole vocabulary costs as much as a decode step.
HEAD = 1024


def candidates(
    logits: Tensor, temperature: float, top_k: int | None, top_p: float | None, min_p: float | None
) -> tuple[Tensor, Tensor]:
    """float32 `[R, V]` -> probabilities float64 `[R, k]` (rows sum to 1, zeros allowed), and whose: ids int64 `[R, k]`.

    temperature above 0; then the `top_k` most likely tokens, the smallest set of the most likely of them that holds
    `top_p`, and those at least `min_p` as probable as the most likely one; None: all.
    """
    rows, vocab = logits.shape
    # Relative to the best token, so that a tiny temperature cannot overflow.
    scores = (logits - logits.amax(-1, keepdim=True)).double() / temperature  # [R, V]
    ids = torch.arange(vocab, device=logits.device).expand(rows, vocab)
    if top_k is not None and top_k < vocab:
        scores, ids = scores.topk(top_k)  # [R, k], best first
    if top_p is not None and top_p < 1.0:
        scores, ids = _nucleus(scores, ids, top_p)
    if min_p is not None and min_p > 0.0:
        scores = scores.masked_fill(scores < math.log(min_p), -math.inf)  # the best token has score 0
    return scores.softmax(-1), ids


def sample(
    logits: Tensor,
    uniform: Tensor,
    temperature: float,
    top_k: int | None = None,
    top_p: float | None = None,
    min_p: float | None = None,
) -> Tensor:
    """One token for each row, int64 `[R]`: the first, of its `candidates` by id, whose cumulative exceeds a number.

    logits: float32 `[R, V]`; uniform: float64 `[R]` on the processor, in 0..1. -1 where a row has NaN among its logits,
    or its largest is infinite.
    """
    library = dispatch.native(logits)
    if library is not None and logits.dtype == torch.float32:
        return library.dense.sample(logits, uniform, temperature, top_k, top_p, min_p)
    if logits.dtype == torch.float32 and dispatch.gpu(logits):
        return cuda.sample(logits, uniform, temperature, top_k, top_p, min_p)
    probabilities, ids = candidates(logits, temperature, top_k, top_p, min_p)
    ids, order = ids.sort(-1)
    cumulative = probabilities.gather(-1, order).cumsum(-1)  # [R, k]
    total = cumulative[:, -1:]
    # Strictly below the total, so that rounding never falls past the last token that has any probability.
    point = torch.minimum(uniform[:, None].to(total.device) * total, torch.nextafter(total, torch.zeros_like(total)))
    index = torch.searchsorted(cumulative, point, right=True)  # [R, 1]: first whose cumulative exceeds the point
    picked = ids.gather(-1, index.clamp(max=ids.shape[-1] - 1))
    return picked.masked_fill(total.isnan(), -1)[:, 0]


def _nucleus(scores: Tensor, ids: Tensor, top_p: float) -> tuple[Tensor, Tensor]:
    """The most likely tokens, best first, until their probability reaches `top_p`; others -inf. scores, ids [R, k]."""
    total = scores.logsumexp(-1, keepdim=True)
    ordered, order = scores.topk(min(HEAD, scores.shape[-1]))
    if ordered.shape[-1] < scores.shape[-1] and bool(((ordered - total).exp().sum(-1) < top_p).any()):
        ordered, order = scores.sort(-1, descending=True)
    probability = (ordered - total).exp()
    before = probability.cumsum(-1) - probability  # what the better tokens hold together: 0 for the best one
    return ordered.masked_fill(before >= top_p, -math.inf), ids.gather(-1, order)
