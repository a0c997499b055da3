"""A sigmoid that is the same wherever in a vector a number stands."""

from __future__ import annotations

from torch import Tensor


def sigmoid(x: Tensor) -> Tensor:
    """The sigmoid of any tensor, in its dtype.

    Computed in float64: in float32 torch rounds the last numbers of a vector, which may be another row's, otherwise.
    """
    return x.double().sigmoid().to(x.dtype)
