"""Sublayers of a decoder fused into one operation on the residual stream.

A block has two sublayers: attention or a recurrent layer, and a gated feed-forward part or a mixture of experts. Those
that are added to a `FusedGraph` run at its `flush`, in one native call and one parallel region, and give bit for bit
what their operations give one after the other (but for the sigmoid of attention's gate). Sublayers that were added once
can be captured, and replayed in later steps.

`LMSTATE_FUSE=0` switches it off: every operation then runs by itself. It is read once, at the first operation.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import compress
from typing import TYPE_CHECKING, NamedTuple
from weakref import ref

import torch
from torch import Tensor

from lmstate.ops import dispatch
from lmstate.ops.cpu.fused_recurrent import Recurrence, carried, room
from lmstate.ops.types.params import KVView, RopeTables
from lmstate.ops.types.sublayers import (
    AttentionSublayer,
    MLPSublayer,
    MoESublayer,
    RecurrentResult,
    ScanStart,
    Sublayer,
    pointers,
    requires_grad,
    storage,
)

if TYPE_CHECKING:
    from lmstate.ops.cpu import Library

VARIABLE = "LMSTATE_FUSE"
FUSED_ROWS = 512
"""Tokens of a step, over all rows, up to which sublayers are fused: as many as a prompt's parts have."""


@lru_cache(maxsize=1)
def fuses() -> bool:
    """Whether sublayers may be fused at all. ValueError where the variable is neither 0 nor 1."""
    asked = os.environ.get(VARIABLE, "").strip() or "1"
    if asked not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={asked}: 1 fuses sublayers where native bodies can, 0 runs every operation alone")
    return asked == "1"


def is_short(x: Tensor, tokens: int | None = None) -> bool:
    """Whether a stream is short enough to be worth fusing, and of the dtype that native bodies take.

    tokens: how many of its tokens are not padding, if some are.
    """
    width = x.shape[-1]
    return (x.numel() if tokens is None else tokens * width) <= FUSED_ROWS * width and x.dtype == torch.float32


def packable(sublayers: Sequence[Sublayer]) -> bool:
    """Whether there are native bodies for all of these, gradients aside."""
    library = dispatch.choice().library if fuses() else None
    return library is not None and all(library.fused.constants(sublayer) is not None for sublayer in sublayers)


class Fusable(NamedTuple):
    """A sublayer that a native body runs in this step, and its operands."""

    sublayer: Sublayer
    packed: bytes | Recurrence
    view: KVView | None
    start: ScanStart | None
    tables: RopeTables | None


@dataclass(slots=True)
class PendingSublayers:
    """Sublayers to run, in order, with their arguments and everything that these point to."""

    sublayers: list[Sublayer] = field(default_factory=list)
    arguments: list[bytes] = field(default_factory=list)
    views: dict[int, KVView] = field(default_factory=dict)  # of those that attend, by their place in `sublayers`
    recurrences: dict[int, Recurrence] = field(default_factory=dict)  # of recurrent ones, by their place in `arguments`
    held: list[Tensor] = field(default_factory=list)

    def set_carry(
        self, place: int, recurrence: Recurrence, start: ScanStart, rows: int, tokens: int
    ) -> RecurrentResult:
        """Complete the arguments of a recurrent layer, in their place, for a step that scans from there."""
        start = start._replace(carry=tuple(part.contiguous() for part in start.carry))
        new, kept, marked = room(recurrence, rows, tokens, start.marks is not None)
        self.arguments[place] = carried(recurrence, start, new, kept, marked)
        self.held += (*start.carry, *new, kept)
        if (first := start.unscanned) is not None:
            self.held += (first.inputs, first.counts_t, first.begins_t)
        if start.marks is not None and marked is not None:
            self.held += (start.marks, *marked)
        return RecurrentResult(kept[:, recurrence.first :], new, marked)


