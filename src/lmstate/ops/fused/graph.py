"""A run of layers of a decoder as one operation on the residual stream.

A block has two halves, attention or a recurrent layer and a gated feed-forward part. Halves that follow each other wait
in a `Run` until their stream is asked for, and then go through one native call, in one parallel region. What they give
is bit for bit what their operations give one after the other (but for the sigmoid of attention's gate).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from operator import is_not
from typing import TYPE_CHECKING
from weakref import ref

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cpu.fused_recurrent import Recurrence, carried, room
from lmstate.ops.dense.linear import is_gemv
from lmstate.ops.types.params import KVView, RopeTables
from lmstate.ops.types.sublayers import (
    AttentionSublayer,
    MLPSublayer,
    MoESublayer,
    RecurrentResult,
    RecurrentSublayer,
    Sublayer,
    pointers,
    requires_grad,
    storage,
)

if TYPE_CHECKING:
    from lmstate.ops.cpu import Library


@dataclass(slots=True)
class Waiting:
    """Halves that are to run, the rings of those that attend, their arguments, and what else these point to."""

    halves: list[Sublayer] = field(default_factory=list)
    rings: dict[int, KVView] = field(default_factory=dict)
    arguments: list[bytes] = field(default_factory=list)
    folds: dict[int, Recurrence] = field(default_factory=dict)  # of those that are recurrent, by their arguments' place
    held: list[Tensor] = field(default_factory=list)

    def carry(self, place: int, layer: Recurrence, carry: Sequence[Tensor], rows: int, tokens: int) -> RecurrentResult:
        """Have a recurrent layer take a carry, with all of its arguments in that place."""
        before = tuple(part.contiguous() for part in carry)
        new, kept = room(layer, rows, tokens)
        self.arguments[place] = carried(layer, before, new, kept)
        self.held += (*before, *new, kept)
        return RecurrentResult(kept[..., layer.first :], new)


class Chain:
    """Halves that waited, for the runs of later steps: while nothing moves, these differ in rotations, starts, carries.

    A step begins when all that it looks at has left the caches: to ask once whether anything moved, of nothing but the
    tensors, takes half of the time that having every half wait again does.
    """

    def __init__(
        self,
        library: Library,
        rows: int,
        waiting: Waiting,
        turns: list[tuple[RopeTables | None, bytes]],
        starts: list[tuple[Tensor | None, bytes]],
    ):
        self.library, self.rows, self.halves, self.arguments = library, rows, waiting.halves, waiting.arguments
        self.single = any(each.columns is not None or each.queries is not None for each in waiting.rings.values())
        """Whether something is as long as the step, so that it is only for steps of one token."""
        self.rings = {place: ref(rings) for place, rings in waiting.rings.items()}
        """Those of its halves; what they hold may be freed while the chain is there."""
        self.folds = waiting.folds
        turned = [(rotation, packed) for rotation, packed in turns if rotation is not None]
        self.rotations = [rotation for rotation, _ in turned]
        """Those of this step, in whose places another has its own."""
        self.turned = [self._places(packed) for _, packed in turned]
        self.placed = [self._places(packed) for _, packed in starts]
        kinds = [id(each) for each, _ in starts]
        self.starts = [kinds.index(id(rings.starts)) for rings in waiting.rings.values()]
        """For each of the rings, which of `placed` its starts are."""
        self._tensors = [tensor for half in waiting.halves for tensor in half.tensors()]
        self._pointers = pointers(self._tensors)
        self._weights = [weight for half in waiting.halves for weight in half.weights]
        self._storages = [weight.storage for weight in self._weights]

    def _places(self, packed: bytes) -> list[int]:
        return [place for place, each in enumerate(self.arguments) if each is packed]

    def stays(self) -> bool:
        """Whether nothing moved, and no gradient is to follow."""
        if any(map(is_not, map(storage, self._weights), self._storages)) or pointers(self._tensors) != self._pointers:
            return False
        return not (torch.is_grad_enabled() and any(map(requires_grad, self._tensors)))


class Run:
    """A stream float32 `[R, T, E]`, and the halves that are still to change it.

    starts, counts: int64 `[R]`, where a row's tokens start and how many there are; feed-forward parts need none.
    """

    def __init__(self, x: Tensor, starts: Tensor | None = None, counts: Tensor | None = None):
        self._starts, self._counts = starts, counts
        self._turns: dict[int, tuple[RopeTables | None, bytes]] = {}
        self._places: dict[int, tuple[Tensor | None, bytes]] = {}
        self._shape = x.shape[:2]
        self.add_to(x, x)
        self._whole = True

    def put(self, x: Tensor) -> None:
        """Go on with another stream."""
        self.add_to(x, x)
        self._whole = False

    def add_to(self, residual: Tensor | None, x: Tensor) -> None:
        """Go on with x, and add the next half to `residual` (None: to nothing) instead of to it."""
        self._x, self._residual = x, residual
        self._library = dispatch.native(x, residual) if is_gemv(x) else None
        self._width: int = x.shape[-1]
        self._waiting = Waiting()

    @property
    def native(self) -> bool:
        """Whether anything may wait here: native bodies know no other device, no gradient to follow, no long step."""
        return self._library is not None

    def takes(self, half: Sublayer | None) -> bool:
        """Whether a half may wait here."""
        return half is not None and self._library is not None and self._library.fused.pack(half) is not None

    def attends(self, half: AttentionSublayer, rings: KVView, rotation: RopeTables | None) -> bool:
        """Have attention wait; False where no native body does it."""
        library = self._library
        if library is None or self._counts is None or (constant := library.fused.pack(half)) is None:
            return False
        fused, (rows, tokens) = library.fused, self._shape
        if rings.packed is None and not fused.knows(rings):
            return False
        if rings.k.requires_grad and torch.is_grad_enabled():
            return False
        fused.check(half, rings, rotation, rows, tokens)
        if rings.packed is None:
            rings.packed = fused.rings(rings)
        if (turned := self._turns.get(id(rotation))) is None:
            turned = self._turns[id(rotation)] = rotation, fused.rotation(rotation, rows, tokens)
        if (placed := self._places.get(id(rings.starts))) is None:
            placed = self._places[id(rings.starts)] = rings.starts, fused.starts(rings.starts, rows)
        self._wait(half, constant, placed[1], rings.packed, turned[1], rings=rings)
        return True

    def feeds(self, half: MLPSublayer | MoESublayer) -> bool:
        """Have a feed-forward part or a mixture of them wait; False where no native body does it."""
        if self._library is None or (packed := self._library.fused.pack(half)) is None:
            return False
        self._wait(half, packed)
        return True

    def folds(self, half: RecurrentSublayer, carry: Sequence[Tensor]) -> RecurrentResult | None:
        """Have a recurrent layer wait; None where no native body does it. What it gives is there once the run goes."""
        layer = self.foldable(half, carry)
        if layer is None:
            return None
        self._wait(half, b"")
        place = len(self._waiting.arguments) - 1
        self._waiting.folds[place] = layer
        return self._waiting.carry(place, layer, carry, *self._shape)

    def foldable(self, half: RecurrentSublayer, carry: Sequence[Tensor]) -> Recurrence | None:
        """What of a recurrent layer would wait; None where no native body does it."""
        if self._library is None or self._counts is None:
            return None
        if torch.is_grad_enabled() and any(map(requires_grad, carry)):
            return None
        return self._library.fused.pack(half)

    def chain(self) -> Chain | None:
        """All that waits, for later steps; None where that is not all there was, or more will differ in them."""
        if self._library is None or not self._whole:
            return None
        turns, starts = list(self._turns.values()), list(self._places.values())
        chain = Chain(self._library, self._shape[0], self._waiting, turns, starts)
        return None if chain.single and self._shape[1] > 1 else chain

    def repeats(
        self, chain: Chain, rings: list[KVView], carries: Sequence[Sequence[Tensor]], rotations: Sequence[RopeTables]
    ) -> list[RecurrentResult] | None:
        """Have a chain wait with other starts, carries and rotations; None where something moved or is another."""
        library, (rows, tokens) = self._library, self._shape
        alike = all(one.cos.shape[-1] == other.cos.shape[-1] for one, other in zip(rotations, chain.rotations))
        fits = rows == chain.rows and (tokens == 1 or not chain.single) and self._width == chain.halves[0].in_features
        if library is not chain.library or not (fits and alike) or [at() for at in chain.rings.values()] != rings:
            return None
        if len(carries) != len(chain.folds) or not chain.stays():
            return None
        changed = [*(each.k for each in rings), *(part for carry in carries for part in carry)]
        if torch.is_grad_enabled() and any(map(requires_grad, changed)):
            return None
        starts: list[Tensor | None] = [None] * len(chain.placed)
        for each, kind in zip(rings, chain.starts):
            starts[kind] = each.starts
        if any(each.starts is not starts[kind] for each, kind in zip(rings, chain.starts)):
            return None
        waiting = self._waiting = Waiting(chain.halves, dict(zip(chain.rings, rings)), chain.arguments.copy())
        packed = [library.fused.rotation(rotation, rows, tokens) for rotation in rotations]
        packed += [library.fused.starts(each, rows) for each in starts]
        for new, places in zip(packed, chain.turned + chain.placed, strict=True):
            for place in places:
                waiting.arguments[place] = new
        self._width = chain.halves[-1].out_features
        folds = zip(chain.folds.items(), carries)
        return [waiting.carry(place, layer, carry, rows, tokens) for (place, layer), carry in folds]

    def stream(self) -> Tensor:
        """What has become of it."""
        if self._waiting.halves:
            assert self._library is not None
            y = self._library.fused.run(self._x, self._residual, self._starts, self._counts, self._waiting)
            self.put(y)
        return self._x

    def _wait(self, half: Sublayer, *arguments: bytes, rings: KVView | None = None) -> None:
        if half.in_features != self._width:
            raise ValueError(f"{half.ends[0]} does not fit a stream of {self._width} features")
        self._width = half.out_features
        waiting = self._waiting
        if rings is not None:
            waiting.rings[len(waiting.halves)] = rings
        waiting.halves.append(half)
        waiting.arguments += arguments


def fused_feed_forward(x: Tensor, half: MLPSublayer, stream: Tensor | None) -> Tensor | None:
    """A feed-forward part in one native call, x `[..., K]` -> float32 `[..., N]`; None where no body does it."""
    run = Run(x.reshape(1, -1, x.shape[-1]))
    run.add_to(None if stream is None else stream.reshape(1, -1, stream.shape[-1]), run.stream())
    return run.stream().view(*x.shape[:-1], -1) if run.feeds(half) else None
