"""Weights of every kind for tests."""

from __future__ import annotations

from torch import Tensor

import lmstate.ops as ops


def stored(matrix: Tensor, kind: str) -> ops.Weight:
    """A weight of a kind; "int4/8" and "int8/8" multiply activations of 8 bits."""
    if kind == "bfloat12":
        return ops.to_bfloat12(ops.quantize(matrix, "bfloat16"))
    name, _, bits = kind.partition("/")
    return ops.quantize(matrix, name).with_activations(int(bits or 16))
