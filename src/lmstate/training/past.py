"""Attention of a chunk to what earlier chunks stored, whose gradients add up beside it until these have their turn."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lmstate.ops.attention.attend import attend_span
from lmstate.ops.types.params import AttentionParams, CausalMask
from lmstate.state import Layout
from lmstate.state.blocks import Buffer

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def whole_text(buffers: Iterable[Buffer], layout: Layout) -> list[Tensor]:
    """`[R, *heads, S, D]` for every position of a text of `layout.capacity` tokens."""
    assert layout.capacity is not None
    return [buffer.zeros(layout.capacity, (layout.rows,)) for buffer in buffers]


class Past:
    """Two buffers `[R, K, S, D]` of every position, keys and values say, and the gradients of what they hold."""

    def __init__(self, k: Tensor, v: Tensor) -> None:
        self.k, self.v = k, v
        self._grads: tuple[Tensor, Tensor] | None = None

    def received(self, k: Tensor, v: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """A chunk's own `[R, K, T, D]`: forward they are stored, backward the gradients of later chunks join theirs."""
        stop = start + k.shape[2]
        if not torch.is_grad_enabled():
            self.k[:, :, start:stop], self.v[:, :, start:stop] = k, v
            return k, v
        if self._grads is None:
            return k, v
        joined: tuple[Tensor, Tensor] = _Later.apply(k, v, *(grad[:, :, start:stop] for grad in self._grads))
        return joined

    def joined(self, k: Tensor, v: Tensor, low: int, start: int) -> tuple[Tensor, Tensor]:
        """Keys and values at `low .. start - 1` followed by a chunk's own; gradients of the past are added here."""
        if low == start:
            return k, v
        if not torch.is_grad_enabled():
            stop = start + k.shape[2]
            return self.k[:, :, low:stop], self.v[:, :, low:stop]
        parts = []
        for own, buffer, grads in zip((k, v), (self.k, self.v), self.grads):
            leaf = buffer[:, :, low:start].detach().requires_grad_()
            leaf.register_hook(lambda grad, into=grads[:, :, low:start]: into.add_(grad))
            parts.append(torch.cat([leaf, own], dim=2))
        return parts[0], parts[1]

    def gathered(self, k: Tensor, v: Tensor, kept: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values at the positions kept `[R, K, M]`, -1 for none, then a chunk's own; as `joined` else."""
        parts = []
        for at, (own, buffer) in enumerate(((k, self.k), (v, self.v))):
            index = kept.clamp(min=0)[..., None].expand(-1, -1, -1, buffer.shape[-1])
            leaf = buffer.gather(2, index)
            if torch.is_grad_enabled() and leaf.numel():
                leaf.requires_grad_().register_hook(partial(_scatter, self.grads[at], index))
            parts.append(torch.cat([leaf, own], dim=2))
        return parts[0], parts[1]

    def forget(self) -> None:
        """Begin another backward."""
        self._grads = None

    @property
    def grads(self) -> tuple[Tensor, Tensor]:
        """Gradients of keys and values, in their dtype; zero before something was added."""
        if self._grads is None:
            self._grads = torch.zeros_like(self.k), torch.zeros_like(self.v)
        return self._grads


def _scatter(into: Tensor, index: Tensor, grad: Tensor) -> None:
    into.scatter_add_(2, index, grad)


class _Later(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, k: Tensor, v: Tensor, *later: Tensor) -> tuple[Tensor, Tensor]:
        ctx.later = later
        return k.view_as(k), v.view_as(v)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0] + ctx.later[0], grads[1] + ctx.later[1], None, None


def attend_past(
    q: Tensor, k: Tensor, v: Tensor, past: Past, start: int, params: AttentionParams, mask: CausalMask
) -> Tensor:  # fmt: skip
    """`ops.attend` with gradients: q `[R, T, H, D]`, a chunk's own k and v `[R, K, T, D]` -> float32 `[R, T, H, Dv]`.

    Positions before `start` are read in `past`, and their gradients are added there.
    """
    plain = params.plain and mask.span is None
    if plain and start and q.device.type == "cpu" and q.shape[-1] == v.shape[-1]:
        seen: Tensor = _AttendPast.apply(q.transpose(1, 2).to(k.dtype), k, v, past, start, params.scale)
        return seen.transpose(1, 2).float()
    low = min(mask.first_visible(start), start)
    keys, values = past.joined(k, v, low, start)
    return attend_span(q, keys, values, start, low, params, mask)


class _AttendPast(torch.autograd.Function):
    """Attention to the past, all of it visible, and to the chunk itself, causally, with one softmax over both.

    Each half is attention of its own, whose logarithm of the sum of exponentials says what share of the whole it has.
    Backward, a half is given the whole's output and logarithm, and its gradients are those of its part of the whole:
    no keys are copied, and no mask exists.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, past: Past, start: int, scale: float
    ) -> Tensor:  # fmt: skip
        before = past.k[:, :, :start], past.v[:, :, :start]
        old, old_share = _flash(q, *before, scale=scale)
        new, new_share = _flash(q, k, v, 0.0, True, scale=scale)
        share = torch.logaddexp(old_share, new_share)  # [R, H, T]
        parts = [out * (own - share).exp()[..., None] for out, own in ((old, old_share), (new, new_share))]
        out = (parts[0] + parts[1]).to(q.dtype)
        ctx.save_for_backward(q, k, v, out, share)
        ctx.past, ctx.start, ctx.scale = past, start, scale
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, share = ctx.saved_tensors
        past, start, scale = ctx.past, ctx.start, ctx.scale
        before = past.k[:, :, :start], past.v[:, :, :start]
        grad = grads[0].contiguous()
        dq, dk, dv = _flash_backward(grad, q, *before, out, share, 0.0, False, scale=scale)
        for own, into in zip((dk, dv), past.grads):
            into[:, :, :start] += own
        more, dk, dv = _flash_backward(grad, q, k, v, out, share, 0.0, True, scale=scale)
        return dq + more, dk, dv, None, None, None
