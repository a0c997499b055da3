"""The halves of a block that may wait in a `Run`: attention, a gated feed-forward part; more in `recurrent_halves`."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from lmstate.ops.types.params import Norm
from lmstate.ops.types.weight import Weight

if TYPE_CHECKING:
    from lmstate.ops.cpu import Library

Packed = TypeVar("Packed")
storage, requires_grad = attrgetter("storage"), attrgetter("requires_grad")


class Sublayer(ABC, Generic[Packed]):
    """A half of a block: what it tells the native call is packed once, for as long as its weights stay in place.

    A step looks at every half when all that it needs of them has left the caches: it should touch little.
    """

    _packed: Packed | None = None
    _pointers: list[int] | None = None

    @property
    @abstractmethod
    def ends(self) -> tuple[Weight, Weight]:
        """The first product and the last."""

    @property
    def weights(self) -> tuple[Weight, ...]:
        """Every product."""
        return self.ends

    @property
    @abstractmethod
    def others(self) -> list[Tensor]:
        """Norms, biases and the like."""

    def tensors(self) -> list[Tensor]:
        """All that its arguments point to, as it is now."""
        return [*map(storage, self.weights), *self.others]

    @cached_property
    def inputs(self) -> int:
        """Features of the stream that it reads."""
        return self.ends[0].in_features

    @cached_property
    def outputs(self) -> int:
        """Features of the stream that it gives."""
        return self.ends[1].out_features

    @abstractmethod
    def pack(self, library: Library) -> Packed | None:
        """What does not change from step to step; None if it has a norm, say, that the bodies do not know."""

    def ready(self, library: Library) -> Packed | None:
        """The same; None where no native body does it."""
        tensors = self.tensors()
        at = pointers(tensors)
        if at != self._pointers:
            self._packed = self.pack(library) if all(tensor.is_cpu for tensor in tensors) else None
            self._pointers = at
        if torch.is_grad_enabled() and any(map(requires_grad, tensors)):
            return None
        return self._packed


class AttentionParts(Protocol):
    """What a layer of attention is made of; see `models.mixers.attention.Attention`."""

    @property
    def qkv(self) -> Weight: ...
    @property
    def out(self) -> Weight: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def scale(self) -> float: ...
    @property
    def softcap(self) -> float | None: ...
    @property
    def sinks(self) -> Tensor | None: ...
    @property
    def q_norm(self) -> Norm | None: ...
    @property
    def k_norm(self) -> Norm | None: ...
    @property
    def v_norm(self) -> Norm | None: ...
    @property
    def qkv_bias(self) -> Tensor | None: ...
    @property
    def out_bias(self) -> Tensor | None: ...
    @property
    def gate(self) -> bool: ...
    @property
    def gates(self) -> int: ...
    @property
    def reads(self) -> int | None: ...


@dataclass(eq=False)
class AttentionSublayer(Sublayer[bytes]):
    """`stream + scale * after(out(attend(qkv(norm(x)))))`."""

    parts: AttentionParts
    norm: Norm | None = None
    after: Norm | None = None
    scale: float = 1.0

    @cached_property
    def heads(self) -> tuple[int, int, int]:
        """H, K and D."""
        return self.parts.heads, self.parts.kv_heads, self.parts.head_dim

    @cached_property
    def ends(self) -> tuple[Weight, Weight]:
        return self.parts.qkv, self.parts.out

    @cached_property
    def others(self) -> list[Tensor]:
        p = self.parts
        return tensors_of(self.norm, self.after, p.q_norm, p.k_norm, p.v_norm, p.qkv_bias, p.out_bias, p.sinks)

    def pack(self, library: Library) -> bytes | None:
        known = simple(self.norm, self.after, self.parts.q_norm, self.parts.k_norm, self.parts.v_norm)
        return library.fused.attention(self) if known else None


@dataclass(eq=False)
class MLPSublayer(Sublayer[bytes]):
    """`stream + scale * after(down(act(gate) * up))` with gate | up = `factors * up(norm(x))`."""

    up: Weight
    down: Weight
    act: str
    norm: Norm | None = None
    after: Norm | None = None
    scale: float = 1.0
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None
    parallel: bool = False
    """It reads what the half before it read, and is added to what that one gave."""
    factors: Tensor | None = None

    @cached_property
    def ends(self) -> tuple[Weight, Weight]:
        return self.up, self.down

    @cached_property
    def others(self) -> list[Tensor]:
        return tensors_of(self.norm, self.after, self.up_bias, self.down_bias, self.factors)

    def pack(self, library: Library) -> bytes | None:
        known = self.act in library.GATES and simple(self.norm, self.after)
        return library.fused.feed_forward(self, library.GATES[self.act]) if known else None


def pointers(tensors: list[Tensor]) -> list[int]:
    """Where they lie."""
    return list(map(Tensor.data_ptr, tensors))


def tensors_of(*parts: Norm | Tensor | None) -> list[Tensor]:
    """The tensors of what is there."""
    return [part.weight if isinstance(part, Norm) else part for part in parts if part is not None]


def simple(*norms: Norm | None) -> bool:
    """Whether the native bodies know them all."""
    return all(norm is None or norm.simple for norm in norms)
