"""The hybrid layer of Zamba: a transformer block whose weights several layers share, and a Mamba that reads it too."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.mamba import Mamba
from lmstate.models.layers.mamba2 import Mamba2
from lmstate.models.layers.mlp import MLP
from lmstate.models.layers.rope import Rope
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import CompositeState, LayerState, Layout, Step


@dataclass(frozen=True, eq=False)
class KeptEmbedding:
    """Leaves the embedding of a step's tokens where hybrid layers find it."""

    reads_tokens: ClassVar[bool] = False

    def __call__(self, x: Tensor, tokens: Tensor, step: Step) -> Tensor:
        step.extras["embedding"] = x
        return x


@dataclass(eq=False)
class LayerAdapter:
    """One layer's update of projections that it shares: a product of low rank each (LoRA, Hu et al. 2021).

    `down [n * rank, K]` serves all n of them; `ups [N, rank]`: one each, whose outputs are side by side.
    """

    down: Weight
    ups: tuple[Weight, ...]

    def __call__(self, x: Tensor) -> Tensor:
        parts = ops.linear(x, self.down).chunk(len(self.ups), dim=-1)
        return torch.cat([ops.linear(part, up) for part, up in zip(parts, self.ups)], dim=-1)


@dataclass(eq=False)
class SharedTransformer:
    """Attention over the stream beside the embedding, `[R, T, 2E]`, then a gated feed-forward part, and no residuals.

    Everything but the adapters is the same in each layer that uses it.
    """

    attention: Attention
    attention_norm: Norm
    mlp: MLP
    mlp_norm: Norm
    mlp_adapter: LayerAdapter | None = None
    attention_adapter: LayerAdapter | None = None

    def __call__(self, x: Tensor, step: Step, cache: LayerState) -> Tensor:
        both = torch.cat([x, step.extras["embedding"]], dim=-1)  # [R, T, 2E]
        both = ops.norm(both, self.attention_norm)
        qkv = ops.linear(both, self.attention.qkv, self.attention.qkv_bias)
        if self.attention_adapter is not None:
            qkv = qkv + self.attention_adapter(both)
        x = ops.norm(self.attention.mix(qkv, step, cache), self.mlp_norm)  # [R, T, E]
        hidden = ops.linear(x, self.mlp.up, self.mlp.up_bias)
        if self.mlp_adapter is not None:
            hidden = hidden + self.mlp_adapter(x)
        return ops.linear(hidden, self.mlp.down, self.mlp.down_bias, gate=self.mlp.act)


@dataclass(eq=False)
class ZambaHybrid:
    """A Mamba whose input is the stream and, through a matrix of this layer's own, the shared transformer's output.

    Glorioso et al. 2024 (2405.16712, and with Mamba-2 2411.15242). The transformer's output goes into the state space
    alone, not into the stream.
    """

    transformer: SharedTransformer
    link: Weight  # [E, E]
    mamba: Mamba | Mamba2
    mamba_norm: Norm

    @property
    def kind(self) -> str:
        return "composite"

    @property
    def rope(self) -> Rope | None:
        return self.transformer.attention.rope

    def new_state(self, layout: Layout) -> LayerState:
        return CompositeState([self.transformer.attention.new_state(layout), self.mamba.new_state(layout)])

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, CompositeState) and norm is None, "the stream itself goes into the transformer"
        of_attention, of_mamba = cache.members
        joined = ops.linear(self.transformer(x, step, of_attention), self.link, residual=Residual(x))
        return self.mamba(joined, step, of_mamba, self.mamba_norm, residual)
