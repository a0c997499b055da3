"""Attention whose queries, keys and values see a few tokens back before they are compared (CCA, 2510.04476)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.rope import Rope
from lmstate.ops import Norm, Residual
from lmstate.ops.recurrent.causal_conv import causal_conv, tap_major
from lmstate.ops.recurrent.grouped_conv import head_conv
from lmstate.state import CompositeState, LayerState, Layout, RecurrentState, Step
from lmstate.state.layers.scans import Carry


@dataclass(frozen=True, eq=False)
class CompressedConvAttention:
    """Compressed convolutional attention (ZAYA1).

    `attention.qkv` gives queries and keys, then the half of the values that the next token will have, then the half
    that this one has. Queries and keys pass a convolution per feature and one per head. The average of each query head
    and its key head is added to the result, which is then normalized; each key head has a scale.

    The scan computes the convolutions. The half of the values for the next token is a convolution with a single tap.
    All biases are added after the scan, so that its inputs before a text are zero.
    """

    attention: Attention  # without norms of heads
    conv: Tensor  # [(H + K) * D + K * D / 2, C]
    head_conv: Tensor  # [H + K, C' * D, D]
    conv_bias: Tensor  # [(H + K) * D]
    head_norm: Norm
    key_scale: Tensor  # [K]
    late_bias: Tensor | None = None  # [K * D / 2], of the values that come late

    def __post_init__(self) -> None:
        object.__setattr__(self, "conv", tap_major(self.conv))

    @property
    def kind(self) -> str:
        return "composite"

    @property
    def rope(self) -> Rope | None:
        return self.attention.rope

    @property
    def heads(self) -> tuple[int, int]:
        """H, K"""
        return self.attention.heads, self.attention.kv_heads

    def new_state(self, layout: Layout) -> LayerState:
        (width, kernel), (heads, size, dim) = self.conv.shape, self.head_conv.shape
        shapes = [(kernel - 1, width), (size // dim - 1, heads, dim)]
        convs = RecurrentState(layout, self.scan, shapes, width, names=["conv", "head_conv"])
        return CompositeState([self.attention.new_state(layout), convs])

    def scan(self, inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None) -> tuple[Tensor, Carry]:
        """Queries, keys, values to come `[R, T, F]` -> the first two convolved, the last a token late `[R, T, F]`."""
        tail, of_heads = carry
        y, tail = causal_conv(inputs, tail, self.conv, None, counts)
        qk, late = y.split([len(self.conv_bias), inputs.shape[-1] - len(self.conv_bias)], dim=-1)
        qk = qk.unflatten(-1, (sum(self.heads), -1))
        qk, of_heads = head_conv(qk, of_heads, self.head_conv, counts)
        return torch.cat([qk.flatten(-2), late], dim=-1), (tail, of_heads)

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, CompositeState)
        of_attention, of_convs = cache.members
        assert isinstance(of_convs, RecurrentState)
        heads, kv_heads = self.heads
        inputs, v = ops.linear(x, self.attention.qkv, self.attention.qkv_bias, norm=norm).tensor_split(
            [len(self.conv)], dim=-1
        )
        convolved, late = of_convs.advance(inputs, step).tensor_split([len(self.conv_bias)], dim=-1)
        late = late if self.late_bias is None else late + self.late_bias
        q, k = self._parted(inputs[..., : len(self.conv_bias)])  # [R, T, H, D], [R, T, K, D]
        q = 0.5 * (q + k.repeat_interleave(heads // kv_heads, dim=-2))
        k = q.unflatten(-2, (kv_heads, -1)).mean(-2)
        more_q, more_k = self._parted(convolved + self.conv_bias)
        q = ops.norm(q + more_q, self.head_norm)
        k = ops.norm(k + more_k, self.head_norm) * self.key_scale[:, None]
        qkv = torch.cat([q.flatten(-2), k.flatten(-2), v, late], dim=-1)
        return self.attention.mix(qkv, step, of_attention, residual)

    def _parted(self, qk: Tensor) -> tuple[Tensor, Tensor]:
        """Queries `[R, T, H, D]` and keys `[R, T, K, D]`."""
        q, k = qk.unflatten(-1, (sum(self.heads), -1)).split(self.heads, dim=-2)
        return q, k
