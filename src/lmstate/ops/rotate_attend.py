"""What a layer of attention does between its products: rotate, store, attend."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.append import append
from lmstate.ops.attend import MOST, attend
from lmstate.ops.rope import rope
from lmstate.ops.scoring import EVERYTHING, Scoring, Sight


class Rotation(NamedTuple):
    """How a step's positions turn queries and keys: see `ops.rope`."""

    cos: Tensor  # float32 [R, T, rot / 2]
    sin: Tensor
    interleaved: bool = False


def rotate_attend(
    q: Tensor,
    k_new: Tensor,
    v_new: Tensor,
    rotation: Rotation,
    k: Tensor,
    v: Tensor,
    starts: Tensor,
    counts: Tensor,
    scoring: Scoring,
    sight: Sight = EVERYTHING,
) -> Tensor:
    """Rotate q `[R, T, H, D]` and k_new `[R, T, K, D]`, store k_new and v_new in the rings k and v, attend.

    The same as `rope`, `append` and `attend` one after the other; float32 `[R, T, H, Dv]`.
    """
    cos, sin, interleaved = rotation
    library = dispatch.native(q, k_new, v_new, k, v, scoring.sinks)
    if (
        library is not None
        and q.shape[1] <= MOST
        and library.can_attend(q, k, v)
        and library.can_append(k_new, v_new, k, v)
    ):
        return library.rotate_attend(q, k_new, v_new, cos, sin, interleaved, k, v, starts, counts, scoring, sight)
    append(rope(k_new, cos, sin, interleaved), v_new, k, v, starts, counts)
    turned = rope(q, cos, sin, interleaved)
    return attend(turned, k, v, starts, counts, scoring, sight)
