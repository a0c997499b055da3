"""Constructors of the states of attention layers, by the policy in their layout."""

from __future__ import annotations

from dataclasses import replace

from lmstate.errors import UnsupportedError
from lmstate.ops import FULL_CAUSAL, CausalMask
from lmstate.state.kv.eviction.attention import EvictingState
from lmstate.state.kv.eviction.latent import EvictingLatentState
from lmstate.state.kv.policies.base import Evicting
from lmstate.state.kv.policies.storage import Dense, Quantized
from lmstate.state.kv.quantized.attention import (
    QuantizedAttentionState,
    QuantizedChosenBlocksState,
    QuantizedIndexedAttentionState,
    QuantizedIndexedLatentState,
    QuantizedLatentState,
)
from lmstate.state.kv.quantized.blocks import BlockState
from lmstate.state.layers.attention import AttentionState, KeyValueState
from lmstate.state.layers.base import Layout
from lmstate.state.layers.compressed import CompressedState, PooledIndexState, Pooling, WindowedVectors
from lmstate.state.layers.indexed_attention import BlockChoice, ChosenBlocksState, IndexedAttentionState
from lmstate.state.layers.latent import IndexedLatentState, LatentState, Shift


def attention_state(
    layout: Layout,
    kv_heads: int,
    head_dim: int,
    value_dim: int | None = None,
    *,
    mask: CausalMask = FULL_CAUSAL,
    rotate_by: Shift | None = None,
    heads: int,
    scale: float,
) -> KeyValueState:
    """The state of a layer of K kv heads of `head_dim` under `layout.kv`; the arguments are `EvictingState`'s.

    A layer whose window is no longer than the budget of an evicting policy keeps its window, stored as the policy says.
    """
    policy = layout.kv
    if isinstance(policy, Evicting):
        if mask.span is None or mask.span > policy.most:
            return EvictingState(
                layout,
                policy,
                kv_heads,
                head_dim,
                value_dim,
                mask=mask,
                rotate_by=rotate_by,
                heads=heads,
                scale=scale,
            )
        policy = policy.storage
    if isinstance(policy, Quantized) and policy.bits == 8:
        return QuantizedAttentionState(layout, kv_heads, head_dim, value_dim, mask=mask)
    if isinstance(policy, Quantized):
        return BlockState(layout, policy, kv_heads, head_dim, value_dim, mask=mask)
    return AttentionState(stored_as(layout, policy), kv_heads, head_dim, value_dim, mask=mask, rotate_by=rotate_by)


def latent_state(
    layout: Layout,
    latent_dim: int,
    rope_dim: int,
    *,
    rotate_by: Shift | None = None,
    window: int | None = None,
    heads: int,
    scale: float,
) -> LatentState | EvictingLatentState:
    """The state of a layer of latent attention under `layout.kv`.

    A layer whose window is no longer than the budget of an evicting policy keeps its window, stored as the policy says.
    Raises `UnsupportedError` where it is longer.
    """
    policy = layout.kv
    if isinstance(policy, Evicting) and window is not None:
        if window > policy.most:
            raise UnsupportedError(
                f"kv={policy} was asked for; a layer of this model has a window of {window} positions, of which "
                f"none can be forgotten: give a budget of at least {window}, or use Dense() or Quantized()"
            )
        policy = policy.storage
    if isinstance(policy, Evicting):
        return EvictingLatentState(layout, policy, latent_dim, rope_dim, rotate_by=rotate_by, heads=heads, scale=scale)
    if isinstance(policy, Quantized):
        return QuantizedLatentState(layout, policy, latent_dim, rope_dim, rotate_by=rotate_by, window=window)
    return LatentState(stored_as(layout, policy), latent_dim, rope_dim, rotate_by=rotate_by, window=window)


def indexed_latent_state(
    layout: Layout,
    latent_dim: int,
    rope_dim: int,
    index_dim: int,
    *,
    rotate_by: Shift | None,
    rotate_index_by: Shift,
) -> LatentState:
    """The same of a layer whose index chooses what it attends to; for `keeping_all(layout)`."""
    policy = layout.kv
    if isinstance(policy, Quantized):
        return QuantizedIndexedLatentState(
            layout, policy, latent_dim, rope_dim, index_dim, rotate_index_by=rotate_index_by
        )
    layout = stored_as(layout, policy)
    return IndexedLatentState(
        layout, latent_dim, rope_dim, index_dim, rotate_by=rotate_by, rotate_index_by=rotate_index_by
    )


