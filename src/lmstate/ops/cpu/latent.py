"""The calls into a native library's latent attention, checked as in `library`."""

from __future__ import annotations

import ctypes
from struct import Struct

import torch
from torch import Tensor

from lmstate.ops.cpu.arguments import KINDS, check_attended, function, integers

_ATTEND = Struct("7P19qd")
_BY_HEAD = Struct("3P8q")


class Latent:
    """The bodies of one variant. Queries are float32 on the processor; every call returns a new tensor, contiguous."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._attend = function(library, "lmstate_latent_attend")
        self._by_head = function(library, "lmstate_by_head")

    def can_attend(self, q_latent: Tensor, q_rope: Tensor, latent: Tensor, rope_key: Tensor) -> bool:
        """Whether these dtypes and strides are among those of the body."""
        return (
            q_latent.dtype == q_rope.dtype == torch.float32
            and latent.dtype == rope_key.dtype
            and latent.dtype in KINDS
            and q_latent.stride(3) == q_rope.stride(3) == latent.stride(2) == rope_key.stride(2) == 1
        )

    def attend(
        self,
        q_latent: Tensor,
        q_rope: Tensor,
        latent: Tensor,
        rope_key: Tensor,
        starts: Tensor,
        counts: Tensor,
        scale: float,
        window: int | None,
    ) -> Tensor:
        """`latent_attend`."""
        rows, tokens, heads, dim = q_latent.shape
        slots, rope_dim = rope_key.shape[1:]
        if (
            q_rope.shape != (rows, tokens, heads, rope_dim)
            or latent.shape != (rows, slots, dim)
            or len(rope_key) != rows
        ):
            raise ValueError(
                f"queries {list(q_latent.shape)} and {list(q_rope.shape)} do not fit latents {list(latent.shape)} and "
                f"rope keys {list(rope_key.shape)}"
            )
        starts, counts = integers(starts, "starts", rows), integers(counts, "counts", rows)
        out = torch.empty(rows, tokens, heads, dim, dtype=torch.float32)
        arguments = _ATTEND.pack(
            q_latent.data_ptr(), q_rope.data_ptr(), latent.data_ptr(), rope_key.data_ptr(), starts.data_ptr(),
            counts.data_ptr(), out.data_ptr(),
            rows, tokens, heads, slots, dim, rope_dim, *q_latent.stride()[:3], *q_rope.stride()[:3],
            *latent.stride()[:2], *rope_key.stride()[:2], KINDS[latent.dtype], window or 0, torch.get_num_threads(),
            scale,
        )  # fmt: skip
        check_attended(self._attend(arguments), q_latent, latent[:, None], starts, counts)
        return out

    def per_head_matmul(self, x: Tensor, matrices: Tensor) -> Tensor:
        """`per_head_matmul` of contiguous matrices."""
        *outer, heads, inputs = x.shape
        outputs = matrices.shape[2]
        if matrices.shape != (heads, inputs, outputs):
            raise ValueError(f"matrices {list(matrices.shape)} do not fit x {list(x.shape)}")
        x = x.flatten(0, -3)
        x = x if x.stride(2) == 1 else x.contiguous()
        y = torch.empty(*outer, heads, outputs, dtype=torch.float32)
        arguments = _BY_HEAD.pack(
            x.data_ptr(), matrices.data_ptr(), y.data_ptr(), len(x), heads, inputs, outputs, KINDS[matrices.dtype],
            torch.get_num_threads(), *x.stride()[:2],
        )  # fmt: skip
        self._by_head(arguments)
        return y
