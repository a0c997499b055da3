"""Attention under its usual Hugging Face names."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lmstate.checkpoints.loader import WeightLoader
from lmstate.errors import ModelError
from lmstate.models.families.builders.dims import Dims
from lmstate.models.layers.attention import Attention
from lmstate.models.layers.cross_attention import CrossAttention
from lmstate.models.layers.rope import Rope
from lmstate.ops import Norm


def attention(
    w: WeightLoader,
    prefix: str,
    shape: Dims,
    rope: Rope | None,
    *,
    window: int | None = None,
    q_norm: Norm | None = None,
    k_norm: Norm | None = None,
    scale: float | None = None,
    softcap: float | None = None,
    v_norm: Norm | None = None,
    gate: bool = False,
    reads: int | None = None,
    query: str = "q_proj",
    key: str = "k_proj",
    value: str = "v_proj",
    gates: tuple[str, int] | None = None,
    out: str = "o_proj",
    biased: bool | None = None,
    out_biased: bool | None = None,
    unbiased: str | None = None,
    whole_pictures: bool = False,
    beyond_window: bool = False,
) -> Attention:
    """Attention whose projections are `q_proj`, `k_proj`, `v_proj`, `o_proj` under `prefix`, with or without biases.

    `gate`: `q_proj` gives each query head's gate too. `gates`: a projection that gives them, without a bias: its name
    and how many. `reads`: the layer whose keys and values this one attends to; it has none of its own. `query`, `key`,
    `value`, `out`: other names for the projections. `biased`: whether biases must be there; None: where
    `attention_bias` says so. `out_biased`: the same of `o_proj`; None: as of the others.
    `unbiased`: the one projection that has none.
    """
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    queries = width * (2 if gate else 1)
    parts, widths = [query], [queries]
    if reads is None:
        parts, widths = [*parts, key, value], [queries, kv_width, kv_width]
    biased = w.config.bool("attention_bias", default=False) if biased is None else biased
    bias = biases(w, *(f"{prefix}.{part}.bias" for part in parts), wanted=biased, without=f"{prefix}.{unbiased}.bias")
    if gates is not None:
        parts, widths = [*parts, gates[0]], [*widths, gates[1]]
        bias = None if bias is None else torch.cat([bias, bias.new_zeros(gates[1])])
    return Attention(
        w.linear(*(f"{prefix}.{part}.weight" for part in parts), shape=(widths, shape.hidden)),
        w.linear(f"{prefix}.{out}.weight", shape=(shape.hidden, width)),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim**-0.5 if scale is None else scale,
        rope,
        window,
        softcap=softcap,
        q_norm=q_norm,
        k_norm=k_norm,
        qkv_bias=bias,
        out_bias=biases(w, f"{prefix}.{out}.bias", wanted=biased if out_biased is None else out_biased),
        gate=gate,
        v_norm=v_norm,
        reads=reads,
        gates=0 if gates is None else gates[1],
        whole_pictures=whole_pictures,
        beyond_window=beyond_window,
    )


def cross_attention(
    w: WeightLoader,
    prefix: str,
    shape: Dims,
    *,
    names: tuple[str, str, str, str] = ("q_proj", "k_proj", "v_proj", "out_proj"),
    biased: bool,
    unbiased_keys: bool = False,
    scale: float | None = None,
    softcap: float | None = None,
    source_width: int | None = None,
) -> CrossAttention:
    """Attention to a source. `names`: of its projections; `source_width`: of the encoder, where it is another.

    `unbiased_keys`: the projection of keys has no bias, where the others have one.
    """
    query, key, value, out = (f"{prefix}.{name}" for name in names)
    width, kv_width = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    source_width = shape.hidden if source_width is None else source_width
    return CrossAttention(
        w.linear(f"{query}.weight", shape=(width, shape.hidden)),
        w.linear(f"{key}.weight", f"{value}.weight", shape=((kv_width, kv_width), source_width)),
        w.linear(f"{out}.weight", shape=(shape.hidden, width)),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim**-0.5 if scale is None else scale,
        biases(w, f"{query}.bias", wanted=biased),
        biases(w, f"{key}.bias", f"{value}.bias", wanted=biased, without=f"{key}.bias" if unbiased_keys else None),
        biases(w, f"{out}.bias", wanted=biased),
        softcap,
    )


def fused_attention(
    w: WeightLoader,
    shape: Dims,
    rope: Rope | None,
    fused: str,
    out: str,
    *,
    window: int | None = None,
    grouped: bool = False,
    biased: bool = False,
) -> Attention:
    """Attention whose projections are one matrix: all queries, all keys, all values.

    `fused` and `out` are the names of that matrix and of the projection after attention. `grouped`: stored is for each
    key/value head its queries, then its key, then its value.
    """
    height = (shape.heads + 2 * shape.kv_heads) * shape.head_dim

    def order() -> Tensor:
        """Order of the stored rows, int64 `[(H + 2 * K) * D]`."""
        rows = torch.arange(height).view(shape.kv_heads, -1, shape.head_dim)  # [K, H / K + 2, D]
        return torch.cat([rows[:, :-2].flatten(), rows[:, -2].flatten(), rows[:, -1].flatten()])

    qkv = w.linear(f"{fused}.weight", shape=(height, shape.hidden), order=order if grouped else None)
    bias = w.tensor(f"{fused}.bias", (height,)) if biased else None
    return Attention(
        qkv,
        w.linear(f"{out}.weight", shape=(shape.hidden, shape.heads * shape.head_dim)),
        shape.heads,
        shape.kv_heads,
        shape.head_dim,
        shape.head_dim**-0.5,
        rope,
        window,
        qkv_bias=bias[order().to(bias.device)] if bias is not None and grouped else bias,
        out_bias=w.tensor(f"{out}.bias", (shape.hidden,)) if biased else None,
    )


def number(tensor: Tensor) -> float:
    """The only number of a tensor; NaN of one without numbers, in a model of shapes."""
    return math.nan if tensor.is_meta else float(tensor)


def biases(w: WeightLoader, *names: str, wanted: bool = False, without: str | None = None) -> Tensor | None:
    """The biases of stacked projections in one vector, as long as those are high; None if the checkpoint has none.

    `wanted`: it is an error if there are none. `without`: one of the names that has none, which counts as zeros.
    """

    def height(name: str) -> tuple[int, ...]:
        return w.shape(f"{name.removesuffix('bias')}weight")[:1]

    found = {name: w.tensor(name, height(name)) for name in names if w.has(name)}
    missing = [name for name in names if name not in found and name != without]
    if missing and (found or wanted):
        raise ModelError(f"{w.source.path} lacks some of {', '.join(names)}; the checkpoint is incomplete")
    if not found:
        return None
    zeros = next(iter(found.values())).new_zeros
    return torch.cat([found[name] if name in found else zeros(height(name)) for name in names])