class CapturedGraph:
    """Sublayers that were added once, to be replayed while nothing that they point to moves.

    Steps differ in rope tables, starts and carries alone. A step begins with cold caches: to ask once whether anything
    moved, of the tensors alone, takes half the time of adding each sublayer again.
    """

    def __init__(
        self,
        library: Library,
        rows: int,
        pending: PendingSublayers,
        tables: list[tuple[RopeTables | None, bytes]],
        starts: list[tuple[Tensor | None, bytes]],
    ):
        self.library, self.rows, self.sublayers, self.arguments = library, rows, pending.sublayers, pending.arguments
        self.single_token = any(view.columns is not None or view.queries is not None for view in pending.views.values())
        """Whether a view has buffers as long as the step, so that the graph is only for steps of one token."""
        self.views = {place: ref(view) for place, view in pending.views.items()}
        """Weak: the buffers of a view may be freed while the graph exists."""
        self.recurrences = pending.recurrences
        used = [(each, places) for each, packed in tables if each is not None and (places := self._places(packed))]
        self.tables = [each for each, _ in used]
        """Those of the captured step; a later one has its own in their places."""
        self.table_places = [places for _, places in used]
        begins = [(each, places) for each, packed in starts if (places := self._places(packed))]
        self.start_places = [places for _, places in begins]
        kinds = [id(each) for each, _ in begins]
        self.starts = [kinds.index(id(view.starts)) for view in pending.views.values()]
        """For each view, which of `start_places` its starts have."""
        self._weights = [weight for sublayer in pending.sublayers for weight in sublayer.weights]
        self._parameters = [tensor for sublayer in pending.sublayers for tensor in sublayer.parameters]
        tensors = self._tensors()
        self._pointers = pointers(tensors)
        self._trainable = [tensor.is_floating_point() for tensor in tensors]
        """Whether each of them may require a gradient: integers never do."""

    def _places(self, packed: bytes) -> list[int]:
        return [place for place, each in enumerate(self.arguments) if each is packed]

    def _tensors(self) -> list[Tensor]:
        return [*map(storage, self._weights), *self._parameters]

    def is_valid(self) -> bool:
        """Whether no weight was replaced or moved, and no gradient is to follow."""
        tensors = self._tensors()
        if pointers(tensors) != self._pointers:
            return False
        return not (torch.is_grad_enabled() and any(map(requires_grad, compress(tensors, self._trainable))))


