"""The call into a native library's attention over slots, checked as in `library`."""

from __future__ import annotations

import ctypes
from functools import lru_cache
from struct import Struct

import torch
from torch import Tensor

from lmstate.ops import cpu
from lmstate.ops.cpu.arguments import KINDS, MAX_HEAD_DIM, function, integers, rule_fields, sinks_pointer
from lmstate.ops.scoring import Scoring, Sight

_ARGUMENTS = Struct("9P15q2d")


class Slots:
    """The body of one variant."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = function(library, "lmstate_attend_slots")

    def can(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether these dtypes, head dims and strides are among those of the body."""
        return (
            q.dtype == torch.float32
            and k.dtype == v.dtype
            and k.dtype in KINDS
            and k.shape[3] % 8 == v.shape[3] % 8 == 0
            and max(k.shape[3], v.shape[3]) <= MAX_HEAD_DIM
            and q.stride(3) == 1
            and k.is_contiguous()
            and v.is_contiguous()
        )

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        positions: Tensor,
        starts: Tensor,
        counts: Tensor,
        scoring: Scoring,
        sight: Sight,
        last: int | None,
    ) -> tuple[Tensor, Tensor | None]:
        """`attend_slots`."""
        rows, tokens, heads, dim = q.shape
        kv_heads, slots, dim_v = v.shape[1:]
        if k.shape != (rows, kv_heads, slots, dim) or positions.shape != k.shape[:3] or heads % kv_heads:
            raise ValueError(f"queries {list(q.shape)} do not fit slots k {list(k.shape)}, v {list(v.shape)}")
        positions = positions.to(torch.int32).contiguous()
        starts, counts = integers(starts, "starts", rows), integers(counts, "counts", rows)
        out = torch.empty(rows, tokens, heads, dim_v, dtype=torch.float32)
        seen = None if last is None else torch.zeros(rows, kv_heads, slots, last + 1, dtype=torch.float32)
        arguments = _ARGUMENTS.pack(
            q.data_ptr(), k.data_ptr(), v.data_ptr(), positions.data_ptr(), starts.data_ptr(), counts.data_ptr(),
            sinks_pointer(scoring, heads), out.data_ptr(),
            0 if seen is None else seen.data_ptr(),
            rows, tokens, heads, kv_heads, slots, dim, dim_v, last or 0, *q.stride()[:3],
            KINDS[k.dtype], *rule_fields(scoring, sight),
        )  # fmt: skip
        if self._attend(arguments):
            raise MemoryError(f"no memory for the scores of {slots} slots")
        return out, seen


@lru_cache
def slots(variant: str) -> Slots:
    """The body of the same variant as a `Library`."""
    return Slots(ctypes.CDLL(str(cpu.path_of(variant))))