def indexed_attention_state(
    layout: Layout,
    kv_heads: int,
    head_dim: int,
    index_dim: int,
    choice: BlockChoice,
    *,
    rotate_by: Shift | None,
    rotate_index_by: Shift,
) -> IndexedAttentionState:
    """The state of a layer whose index chooses blocks of keys and values.

    Raises `UnsupportedError` for static states, for policies that forget, and for fewer than 8 bits.
    """
    kind = QuantizedIndexedAttentionState if isinstance(layout.kv, Quantized) else IndexedAttentionState
    layout = _gathered(layout)
    return kind(
        layout, kv_heads, head_dim, index_dim, choice, rotate_by=rotate_by, rotate_index_by=rotate_index_by
    )  # fmt: skip


def pooled_index_state(
    layout: Layout, kv_heads: int, head_dim: int, pooling: Pooling, *, rotate_by: Shift | None
) -> PooledIndexState:
    """The same of a layer whose index has one key for the `pooling.rate` positions of a block."""
    kind = QuantizedChosenBlocksState if isinstance(layout.kv, Quantized) else ChosenBlocksState
    layout = _gathered(layout)
    keys = kind(layout, kv_heads, head_dim, pooling.rate, rotate_by=rotate_by)
    return PooledIndexState(layout, keys, pooling)


def pooled_latent_state(layout: Layout, latent_dim: int, rope_dim: int, pooling: Pooling) -> PooledIndexState:
    """The same over latents whose rope keys do not rotate; they may be quantized."""
    policy = layout.kv
    if isinstance(policy, Quantized):
        return PooledIndexState(layout, QuantizedLatentState(layout, policy, latent_dim, rope_dim), pooling)
    layout = _gathered(layout)
    return PooledIndexState(layout, LatentState(layout, latent_dim, rope_dim), pooling)


def _gathered(layout: Layout) -> Layout:
    """`layout` in its policy's dtype. Raises `UnsupportedError` for static states, where positions are forgotten, and
    for fewer than 8 bits."""
    layout = keeping_all(layout)
    few = isinstance(layout.kv, Quantized) and layout.kv.bits < 8
    if few or layout.static:
        raise UnsupportedError(
            f"{f'kv={layout.kv}' if few else 'static=True'} was asked for; a layer of this model gathers what an index "
            "chooses, which is done for growing states in floats or 8 bits alone: leave it out, or use Quantized(8)"
        )
    return stored_as(layout, layout.kv)


def compressed_state(
    layout: Layout, width: int, window: int, pooling: Pooling | None = None
) -> CompressedState | WindowedVectors:
    """The state of a layer that attends to a window of vectors, and to compressed entries where there is `pooling`.

    Raises `UnsupportedError` for static states, and for policies that forget or quantize.
    """
    if layout.kv is not None and not isinstance(layout.kv, Dense):
        raise UnsupportedError(
            f"kv={layout.kv} was asked for; a layer of this model keeps a window of keys and compressed entries, which "
            "no policy shortens or quantizes: use Dense(), or leave kv out"
        )
    if layout.static:
        raise UnsupportedError(
            "static=True was asked for; a layer of this model compresses tokens as they come, and has no static form: "
            "leave static out"
        )
    layout = stored_as(layout, layout.kv)
    if pooling is None:
        return WindowedVectors(layout, "k", width, window)
    return CompressedState(layout, width, window, pooling)


def keeping_all(layout: Layout) -> Layout:
    """`layout`. Raises `UnsupportedError` for a policy that forgets positions."""
    if isinstance(layout.kv, Evicting):
        raise UnsupportedError(
            f"kv={layout.kv} was asked for; a layer of this model attends to positions that an index chooses among all "
            "of them, so that none can be forgotten: use Dense() or Quantized()"
        )
    return layout


def stored_as(layout: Layout, policy: object) -> Layout:
    """The layout in the dtype that a dense policy asks for."""
    if isinstance(policy, Dense) and policy.dtype is not None:
        return replace(layout, dtype=policy.dtype)
    return layout
