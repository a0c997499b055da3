"""The experts that a token chooses: all of a token in one program, so that no neighbor changes its choice."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _best(x, at, last):
    """The first place that has the largest number; the last place if all numbers are NaN."""
    return tl.min(tl.where(x == tl.max(x, 0), at, last), 0)


@triton.jit
def _groups_left(choice, e, COUNT: tl.constexpr, GROUPS: tl.constexpr, GROUPS_P: tl.constexpr, KEPT: tl.constexpr,
                 TOP2: tl.constexpr):  # fmt: skip
    """`choice` with minus infinity for all experts but those of the best groups."""
    SIZE: tl.constexpr = COUNT // GROUPS
    g = tl.arange(0, GROUPS_P)
    worth = tl.full([GROUPS_P], float("-inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        own = tl.where(e // SIZE == group, choice, float("-inf"))
        first = tl.max(own, 0)
        if TOP2:
            first = first + tl.max(tl.where(e == _best(own, e, COUNT - 1), float("-inf"), own), 0)
        worth = tl.where(g == group, first, worth)
    kept = tl.zeros_like(choice) != 0
    for _ in tl.static_range(KEPT):
        at = _best(worth, g, GROUPS - 1)
        kept = kept | (e // SIZE == at)
        worth = tl.where(g == at, float("-inf"), worth)
    return tl.where(kept, choice, float("-inf"))


@triton.jit
def choose_experts(
    logits, correction, weights, chosen, scale, floor,
    COUNT: tl.constexpr, COUNT_P: tl.constexpr, TOP_K: tl.constexpr, TOP_K_P: tl.constexpr, SIGMOID: tl.constexpr,
    HAS_CORRECTION: tl.constexpr, NORMALIZE: tl.constexpr, GROUPS: tl.constexpr, GROUPS_P: tl.constexpr,
    KEPT: tl.constexpr, TOP2: tl.constexpr,
):  # fmt: skip
    """A token's experts, best first, the first of equals, and their weights. Grid: (tokens,).

    logits: float32 [tokens, COUNT]; correction: float32 [COUNT]; weights: float32 and chosen: int64 [tokens, TOP_K].
    Scores are computed in float64 and rounded, as by the other bodies.
    """
    token = tl.program_id(0).to(tl.int64)
    e = tl.arange(0, COUNT_P)
    real = e < COUNT
    wide = tl.load(logits + token * COUNT + e, mask=real, other=float("-inf")).to(tl.float64)
    if SIGMOID:
        scores = (1.0 / (1.0 + tl.exp(-wide))).to(tl.float32)
    else:
        raised = tl.exp(wide - tl.max(wide, 0))
        scores = (raised / tl.sum(raised, 0)).to(tl.float32)
    choice = scores
    if HAS_CORRECTION:
        choice = choice + tl.load(correction + e, mask=real, other=0.0)
    choice = tl.where(real, choice, float("-inf"))
    if GROUPS > 1:
        choice = _groups_left(choice, e, COUNT, GROUPS, GROUPS_P, KEPT, TOP2)
    k = tl.arange(0, TOP_K_P)
    places = tl.zeros([TOP_K_P], tl.int64)
    given = tl.zeros([TOP_K_P], tl.float32)
    total = tl.sum(given, 0)
    for i in range(0, TOP_K):
        at = _best(choice, e, COUNT - 1)
        score = tl.sum(tl.where(e == at, scores, 0.0), 0)
        choice = tl.where(e == at, float("-inf"), choice)
        places = tl.where(k == i, at.to(tl.int64), places)
        given = tl.where(k == i, score, given)
        total = total + score
    if NORMALIZE:
        given = given / (total + floor)
    given = given * scale
    tl.store(weights + token * TOP_K + k, given, mask=k < TOP_K)
    tl.store(chosen + token * TOP_K + k, places, mask=k < TOP_K)