class FusedGraph:
    """A residual stream float32 `[R, T, E]`, and the sublayers that are still to be applied to it.

    starts, counts: int64 `[R]`, where a row's tokens start and how many there are; feed-forward sublayers need none.
    tokens: N, how many there are in all; None: R * T, or more than there are. Padding is not computed: it is zero in
    the result of a flush.
    """

    def __init__(
        self, x: Tensor, starts: Tensor | None = None, counts: Tensor | None = None, tokens: int | None = None
    ):
        self._starts, self._counts = starts, counts
        self._tokens = x.shape[0] * x.shape[1] if tokens is None else tokens
        self._tables: dict[int, tuple[RopeTables | None, bytes]] = {}
        self._begins: dict[int, tuple[Tensor | None, bytes]] = {}
        self._shape = x.shape[:2]
        self.restart(x)

    def restart(self, x: Tensor) -> None:
        """Go on with another stream; nothing may be pending."""
        self.set_residual(x, x)

    def set_residual(self, residual: Tensor | None, x: Tensor) -> None:
        """Go on with x, and add the next sublayer's output to `residual` (None: to nothing) instead of to it."""
        self._x, self._residual = x, residual
        self._library = dispatch.native(x, residual) if is_short(x, self._tokens) else None
        if self._library is not None and not fuses():
            self._library = None
        self._width: int = x.shape[-1]
        self._pending = PendingSublayers()

    @property
    def enabled(self) -> bool:
        """Whether anything can be fused: native bodies know no other device, no gradient to follow, no long step."""
        return self._library is not None

    def fusable(
        self,
        sublayer: Sublayer,
        *,
        view: KVView | None = None,
        start: ScanStart | None = None,
        tables: RopeTables | None = None,
    ) -> Fusable | None:
        """The sublayer with its operands, for `add`; None where no native body runs it, or its operand is missing.

        Attention needs a view, a recurrent layer where its scan starts.
        """
        library = self._library
        if library is None or (packed := library.fused.pack(sublayer)) is None:
            return None
        if not isinstance(sublayer, MLPSublayer | MoESublayer):
            if self._counts is None or (start is None and view is None):
                return None
            if view is not None and view.packed is None and not library.fused.knows(view):
                return None
            changed = (view.k,) if view is not None else start.carry if start is not None else ()
            if torch.is_grad_enabled() and any(map(requires_grad, changed)):
                return None
        return Fusable(sublayer, packed, view, start, tables)

    def add(self, fusable: Fusable) -> RecurrentResult | None:
        """Apply a sublayer to the stream at the next flush.

        Returns what a recurrent layer's state is to keep: tensors that are filled by then. Raises `ValueError` where
        the operands do not fit the sublayer.
        """
        sublayer, packed, view, start, tables = fusable
        if sublayer.in_features != self._width:
            raise ValueError(f"{sublayer.ends[0]} does not fit a stream of {self._width} features")
        pending, result = self._pending, None
        if isinstance(packed, Recurrence):
            assert start is not None
            place = len(pending.arguments)
            pending.arguments.append(b"")
            result = pending.set_carry(place, packed, start, self._shape[0], self._tokens)
            pending.recurrences[place] = packed
        elif view is not None:
            assert isinstance(sublayer, AttentionSublayer)
            pending.arguments += self._attention(sublayer, packed, view, tables)
            pending.views[len(pending.sublayers)] = view
        else:
            pending.arguments.append(packed)
        self._width = sublayer.out_features
        pending.sublayers.append(sublayer)
        return result

    def flush(self, keep: Sequence[int] | None = None) -> Tensor:
        """Apply the pending sublayers: the stream after them, float32 `[R, T, E]`.

        keep: that of as many last tokens of each row alone, as `last_tokens` gives them; tokens that are not read are
        not computed. Nothing can be added then.
        """
        if not self._pending.sublayers:
            whole = [self._shape[1]] * self._shape[0] if self._counts is None else self._counts.tolist()
            return self._x if keep is None else last_tokens(self._x, whole, keep)
        assert self._library is not None
        pending, stream = self._pending, (self._x, self._residual, self._starts, self._counts)
        x = self._library.fused.run(*stream, pending.sublayers, pending.arguments, pending.views, keep)
        self.restart(x)
        return x

    def capture(self) -> CapturedGraph | None:
        """Capture what is pending for later steps; None where more than `CapturedGraph` says will differ in them."""
        if self._library is None or not self._pending.sublayers:
            return None
        tables, starts = list(self._tables.values()), list(self._begins.values())
        captured = CapturedGraph(self._library, self._shape[0], self._pending, tables, starts)
        return None if captured.single_token and self._shape[1] > 1 else captured

    def replay(
        self,
        captured: CapturedGraph,
        views: Sequence[KVView],
        scans: Sequence[ScanStart],
        tables: Sequence[RopeTables],
    ) -> list[RecurrentResult] | None:
        """Add all of a captured graph where nothing is pending; None where something moved, or is another.

        views, scans: of its attention and of its recurrent layers, in their order. tables: instead of its `tables`.
        """
        library, (rows, tokens) = self._library, self._shape
        alike = all(one.cos.shape[-1] == other.cos.shape[-1] for one, other in zip(tables, captured.tables))
        fits = rows == captured.rows and (tokens == 1 or not captured.single_token)
        if library is not captured.library or self._width != captured.sublayers[0].in_features or not (fits and alike):
            return None
        if [view() for view in captured.views.values()] != list(views) or len(scans) != len(captured.recurrences):
            return None
        if not captured.is_valid():
            return None
        if torch.is_grad_enabled():
            changed = [*(view.k for view in views), *(part for start in scans for part in start.carry)]
            if any(map(requires_grad, changed)):
                return None
        starts: list[Tensor | None] = [None] * len(captured.start_places)
        for view, kind in zip(views, captured.starts):
            starts[kind] = view.starts
        if any(view.starts is not starts[kind] for view, kind in zip(views, captured.starts)):
            return None
        pending = self._pending = PendingSublayers(
            captured.sublayers, captured.arguments.copy(), dict(zip(captured.views, views))
        )
        packed = [library.fused.rotation(each, rows, tokens) for each in tables]
        packed += [library.fused.starts(each, rows) for each in starts]
        for new, places in zip(packed, captured.table_places + captured.start_places, strict=True):
            for place in places:
                pending.arguments[place] = new
        self._width = captured.sublayers[-1].out_features
        recurrent = zip(captured.recurrences.items(), scans)
        return [pending.set_carry(place, each, start, rows, self._tokens) for (place, each), start in recurrent]

    def _attention(
        self, sublayer: AttentionSublayer, packed: bytes, view: KVView, tables: RopeTables | None
    ) -> tuple[bytes, ...]:
        """The arguments of attention. Those that layers share are packed once: a replay finds them by identity."""
        assert self._library is not None
        fused, (rows, tokens) = self._library.fused, self._shape
        fused.check(sublayer, view, tables, rows, tokens)
        if view.packed is None:
            view.packed = fused.view(view)
        if (rotated := self._tables.get(id(tables))) is None:
            rotated = self._tables[id(tables)] = tables, fused.rotation(tables, rows, tokens)
        if (placed := self._begins.get(id(view.starts))) is None:
            placed = self._begins[id(view.starts)] = view.starts, fused.starts(view.starts, rows)
        return packed, placed[1], view.packed, rotated[1]


def last_tokens(x: Tensor, counts: Sequence[int], keep: Sequence[int]) -> Tensor:
    """The last `keep[r]` of the `counts[r]` tokens of each row r, of a stream `[R, T, E]` -> `[R, K, E]`.

    K is the largest of `keep`; padding follows a row's tokens, with any numbers.
    """
    rows, tokens, _ = x.shape
    places = [[min(end - n + at, tokens - 1) for at in range(max(keep))] for end, n in zip(counts, keep)]
    at = torch.tensor(places, dtype=torch.int64, device=x.device).view(rows, max(keep))
    return x[torch.arange(rows, device=x.device)[:, None], at]


def fused_feed_forward(x: Tensor, sublayer: MLPSublayer, stream: Tensor | None) -> Tensor | None:
    """A feed-forward part in one native call, x `[..., K]` -> float32 `[..., N]`; None where no body does it."""
    graph = FusedGraph(x.reshape(1, -1, x.shape[-1]))
    graph.set_residual(None if stream is None else stream.reshape(1, -1, stream.shape[-1]), graph.flush())
    if (fusable := graph.fusable(sublayer)) is None:
        return None
    graph.add(fusable)
    return graph.flush().view(*x.shape[:-1], -1)
