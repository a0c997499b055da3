"""A run of layers of a decoder as one operation on the residual stream.

A block has two halves, attention or a recurrent layer and a gated feed-forward part. Halves that follow each other wait
in a `Run` until their stream is asked for, and then go through one native call, in one parallel region. What they give
is bit for bit what their operations give one after the other (but for the sigmoid of attention's gate).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cpu.fused_recurrent import carried, room
from lmstate.ops.halves import AttentionHalf, FeedForwardHalf, Half
from lmstate.ops.linear import few_rows
from lmstate.ops.recurrent_halves import Carry, Folded, RecurrentHalf
from lmstate.ops.rotate_attend import Rotation
from lmstate.ops.scoring import EVERYTHING, Sight


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


class Waiting(NamedTuple):
    """A half that is to run, its arguments, and what these point to."""

    arguments: bytes
    half: Half[Any]
    rings: Rings | None = None
    held: tuple[Tensor, ...] = ()


class Run:
    """A stream float32 `[R, T, E]`, and the halves that are still to change it.

    starts, counts: int64 `[R]`, where a row's tokens start and how many there are; feed-forward parts need none.
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

    def takes(self, half: Half[Any] | None) -> bool:
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
        self._wait(Waiting(b"".join([constant, placed[1], rings.packed, turned[1]]), half, rings))
        return True

    def feeds(self, half: FeedForwardHalf) -> bool:
        """Have a feed-forward part wait; False where no native body does it."""
        if self._library is None or (packed := half.ready(self._library)) is None:
            return False
        self._wait(Waiting(packed, half))
        return True

    def folds(self, half: RecurrentHalf, carry: Carry) -> Folded | None:
        """Have a recurrent layer wait; None where no native body does it. What it gives is there once the run goes."""
        library = self._library
        if library is None or self._counts is None or (layer := half.ready(library)) is None:
            return None
        if torch.is_grad_enabled() and (carry[0].requires_grad or carry[1].requires_grad):
            return None
        tail, state = (part.contiguous() for part in carry)
        new, kept = room(layer, *self._x.shape[:2])
        self._wait(Waiting(carried(layer, (tail, state), new, kept), half, held=(tail, state, *new, kept)))
        return Folded(kept[..., layer.first :], new)

    def stream(self) -> Tensor:
        """What has become of it."""
        if self._waiting:
            assert self._library is not None
            y = self._library.fused.run(self._x, self._residual, self._starts, self._counts, self._waiting)
            self.put(y)
        return self._x

    def _wait(self, waiting: Waiting) -> None:
        first, width = waiting.half.ends[0], self._x.shape[-1]
        if self._waiting:
            width = self._waiting[-1].half.ends[1].out_features
        if first.in_features != width:
            raise ValueError(f"{first} does not fit a stream of {width} features")
        self._waiting.append(waiting)


def fused_feed_forward(x: Tensor, half: FeedForwardHalf, stream: Tensor | None) -> Tensor | None:
    """A feed-forward part in one native call, x `[..., K]` -> float32 `[..., N]`; None where no body does it."""
    run = Run(x.reshape(1, -1, x.shape[-1]))
    run.add_to(None if stream is None else stream.reshape(1, -1, stream.shape[-1]), run.stream())
    return run.stream().view(*x.shape[:-1], -1) if run.feeds(half) else None
