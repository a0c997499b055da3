"""Sublayers of a block that a `FusedGraph` can run: attention, MLP, mixture of experts, recurrent layers.

Each is its weights and sizes, from the residual stream and back to it; `lmstate.ops.cpu` packs them by type.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from operator import attrgetter
from typing import Literal, NamedTuple

from torch import Tensor

from lmstate.ops.types.mixers import GatedDeltaParams, Mamba2Params
from lmstate.ops.types.params import AttentionParams, Norm
from lmstate.ops.types.weight import Weight

Carry = tuple[Tensor, ...]
storage, requires_grad = attrgetter("storage"), attrgetter("requires_grad")


@dataclass(frozen=True, eq=False, kw_only=True)
class Sublayer(ABC):
    """`stream + scale * post_norm(f(norm(stream)))`.

    Called for every sublayer at each decode step, cold in cache: keep it short.
    """

    norm: Norm | None = None
    post_norm: Norm | None = None
    scale: float = 1.0

    @property
    @abstractmethod
    def ends(self) -> tuple[Weight, Weight]:
        """The first product and the last."""

    @cached_property
    def in_features(self) -> int:
        """Features of the stream that it reads."""
        return self.ends[0].in_features

    @cached_property
    def out_features(self) -> int:
        """Features of the stream that it returns."""
        return self.ends[1].out_features

    @cached_property
    def weights(self) -> tuple[Weight, ...]:
        """Every product."""
        return tuple(leaf for leaf in _leaves(tuple(vars(self).values())) if isinstance(leaf, Weight))

    @cached_property
    def parameters(self) -> list[Tensor]:
        """Norms, biases and the like."""
        return [leaf for leaf in _leaves(tuple(vars(self).values())) if isinstance(leaf, Tensor)]

    def tensors(self) -> list[Tensor]:
        """All tensors that its arguments point to; a weight may have got another storage since the last call."""
        return [*map(storage, self.weights), *self.parameters]


@dataclass(frozen=True, eq=False)
class AttentionSublayer(Sublayer):
    """`out(attend(qkv(x)))` of H query heads over K key/value heads of D features.

    `gate`: each query head's rows of `qkv` are followed by as many of a gate; `gates`: the last rows of `qkv` gate
    whole heads. `shared_kv`: `qkv` gives queries alone; keys and values are another layer's.
    """

    qkv: Weight
    out: Weight
    heads: int
    kv_heads: int
    head_dim: int
    params: AttentionParams
    q_norm: Norm | None = None
    k_norm: Norm | None = None
    v_norm: Norm | None = None
    qkv_bias: Tensor | None = None
    out_bias: Tensor | None = None
    gate: bool = False
    gates: int = 0
    shared_kv: bool = False

    @property
    def ends(self) -> tuple[Weight, Weight]:
        return self.qkv, self.out


@dataclass(frozen=True, eq=False)
class MLPSublayer(Sublayer):
    """`down(act(gate) * up)` with gate | up = `factors * up(x)`."""

    up: Weight
    down: Weight
    act: str
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    factors: Tensor | None = None
    parallel: bool = False
    """It reads the input of the sublayer before it, and is added to that one's output."""

    @property
    def ends(self) -> tuple[Weight, Weight]:
        return self.up, self.down


class Expert(NamedTuple):
    """`down(act(gate) * up)` with gate | up = `up(x)`."""

    up: Weight
    down: Weight
    act: str
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


class RouterParams(NamedTuple):
    """The choice of experts and their weights; `models.layers.moe.Router` has the meaning of each."""

    weight: Weight
    top_k: int
    scoring: Literal["softmax", "sigmoid"]
    normalize: bool
    scale: float
    bias: Tensor | None
    e_score_correction_bias: Tensor | None
    groups: int
    topk_groups: int
    group_score: Literal["top1", "top2"]
    floor: float


@dataclass(frozen=True, eq=False)
class MoESublayer(Sublayer):
    """`sum of weight * expert(x) + shared(x)`; see `models.layers.moe`."""

    router: RouterParams
    experts: tuple[Expert, ...]
    shared: Expert | None = None
    shared_gate: Weight | None = None
    scale_input: bool = False

    @property
    def ends(self) -> tuple[Weight, Weight]:
        return self.router.weight, self.experts[0].down


class Unscanned(NamedTuple):
    """Inputs of a recurrent sublayer's scan that come before those of a step, and are not in the carry yet."""

    inputs: Tensor  # [N, F], of all rows, without padding
    counts: tuple[int, ...]  # of each row
    counts_t: Tensor  # int64 [R], the same
    begins_t: Tensor  # int64 [R + 1]: where each row's begin, and N


class ScanStart(NamedTuple):
    """Start of a recurrent sublayer's scan, and the places on its way at which the carry is kept as well."""

    carry: Carry
    unscanned: Unscanned | None = None
    marks: Tensor | None = None  # int64 [R]: tokens of each row's step; 0: none


class RecurrentResult(NamedTuple):
    """A recurrent sublayer's step, for its layer's state; valid after `flush()`."""

    inputs: Tensor  # [N, F], of the scan: of the tokens of all rows, without padding
    carry: Carry
    marked: Carry | None = None  # that at the marks; of rows without one nothing is said


@dataclass(frozen=True, eq=False)
class RecurrentSublayer(Sublayer):
    """`out(mixer(project(x)))`, where the mixer is a recurrence."""

    project: Weight
    out: Weight
    bias: Tensor | None = field(default=None, kw_only=True)
    out_bias: Tensor | None = field(default=None, kw_only=True)

    @property
    def ends(self) -> tuple[Weight, Weight]:
        return self.project, self.out


@dataclass(frozen=True, eq=False)
class GatedDeltaSublayer(RecurrentSublayer):
    """`out(gated_delta_mixer(project(x), gates(x)))`; `project` is the `qkvz` of `models.layers.gated_delta_net`."""

    gates: Weight
    params: GatedDeltaParams


@dataclass(frozen=True, eq=False)
class Mamba2Sublayer(RecurrentSublayer):
    """`out(mamba2_mixer(factors * project(x)))`."""

    params: Mamba2Params
    factors: Tensor | None = None
    parallel: bool = False
    """As in `MLPSublayer`."""


@dataclass(frozen=True, eq=False)
class ShortConvSublayer(RecurrentSublayer):
    """`out(c * conv(b * x))` with b | c | x = `project(x)`."""

    conv: Tensor
    conv_bias: Tensor | None = None


def pointers(tensors: list[Tensor]) -> list[int]:
    """Addresses of the tensors."""
    return list(map(Tensor.data_ptr, tensors))


def _leaves(value: object) -> Iterator[Weight | Tensor]:
    """Weights and tensors of a sublayer's fields."""
    if isinstance(value, (Weight, Tensor)):
        yield value
    elif isinstance(value, Norm):
        yield from _leaves((value.weight, value.bias))
    elif isinstance(value, tuple):
        for each in value:
            yield from _leaves(each)
