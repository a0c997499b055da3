"""A block that reads pictures beside the text (Llama 3.2 Vision, 2407.21783).

y = x + tanh(gate) * out(attention(norm(q), norm(k), v))    # q of norm(x); k and v of the pictures' embeddings
z = y + tanh(mlp_gate) * mlp(norm(y))

A token attends to the last pictures at or before it that follow each other. In front of them all, z = x.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from lmstate import ops
from lmstate.models.layers.mlp import MLP
from lmstate.ops import Norm, Residual, Weight
from lmstate.state import LayerState, Layout, PictureReadingState, Step
from lmstate.state.media import Media, is_held, read_by
from lmstate.state.step import integers

Pictures: TypeAlias = tuple[Media, ...]


@dataclass(frozen=True, eq=False)
class PictureAttention:
    """Attention of H query heads to the K heads of keys and values of pictures, and a feed-forward part.

    `kv [2 * K * D, E]` makes them of a picture's embeddings, once as long as some row has it. `gate`, `mlp_gate`:
    float32 `[1]`, what they multiply.
    """

    queries: Weight
    kv: Weight
    out: Weight
    heads: int
    kv_heads: int
    head_dim: int
    q_norm: Norm
    k_norm: Norm
    gate: Tensor
    mlp: MLP
    mlp_norm: Norm
    mlp_gate: Tensor

    @property
    def kind(self) -> str:
        return "cross"

    def new_state(self, layout: Layout) -> LayerState:
        return PictureReadingState(layout)

    def __call__(
        self, x: Tensor, step: Step, cache: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        assert isinstance(cache, PictureReadingState) and residual is not None
        readings = step.cached("readings of pictures", lambda: _readings(step))
        if not readings:
            return residual.stream
        q = ops.norm(ops.linear(x, self.queries, norm=norm).unflatten(-1, (self.heads, -1)), self.q_norm)
        seen, reads = torch.zeros_like(q), torch.zeros(*x.shape[:2], 1, dtype=torch.bool, device=x.device)
        params = ops.AttentionParams(self.head_dim**-0.5)
        for row, first, stop, pictures, count in readings:
            own, length = slice(first, stop), sum(_length(picture) for picture in pictures[:count])
            k, v = self.keys_values(pictures, cache.dtype)
            sizes = integers([length]), integers([stop - first])
            seen[row : row + 1, own] = ops.attend_whole(q[row : row + 1, own].contiguous(), k, v, *sizes, params)
            reads[row, own] = True
        y = residual.stream + self.gate * ops.linear(seen.flatten(-2), self.out)
        return torch.where(reads, y + self.mlp_gate * self.mlp(y, self.mlp_norm), residual.stream)

    def keys_values(self, pictures: Pictures, dtype: torch.dtype) -> tuple[Tensor, ...]:
        """Keys and values `[1, K, S, D]` of pictures that follow each other.

        They are kept with the last one as long as there are the others, unless their weights are trained.
        """
        kept = [picture.derived for picture in pictures][-1].of.setdefault(self, {})
        key = (dtype, *(picture.hash for picture in pictures))
        if (known := kept.get(key)) is None:
            with torch.inference_mode(False), torch.enable_grad():
                known = self._keys_values(pictures, dtype)
            if not known[0].requires_grad:
                for gone in [each for each in [*kept] if not all(map(is_held, each[1:]))]:
                    kept.pop(gone, None)
                kept[key] = known
        return known

    def _keys_values(self, pictures: Pictures, dtype: torch.dtype) -> tuple[Tensor, ...]:
        parts = []
        for picture in pictures:
            assert picture.embeddings is not None  # a state takes none without them
            kv = ops.linear(picture.embeddings.to(self.kv.device), self.kv).unflatten(-1, (2, self.kv_heads, -1))
            k, v = kv.unbind(1)
            parts.append((ops.norm(k.contiguous(), self.k_norm), v))
        return tuple(torch.cat(each).transpose(0, 1)[None].to(dtype).contiguous() for each in zip(*parts))


def _length(picture: Media) -> int:
    assert picture.embeddings is not None
    return len(picture.embeddings)


def _readings(step: Step) -> list[tuple[int, int, int, Pictures, int]]:
    """Row, first place in the step and the one after the last, pictures, and how many of them are seen there."""
    return [
        (row, first - step.starts[row], stop - step.starts[row], pictures, seen)
        for row, spans in enumerate(step.media)
        for first, stop, pictures, seen in read_by(spans, step.starts[row], step.ends[row])
    ]
