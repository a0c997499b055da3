"""The one place that picks an operation's body: the reference in torch, or the native library of this processor.

`LMSTATE_OPS` forces one: `reference`, or a native variant (`portable`, `avx2`, `avx512`). It is read once, at the first
operation.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from lmstate.ops.cpu import Library

VARIABLE = "LMSTATE_OPS"


@dataclass(frozen=True)
class Choice:
    """The body that runs on the processor, and why."""

    name: str
    why: str
    library: Library | None


@lru_cache(maxsize=1)
def choice() -> Choice:
    return Choice("reference", "no native library yet", None)


def native(*tensors: Tensor | None) -> Library | None:
    """The native library where these tensors may go there: on the processor, with no gradient to follow, not traced."""
    if torch.compiler.is_compiling():
        return None
    for tensor in tensors:
        if tensor is not None and (not tensor.is_cpu or (tensor.requires_grad and torch.is_grad_enabled())):
            return None
    return choice().library


def exact(*tensors: Tensor | None) -> bool:
    """Whether a reference in float32 is wanted over a faster product: it was forced, or a gradient is to follow."""
    if os.environ.get(VARIABLE) == "reference":
        return True
    return torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in tensors)
