"""Attention of a decoder to an encoded source, and of an encoder to all of its text."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.relative_bias import RelativeBias
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import CrossState, LayerState, Layout, Step
from lmstate.state.step import integers


@dataclass(frozen=True, eq=False)
class CrossAttention:
    """Attention of H query heads to the K heads of keys and values of a source (Vaswani et al. 2017).

    `kv [2 * K * D, E]` makes them of what the encoder gives, once for a source; `queries [H * D, E]` of each token.
    """

    queries: Weight
    kv: Weight
    out: Weight
    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    query_bias: Tensor | None = None
    kv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    softcap: float | None = None

    @property
    def kind(self) -> str:
        return "cross"

    def new_state(self, layout: Layout) -> LayerState:
        return CrossState(layout, self.kv_heads, self.head_dim)

    def keys_values(self, encoded: Tensor) -> dict[str, Tensor]:
        """The encoder's output `[1, S, E]` -> keys and values `[K, S, D]`."""
        k, v = ops.linear(encoded, self.kv, self.kv_bias)[0].unflatten(-1, (2, self.kv_heads, -1)).unbind(1)
        return {"k": k.transpose(0, 1), "v": v.transpose(0, 1)}

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, CrossState)
        q = ops.linear(x, self.queries, self.query_bias, norm=norm).unflatten(-1, (self.heads, -1))
        seen = cache.attend(q, step, ops.AttentionParams(self.scale, self.softcap))
        return ops.linear(seen.flatten(-2), self.out, self.out_bias, residual=residual)


@dataclass(frozen=True, eq=False)
class BidirectionalAttention:
    """The attention of an encoder: each token sees all of the text, which comes as one piece and leaves no state.

    `attention`: its weights. `window`: how far a token sees to either side (T5Gemma); None: everything.
    """

    attention: Attention
    bias: RelativeBias | None = None
    window: int | None = None

    @property
    def kind(self) -> str:
        return "bidirectional"

    def new_state(self, layout: Layout) -> LayerState:
        raise AssertionError("an encoder keeps nothing of a text")

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        own = self.attention
        qkv = ops.linear(x, own.qkv, own.qkv_bias, norm=norm).unflatten(-1, (-1, own.head_dim))
        q, k, v = qkv.split([own.heads, own.kv_heads, own.kv_heads], dim=2)  # [1, S, H, D], [1, S, K, D] twice
        if (rotation := own.rotation(step)) is not None:
            q, k = ops.rope(q, *rotation), ops.rope(k, *rotation)
        keys, values = (part.transpose(1, 2).contiguous() for part in (k, v))
        length = integers([x.shape[1]])
        params = ops.AttentionParams(own.scale, own.softcap)
        seen = ops.attend_whole(q, keys, values, length, length, params, self.added(step))
        return ops.linear(seen.flatten(-2), own.out, own.out_bias, residual=residual)

    def added(self, step: Step) -> Tensor | None:
        """What is added to the scores, float32 `[H, S, S]`; None: nothing."""
        if (bias := self.bias) is not None:
            return step.cached(bias, lambda: bias.between(step.width))
        if self.window is None or step.width <= self.window:
            return None
        return step.cached(("window", self.window), lambda: self._hidden(step))

    def _hidden(self, step: Step) -> Tensor:
        """A mask of minus infinity outside of each token's window, `[H, S, S]`."""
        at = torch.arange(step.width, device=step.device)
        far = (at[:, None] - at).abs() >= (self.window or 0)
        hidden = torch.zeros(far.shape, device=step.device).masked_fill(far, -torch.inf)
        return hidden.expand(self.attention.heads, -1, -1)
