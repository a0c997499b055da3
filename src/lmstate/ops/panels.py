"""Products of many rows: torch's own, on panels of the weight as floats.

Everything between the products is rounded to the product's dtype as it is made, and a quantised panel lies in memory
that the next one takes over: what the system would charge for fresh pages is a tenth of a long prompt.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops import dispatch
from lmstate.ops.glu import glu
from lmstate.ops.norm import Norm
from lmstate.ops.norm import norm as apply_norm
from lmstate.ops.residual import Residual
from lmstate.ops.weight import FloatWeight, Weight

if TYPE_CHECKING:
    from lmstate.ops.cpu import Library

PANEL = 4 << 20
"""Numbers of a quantised weight that are made floats at a time."""

_scratch = threading.local()


def linear_panels(
    x: Tensor,
    weight: Weight,
    bias: Tensor | None = None,
    *,
    norm: Norm | None = None,
    gate: str | None = None,
    residual: Residual | None = None,
) -> Tensor:
    """`ops.linear` of many rows, in float32 where the weight is float32, else in bfloat16. x may come in bfloat16."""
    dtype = torch.float32 if weight.kind == "float32" else torch.bfloat16
    library = dispatch.native(x, weight.storage, None if residual is None else residual.stream)
    x = rounded(x, dtype, norm, gate)
    if library is None or dtype == torch.float32:
        y = F.linear(x, weight.dequantize(dtype)).float()
        y = y if bias is None else y + bias
        return y if residual is None else residual.added(y)
    flat = x.reshape(-1, weight.in_features)
    y = torch.empty(len(flat), weight.out_features, dtype=torch.float32)
    direct = residual is not None and residual.norm is None and residual.scale == 1.0
    stream = residual.stream.reshape(y.shape).contiguous() if residual is not None and direct else None
    for first, panel in panels(library, weight):
        library.finish(F.linear(flat, panel), bias, stream, y, first)
    y = y.view(*x.shape[:-1], -1)
    return y if residual is None or direct else residual.added(y)


def panels_beside(library: Library, x: Tensor, weight: Weight, width: int, beside: Tensor) -> tuple[Tensor, Tensor]:
    """`ops.linear_beside` of many rows and a weight that is not float32, in bfloat16."""
    flat = rounded(x, torch.bfloat16).reshape(-1, weight.in_features)
    first = torch.empty(len(flat), width + beside.shape[-1], dtype=torch.float32)
    rest = torch.empty(len(flat), weight.out_features - width, dtype=torch.float32)
    first[:, width:] = beside.reshape(len(flat), -1)
    for at, panel in panels(library, weight):
        cut = min(max(width - at, 0), len(panel))
        for to, column, piece in ((first, at, panel[:cut]), (rest, max(at - width, 0), panel[cut:])):
            if len(piece):
                library.finish(F.linear(flat, piece), None, None, to, column)
    return first.view(*x.shape[:-1], -1), rest.view(*x.shape[:-1], -1)


def rounded(x: Tensor, dtype: torch.dtype, norm: Norm | None = None, gate: str | None = None) -> Tensor:
    """x after its norm and its gate, in the dtype of a product."""
    library = dispatch.native(x)
    if library is not None:
        if norm is not None and gate is None and norm.simple and x.dtype == torch.float32:
            return library.rms_norm(x, norm.weight, norm.eps, dtype)
        if norm is None and gate in library.GATES:
            return library.glu(x, gate, dtype)
    x = x if norm is None else apply_norm(x, norm)
    return (x if gate is None else glu(x, gate)).to(dtype)


def panels(library: Library, weight: Weight) -> Iterator[tuple[int, Tensor]]:
    """(first output, bfloat16 `[n, K]`) for all outputs; the next panel overwrites one that was quantised."""
    if isinstance(weight, FloatWeight):
        yield 0, weight.matrix.to(torch.bfloat16)
        return
    n, k = weight.shape
    step = max(PANEL // k, 1)
    for first in range(0, n, step):
        count = min(step, n - first)
        panel = _buffer(k * count).view(count, k)
        library.dequantize(weight, first, panel)
        yield first, panel


def _buffer(size: int) -> Tensor:
    """bfloat16 `[size]`, this thread's own, whose numbers last until it is asked for again."""
    held: Tensor | None = getattr(_scratch, "buffer", None)
    if held is None or held.numel() < size:
        held = _scratch.buffer = torch.empty(max(size, PANEL), dtype=torch.bfloat16)
    return held[:size]
