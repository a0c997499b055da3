"""Attention parameters shared by all rows, their masks and the views of stored keys and values that they apply to."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from lmstate.ops.types.block_table import Stored


class AttentionParams(NamedTuple):
    """Scores are q k^T * scale, through softcap * tanh(scores / softcap) where there is one (Gemma 2).

    `sinks`: float32 `[H]`, a logit a head that takes part in the softmax and has no value (GPT-OSS). `slopes`: float32
    `[H]`; a score loses a head's slope for each position between the key and the query (ALiBi, 2108.12409). `biases`:
    float32 `[H, M]`, added to the score of a key by its distance; one that is M positions away or more has the last
    (T5, 1910.10683). `[R, T, H, M]`: those of each query.
    """

    scale: float
    softcap: float | None = None
    sinks: Tensor | None = None
    slopes: Tensor | None = None
    biases: Tensor | None = None

    @property
    def plain(self) -> bool:
        """Whether a softmax of scaled products is all there is."""
        return self.softcap is None and self.sinks is None and not self.reads_distance

    @property
    def reads_distance(self) -> bool:
        """Whether scores depend on how far a key is before its query."""
        return self.slopes is not None or self.biases is not None

    def of(self, rows: slice, tokens: slice) -> AttentionParams:
        """The same for some of the rows and some of their new tokens."""
        if self.biases is None or self.biases.ndim == 2:
            return self
        return self._replace(biases=self.biases[rows, tokens].contiguous())

    def softmax(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, distance: Tensor | None = None
    ) -> Tensor:
        """q `[R, H, T, D]`, k `[R, K, S, D]`, v `[R, K, S, Dv]` -> `[R, H, T, Dv]`.

        visible: bool `[R, 1, T, S]` or `[T, S]`, or, if `plain`, what is added to the scores; None: causal, the last
        query sees all. distance: how far a key is before a query, like `visible`; for slopes and biases.
        """
        tokens, stored = q.shape[2], k.shape[2]
        gqa = bool(q.shape[1] != k.shape[1])  # torch.compile may hold sizes as symbols, and SDPA takes no SymBool
        plain = self.plain
        # On a GPU, torch's fast attention shares keys among heads in half precision alone, and under no other mask.
        shares = plain and (q.is_cpu or (visible is None and q.dtype != torch.float32))
        if gqa and not shares and plain and (visible is not None or tokens == 1):
            # The queries that share a head of keys as if they were more tokens of one head.
            group = q.shape[1] // k.shape[1]
            if visible is not None and tokens > 1:
                visible = visible.expand(q.shape[0], 1, tokens, stored).repeat(1, 1, group, 1)
            folded = F.scaled_dot_product_attention(
                q.reshape(q.shape[0], k.shape[1], group * tokens, q.shape[3]), k, v, attn_mask=visible, scale=self.scale
            )
            return folded.reshape(*q.shape[:3], v.shape[3])
        if gqa and not shares:
            k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for x in (k, v))
            gqa = False
        if plain:
            causal = visible is None and tokens == stored
            if visible is None and 1 < tokens < stored:
                visible = _causal_lower_right(tokens, stored, q.device)
            return F.scaled_dot_product_attention(
                q, k, v, attn_mask=visible, is_causal=causal, scale=self.scale, enable_gqa=gqa
            )
        if visible is None:
            visible = _causal_mask(tokens, stored, q.device)
        return self.weights(q @ k.transpose(2, 3), visible, distance).to(v.dtype) @ v

    def weights(self, products: Tensor, visible: Tensor, distance: Tensor | None = None) -> Tensor:
        """The softmax of q k^T `[R, H, T, S]` over the visible keys; float32. distance: as in `softmax`."""
        scores = products.float() * self.scale
        if self.softcap is not None:
            scores = self.softcap * torch.tanh(scores / self.softcap)
        if self.slopes is not None:
            assert distance is not None
            scores = scores - self.slopes.view(-1, 1, 1) * distance
        if self.biases is not None:
            assert distance is not None
            near = distance.clamp(0, self.biases.shape[-1] - 1)
            biases = self.biases[:, None] if self.biases.ndim == 2 else self.biases.transpose(1, 2)  # [.., H, T, M]
            scores = scores + biases.expand(*scores.shape[:-1], -1).gather(-1, near.expand_as(scores))
        scores = scores.masked_fill(~visible, -torch.inf)
        if self.sinks is None:
            return scores.softmax(-1)
        sinks = self.sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        return torch.cat([scores, sinks], dim=-1).softmax(-1)[..., :-1]


def _causal_lower_right(tokens: int, stored: int, device: torch.device) -> Tensor:
    """Arguments that tell SDPA that the last of `tokens` queries sees all `stored` keys.

    A GPU's fast kernels know torch's own `CausalBias`. On the CPU it stands for the plain mask, and importing it takes
    longer than the rest of torch.
    """
    if device.type == "cpu":
        return _causal_mask(tokens, stored, device)
    from torch.nn.attention.bias import causal_lower_right

    return causal_lower_right(tokens, stored)


def _causal_mask(tokens: int, stored: int, device: torch.device) -> Tensor:
    """Bool `[T, S]`."""
    return torch.ones(tokens, stored, dtype=torch.bool, device=device).tril(stored - tokens)


class CausalMask(NamedTuple):
    """Causal mask, optionally of a sliding `window`, whose last position is the query's, or of chunks (Llama 4)."""

    window: int | None = None
    chunk: int | None = None

    @property
    def span(self) -> int | None:
        """The most positions that a query sees, if there is a most."""
        return min((size for size in self if size is not None), default=None)

    def first_visible(self, position: int) -> int:
        """First position that a query at `position` sees."""
        low = 0 if self.window is None else max(0, position - self.window + 1)
        return low if self.chunk is None else max(low, position // self.chunk * self.chunk)

    def visible(self, own: Tensor, stored: Tensor) -> Tensor:
        """own: positions `[..., T, 1]`; stored: positions `[..., 1, S]`, negative where empty -> bool `[..., T, S]`."""
        return (stored >= 0) & (stored <= own) & ~self.expired(stored, own)

    def expired(self, stored: Tensor, own: Tensor) -> Tensor:
        """Whether the stored positions are too old for a query that is at `own`, and so for all later ones."""
        expired = torch.zeros((), dtype=torch.bool, device=stored.device)
        if self.window is not None:
            expired = expired | (stored <= own - self.window)
        if self.chunk is not None:
            expired = expired | (stored // self.chunk < own // self.chunk)
        return expired


FULL_CAUSAL = CausalMask()


@dataclass(frozen=True, eq=False)
class Norm:
    """Parameters of a norm. `weight` and `bias` are float32 `[E]`; `[H, E]` where every head has its own.

    `kind` "none": nothing is normalized, and the weight multiplies.
    """

    weight: Tensor
    eps: float
    kind: Literal["rms", "layer", "none"] = "rms"
    bias: Tensor | None = None

    @property
    def simple(self) -> bool:
        """Whether the native bodies know it."""
        return self.kind == "rms" and self.bias is None and self.weight.ndim == 1


class Residual(NamedTuple):
    """`stream + scale * norm(output)`; without a norm, the output itself."""

    stream: Tensor  # float32 [..., N]
    norm: Norm | None = None
    scale: float = 1.0

    @property
    def simple(self) -> bool:
        """Whether the native bodies know it."""
        return self.norm is None or self.norm.simple


class RopeTables(NamedTuple):
    """Cosines and sines of a step's positions: see `ops.rope`. A fused sublayer takes those of the first P, too."""

    cos: Tensor  # float32 [R, T, rot / 2], or [P, rot / 2]
    sin: Tensor
    interleaved: bool = False


class AttentionSums(NamedTuple):
    """Accumulated attention of slots, averaged over the query heads of a group.

    sums: float32 `[R, K, n, S]`: in the last plane what the token before position ends[r] gave, in those before it what
    the tokens before that one gave; the first plane also has what all earlier ones gave.
    """

    sums: Tensor
    ends: Tensor  # int64 [R]


class QuantizedKV(NamedTuple):
    """Codes `[R, K, S, bytes]` and float16 scales `[R, K, S, n]` of keys and values, position p in slot p % S.

    Those of `kv_format.encode(..., WHOLE)` after a Hadamard transform. With a `tail`, keys are those of
    `kv_format.encode_blocks`, S is a multiple of `BLOCK`, and the newest keys are also floats in this ring,
    transformed; see `ops.attend_quantized.attend_quantized`.
    """

    bits: int
    k: Stored
    v: Stored
    k_scale: Stored
    v_scale: Stored
    tail: Stored | None = None

    @property
    def tensors(self) -> tuple[Stored, Stored, Stored, Stored]:
        """Codes and scales."""
        return self.k, self.v, self.k_scale, self.v_scale


@dataclass(eq=False)
class KVView:
    """Keys `[R, K, S, D]` and values `[R, K, S, Dv]` in rings or blocks, and what a query sees.

    A layer that has evicted some counts what it kept instead of positions: `starts` int64 `[R]` says how many (these
    alone may be replaced). It may ask for two things to be filled in. `columns` float32 `[R, K, n, S]` gets the
    attention that slots receive (see `ops.attend_slots.AttentionSums`; those after the filled ones stay as they are).
    `queries` float32 `[R, T, H, D]` gets the queries as they attend.
    """

    k: Stored
    v: Stored
    mask: CausalMask = FULL_CAUSAL
    starts: Tensor | None = None
    columns: Tensor | None = None
    queries: Tensor | None = None
    quantized: QuantizedKV | None = None
    """Set if k and v are codes: its own."""
    packed: bytes | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "packed": None}  # it points to these tensors, not to those of a copy

    @cached_property
    def heads(self) -> tuple[int, int, int]:
        """R, K and D."""
        rows, kv_heads, _, width = self.k.shape
        return rows, kv_heads, width if self.quantized is None else width * 8 // self.quantized.bits


Gate = Literal["silu", "sigmoid"]
