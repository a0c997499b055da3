"""A run of layers of a decoder as one operation on the residual stream.

A block has two halves, attention and a gated feed-forward part. Halves that follow each other wait in a `Run` until
their stream is asked for, and then go through one native call, in one parallel region. What they give is bit for bit
what their operations give one after the other (but for the sigmoid of a gate).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.linear import few_rows
from lmstate.ops.norm import Norm
from lmstate.ops.rotate_attend import Rotation
from lmstate.ops.scoring import EVERYTHING, Sight
from lmstate.ops.weight import Weight

if TYPE_CHECKING:
    from lmstate.ops.cpu import Library


class Coded(NamedTuple):
    """What keys and values in few bits have beside their codes; see `ops.attend_quantized.attend_quantized`."""

    bits: int
    k_scale: Tensor
    v_scale: Tensor
    tail: Tensor | None = None


@dataclass(eq=False)
class Rings:
    """Keys `[R, K, S, D]` and values `[R, K, S, Dv]` as they are, position p in slot p % S, and what a query sees.

    A layer that has evicted some counts what it kept instead of positions: `starts` int64 `[R]` says how many (these
    alone may be replaced). It may ask for two things to be filled in: `columns` float32 `[R, K, n, S]` with the
    attention that slots receive (see `ops.attend_slots.Columns`; what lies behind the filled ones stays as it is), and
    `queries` float32 `[R, T, H, D]` with the queries as they attend.
    """

    k: Tensor
    v: Tensor
    sight: Sight = EVERYTHING
    starts: Tensor | None = None
    columns: Tensor | None = None
    queries: Tensor | None = None
    coded: Coded | None = None
    """Where k and v are codes."""
    packed: bytes | None = field(default=None, init=False, repr=False)

    def __getstate__(self) -> dict[str, object]:
        return {**vars(self), "packed": None}  # it points to these tensors, not to those of a copy

    @property
    def dim(self) -> int:
        """D."""
        return self.k.shape[3] if self.coded is None else self.k.shape[3] * 8 // self.coded.bits


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
    def qkv_bias(self) -> Tensor | None: ...
    @property
    def out_bias(self) -> Tensor | None: ...
    @property
    def gate(self) -> bool: ...


_requires_grad = attrgetter("requires_grad")


class Half(ABC):
    """A half of a block: its arguments to the native call are packed once, for as long as its weights stay in place."""

    _packed: bytes | None = None
    _pointers: Sequence[int] = ()

    @property
    @abstractmethod
    def ends(self) -> tuple[Weight, Weight]:
        """The first product and the last."""

    @abstractmethod
    def tensors(self) -> list[Tensor]:
        """All that its arguments point to."""

    @abstractmethod
    def pack(self, library: Library) -> bytes | None:
        """Its arguments; None if it has a norm or an activation that the bodies do not know."""

    def ready(self, library: Library) -> bytes | None:
        """Its arguments; None where no native body does it."""
        tensors = self.tensors()
        pointers = [tensor.data_ptr() for tensor in tensors]
        if pointers != self._pointers:
            self._packed = self.pack(library) if all(tensor.is_cpu for tensor in tensors) else None
            self._pointers = pointers
        if torch.is_grad_enabled() and any(map(_requires_grad, tensors)):
            return None
        return self._packed


@dataclass(eq=False)
class AttentionHalf(Half):
    """`stream + scale * after(out(attend(qkv(norm(x)))))`."""

    parts: AttentionParts
    norm: Norm | None = None
    after: Norm | None = None
    scale: float = 1.0

    @property
    def ends(self) -> tuple[Weight, Weight]:
        return self.parts.qkv, self.parts.out

    def tensors(self) -> list[Tensor]:
        p = self.parts
        return _tensors(p.qkv, p.out, self.norm, self.after, p.q_norm, p.k_norm, p.qkv_bias, p.out_bias, p.sinks)

    def pack(self, library: Library) -> bytes | None:
        simple = _simple(self.norm, self.after, self.parts.q_norm, self.parts.k_norm)
        return library.fused.attention(self) if simple else None


@dataclass(eq=False)
class FeedForwardHalf(Half):
    """`stream + scale * after(down(act(gate) * up))` with gate | up = `up(norm(x))`."""

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

    @property
    def ends(self) -> tuple[Weight, Weight]:
        return self.up, self.down

    def tensors(self) -> list[Tensor]:
        return _tensors(self.up, self.down, self.norm, self.after, self.up_bias, self.down_bias)

    def pack(self, library: Library) -> bytes | None:
        known = self.act in library.GATES and _simple(self.norm, self.after)
        return library.fused.feed_forward(self, library.GATES[self.act]) if known else None


class Waiting(NamedTuple):
    """A half that is to run, its arguments, and what these point to."""

    arguments: bytes
    half: Half
    rings: Rings | None


class Run:
    """A stream float32 `[R, T, E]`, and the halves that are still to change it.

    starts, counts: int64 `[R]`, where a row's tokens start and how many there are; attention needs them.
    """

    def __init__(self, x: Tensor, starts: Tensor | None = None, counts: Tensor | None = None):
        self._starts, self._counts = starts, counts
        self._turns: dict[int, tuple[Rotation | None, bytes]] = {}
        self._places: dict[int, tuple[Tensor | None, bytes]] = {}
        self.put(x)

    def put(self, x: Tensor) -> None:
        """Go on with another stream."""
        self.add_to(x, x)

    def add_to(self, residual: Tensor | None, x: Tensor) -> None:
        """Go on with x, and add the next half to `residual` (None: to nothing) instead of to it."""
        self._x, self._residual = x, residual
        self._library = dispatch.native(x, residual) if few_rows(x) else None
        self._waiting: list[Waiting] = []

    @property
    def native(self) -> bool:
        """Whether anything may wait here: native bodies know no other device, no gradient to follow, no long step."""
        return self._library is not None

    def takes(self, half: Half | None) -> bool:
        """Whether a half may wait here."""
        return half is not None and self._library is not None and half.ready(self._library) is not None

    def attends(self, half: AttentionHalf, rings: Rings, rotation: Rotation | None) -> bool:
        """Have attention wait; False where no native body does it."""
        library = self._library
        if library is None or self._counts is None or (constant := half.ready(library)) is None:
            return False
        fused, (rows, tokens, _) = library.fused, self._x.shape
        if rings.packed is None:
            if not fused.knows(rings):
                return False
            rings.packed = fused.rings(rings)
        if rings.k.requires_grad and torch.is_grad_enabled():
            return False
        if (turned := self._turns.get(id(rotation))) is None:
            turned = self._turns[id(rotation)] = rotation, fused.rotation(rotation, rows, tokens)
        if (placed := self._places.get(id(rings.starts))) is None:
            placed = self._places[id(rings.starts)] = rings.starts, fused.starts(rings.starts, rows)
        fused.check(half.parts, rings, rotation, rows, tokens)
        self._wait(half, b"".join([constant, placed[1], rings.packed, turned[1]]), rings)
        return True

    def feeds(self, half: FeedForwardHalf) -> bool:
        """Have a feed-forward part wait; False where no native body does it."""
        if self._library is None or (packed := half.ready(self._library)) is None:
            return False
        self._wait(half, packed, None)
        return True

    def stream(self) -> Tensor:
        """What has become of it."""
        if self._waiting:
            assert self._library is not None
            y = self._library.fused.run(self._x, self._residual, self._starts, self._counts, self._waiting)
            self.put(y)
        return self._x

    def _wait(self, half: Half, arguments: bytes, rings: Rings | None) -> None:
        first, width = half.ends[0], self._waiting[-1].half.ends[1].out_features if self._waiting else self._x.shape[-1]
        if first.in_features != width:
            raise ValueError(f"{first} does not fit a stream of {width} features")
        self._waiting.append(Waiting(arguments, half, rings))


def fused_feed_forward(x: Tensor, half: FeedForwardHalf, stream: Tensor | None) -> Tensor | None:
    """A feed-forward part in one native call, x `[..., K]` -> float32 `[..., N]`; None where no body does it."""
    run = Run(x.reshape(1, -1, x.shape[-1]))
    run.add_to(None if stream is None else stream.reshape(1, -1, stream.shape[-1]), run.stream())
    return run.stream().view(*x.shape[:-1], -1) if run.feeds(half) else None


def _tensors(first: Weight, last: Weight, *others: Norm | Tensor | None) -> list[Tensor]:
    found = [each.weight if isinstance(each, Norm) else each for each in others if each is not None]
    return [first.storage, last.storage, *found]


def _simple(*norms: Norm | None) -> bool:
    return all(norm is None or norm.simple for norm in norms)
