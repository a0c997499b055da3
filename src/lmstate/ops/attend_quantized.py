"""Attention over keys and values that are stored in 8 or 4 bits, ring or not."""

from __future__ import annotations

import torch
from torch import Tensor

from lmstate.ops import kv_codes
from lmstate.ops.attend import attend, attend_reference

Coded = tuple[Tensor, Tensor]
"""Codes `[R, K, S, bytes]` and their scales `[R, K, S, n]`, as `kv_codes.encode` gives them."""


def attend_quantized(
    q: Tensor,
    k: Coded,
    v: Coded,
    starts: Tensor,
    counts: Tensor,
    *,
    bits: int,
    scale: float,
    dtype: torch.dtype = torch.float32,
    window: int | None = None,
    chunk: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """`ops.attend` over rings of codes: q float32 `[R, T, H, D]` -> float32 `[R, T, H, Dv]`, zero where padding.

    Reads what the codes stand for: whoever turned keys or values before they were stored turns q alike, and the output
    back. Long steps expand keys and values in `dtype` for the length of the call.
    """
    short = q.shape[1] <= 32
    filled = k[0].shape[2]
    if not torch.compiler.is_compiling() and starts.is_cpu:
        filled = min(filled, int((starts + counts).max()))  # position p < filled lies in slot p, or the ring is full
    own = torch.float32 if short else dtype
    keys, values = (kv_codes.decode(codes[:, :, :filled], scales[:, :, :filled], bits, own) for codes, scales in (k, v))
    body = attend if short else attend_reference
    return body(
        q, keys, values, starts, counts, scale=scale, window=window, chunk=chunk, softcap=softcap, sinks=sinks
    )  # fmt: skip
