"""Attention in which the tokens of a picture see all of it, whichever of them comes first (Gemma 3, 2503.19786).

A picture is computed as one piece: no step ends inside it. Its queries attend as heads of one token at its last
position, under a mask that reaches as far as the first one sees.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from lmstate import ops
from lmstate.state import KeyValueState, Step


def with_whole_pictures(
    seen: Tensor,
    q: Tensor,
    rotation: ops.RopeTables | None,
    step: Step,
    cache: KeyValueState,
    params: ops.AttentionParams,
    kv_heads: int,
    window: int | None,
    beyond: bool,
) -> Tensor:
    """Return `seen` `[R, T, H, Dv]`, the causal attention of the queries q `[R, T, H, D]`, with that in pictures whole.

    rotation: that q is yet to be turned by. The keys of the step are stored already. `window`: positions up to its own
    that a query sees, and the rest of its picture. `beyond`: and what of its picture is farther back than that.
    """
    out = seen.clone()
    for row, start, stop in step.pictures:
        own = slice(row, row + 1), slice(start - step.starts[row], stop - step.starts[row])
        queries = q[own]
        if rotation is not None:
            queries = ops.rope(queries, rotation.cos[own], rotation.sin[own], rotation.interleaved)
        count, mask, bounded = stop - start, ops.FULL_CAUSAL, params
        if window is not None and stop > window:  # else each of them sees the row from its beginning on
            mask = ops.CausalMask(window + count - 1)
            bounded = params._replace(biases=_out_of_sight(window, count, q.shape[2], kv_heads, beyond).to(q.device))
        folded = ops.as_heads(queries, kv_heads)
        placed = folded.new_zeros(step.rows, *folded.shape[1:])
        placed[row] = folded[0]
        last = step.part(
            tuple(stop - 1 if r == row else 0 for r in range(step.rows)),
            tuple(int(r == row) for r in range(step.rows)),
        )
        found = cache.attend_stored(placed, last, bounded, mask)
        out[own] = ops.as_tokens(found[row : row + 1], count, kv_heads)
    return out


@lru_cache(maxsize=4)
def _out_of_sight(window: int, count: int, heads: int, kv_heads: int, beyond: bool) -> Tensor:
    """Biases by distance from the last of `count` positions: float32 `[H * count, M]`.

    For heads as `ops.as_heads` makes them of the tokens there. Minus infinity where a key is `window` positions or
    more before the token; with `beyond`, only where the key is not of the picture.
    """
    with torch.inference_mode(False):
        distance = torch.arange(window + count - 1)
        far = distance >= window + torch.arange(count - 1, -1, -1)[:, None]  # [count, M]
        far = far & (distance >= count) if beyond else far
        biases = torch.zeros(far.shape).masked_fill(far, -torch.inf)
        return biases.repeat_interleave(heads // kv_heads, dim=0).repeat(kv_heads, 1)
