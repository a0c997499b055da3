"""The plan of one forward: for each row of the batch, where its new tokens start and how many there are."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate
from typing import Any, TypedDict, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from lmstate.state.media import Spans, axis_positions, inside, within
from lmstate.state.validate import whole_number

CHUNK = 384
"""Tokens of a row that one forward takes: the data between two products of a wide layer stays in the third cache."""

Built = TypeVar("Built")


class Extras(TypedDict, total=False):
    """Tensors of a step that the model's embedding hook leaves for its blocks, in addition to the stream."""

    embedding: Tensor  # float32 [R, T, E], of the tokens (Zamba2)
    tokens: Tensor  # int64 [R, T], by which experts are chosen (DeepSeek-V4)
    per_layer_inputs: Tensor  # float32 [R, T, L, P], one vector for each of L blocks (Gemma 3n, Gemma 4)


@dataclass(frozen=True)
class Step:
    """The plan of a forward as its layers see it, built once and handed to every layer.

    `starts` and `counts` are integers, `starts_t` and `counts_t` the same as tensors of the host, for operations: a
    device that had them would have to be waited for. Row r's new tokens have the positions `starts[r] .. starts[r] +
    counts[r] - 1`; what is to the right of them in a `[R, T]` tensor is padding. `rope_lengths[r]` is the length that
    row r's rotary frequencies are made for (it matters only to the ropes whose frequencies depend on the length of the
    text).
    """

    starts: tuple[int, ...]
    counts: tuple[int, ...]
    device: torch.device
    rope_lengths: tuple[int, ...]
    speculative: bool = False  # a verdict may accept a prefix of it
    chunk: int = CHUNK  # tokens of a row that one forward takes; a longer step runs as several
    rewindable: tuple[bool, ...] | None = None  # see `rewinds`; None: all rows
    media: tuple[Spans, ...] = ()  # pictures of each row, see `Row`; none at all where no row has any
    whole_pictures: bool = False  # whether no part of it ends inside a picture
    extras: Extras = field(default_factory=dict, repr=False, compare=False)  # type: ignore[assignment]
    _cached: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def rows(self) -> int:
        return len(self.counts)

    @cached_property
    def width(self) -> int:
        """T: the new tokens of the row that has the most."""
        return max(self.counts, default=0)

    @cached_property
    def new_tokens(self) -> int:
        """N: those of all rows, without padding."""
        return sum(self.counts)

    @cached_property
    def begins(self) -> tuple[int, ...]:
        """The place of each row's first token among all N, which follow each other row by row."""
        return tuple(accumulate(self.counts, initial=0))[:-1]

    @cached_property
    def ends(self) -> tuple[int, ...]:
        """The length of each row once the whole step is committed."""
        return tuple(start + count for start, count in zip(self.starts, self.counts))

    @cached_property
    def spans(self) -> tuple[tuple[int, int, int], ...]:
        """Row, first new position and the one after the last, of each row that has new tokens."""
        return tuple((r, start, start + n) for r, (start, n) in enumerate(zip(self.starts, self.counts)) if n)

    @cached_property
    def longest(self) -> int:
        """The largest of them."""
        return max(self.ends, default=0)

    @cached_property
    def uniform(self) -> bool:
        """Whether every row brings the same number of tokens, so that nothing is padding."""
        return min(self.counts, default=0) == self.width

    @cached_property
    def starts_t(self) -> Tensor:
        """int64 [R], on the host"""
        return integers(self.starts)

    @cached_property
    def counts_t(self) -> Tensor:
        """int64 [R], on the host"""
        return integers(self.counts)

    @cached_property
    def positions(self) -> Tensor:
        """int64 [R, T]; a padding token has the position that it would have."""
        return self.starts_t.to(self.device)[:, None] + torch.arange(self.width, device=self.device)

    @cached_property
    def axis_positions(self) -> Tensor | None:
        """int64 [3, R, T]: positions on the axes of a rope that has several; None where all are `positions`."""
        if not any(span.media.positions is not None for spans in self.media for span in spans):
            return None
        rows = [axis_positions(spans, start, start + self.width) for spans, start in zip(self.media, self.starts)]
        return torch.stack(rows, dim=1).to(self.device)

    @cached_property
    def pictures(self) -> tuple[tuple[int, int, int], ...]:
        """Row, first position and the one after the last, of each picture that has positions in the step."""
        ends = self.ends
        return tuple(
            (row, span.at, span.end)
            for row, spans in enumerate(self.media)
            for span in within(spans, self.starts[row], ends[row])
        )

    def packed(self, x: Tensor) -> Tensor:
        """`[R, T, ..]` without its padding, `[N, ..]`; a view where there is none."""
        return x.flatten(0, 1) if self.uniform else x.flatten(0, 1)[self._places]

    @cached_property
    def _places(self) -> Tensor:
        """int64 [N]: where the tokens are among the R * T with padding."""
        places = [row * self.width + at for row, count in enumerate(self.counts) for at in range(count)]
        return torch.tensor(places, dtype=torch.int64, device=self.device)

    def on(self, device: torch.device | None) -> Step:
        """The same step for layers on a device, made once for each; None: for those where the step itself is."""
        if device is None or device == self.device:
            return self
        moved = self.cached(("on", device), lambda: replace(self, device=device, extras={}, _cached={}))
        extras = cast(dict[str, Tensor], moved.extras)
        for name, tensor in cast(dict[str, Tensor], self.extras).items():  # which come after the layers made room
            if name not in extras:
                extras[name] = tensor.to(device)
        return moved

    def rewinds(self, row: int) -> bool:
        """Whether a rewind of a row to a place in the step, or a bit before, is to compute nothing again."""
        return self.rewindable is None or self.rewindable[row]

    def with_idle_row(self) -> Step:
        """The same with one row more, which brings no tokens."""
        starts, counts, lengths = ((*numbers, 0) for numbers in (self.starts, self.counts, self.rope_lengths))
        media = (*self.media, ()) if self.media else ()
        rewindable = None if self.rewindable is None else (*self.rewindable, True)
        return Step(
            starts, counts, self.device, lengths, self.speculative, self.chunk, rewindable, media, self.whole_pictures
        )  # fmt: skip

    def part(self, starts: tuple[int, ...], counts: tuple[int, ...]) -> Step:
        """A step of the same rows over other tokens of theirs."""
        return Step(
            starts, counts, self.device, self.rope_lengths, self.speculative, self.chunk, self.rewindable, self.media,
            self.whole_pictures,
        )  # fmt: skip

    def cached(self, key: Hashable, build: Callable[[], Built]) -> Built:
        """`build()`, done once in the step for each key: rope tables, masks, index tensors shared by the layers."""
        try:
            return self._cached[key]
        except KeyError:
            built = self._cached[key] = build()
            return built

    def chunks(self) -> Iterator[tuple[int, Step]]:
        """The step cut into steps of at most `chunk` tokens a row: (offset of the part's first token, part).

        With `whole_pictures` a cut that would part a picture of some row comes before it, or after it where the part
        would have no tokens.
        """
        if self.width <= self.chunk:
            yield 0, self
            return
        offset = 0
        while offset < self.width:
            stop = self._cut(offset)
            starts = tuple(start + min(offset, count) for start, count in zip(self.starts, self.counts))
            counts = tuple(min(max(count - offset, 0), stop - offset) for count in self.counts)
            yield offset, self.part(starts, counts)
            offset = stop

    def _cut(self, offset: int) -> int:
        """The offset at which the part ends that begins at `offset`."""
        whole = min(offset + self.chunk, self.width)
        if not (self.whole_pictures and self.media):
            return whole

        def parts_none(stop: int) -> bool:
            return all(
                inside(spans, start + stop) is None or stop >= count
                for spans, start, count in zip(self.media, self.starts, self.counts)
            )

        before = (stop for stop in range(whole, offset, -1) if parts_none(stop))
        return next(before, None) or next(stop for stop in range(whole, self.width + 1) if parts_none(stop))


@dataclass(frozen=True, kw_only=True)
class DeviceStep(Step):
    """A step whose starts and counts are on the device alone, so that a traced graph serves all of them.

    `starts_t` and `counts_t` int64 `[R]` are given, and the width T; what a `Step` tells of its rows in host integers
    is not there. Its rope tables are those of short texts: who makes one sees to it that no row grows out of them.
    """

    # Given, where a `Step` computes them once: a tracer cannot follow the lock of a cached property. `field()` says
    # that they have no default, which else would be the property itself.
    width: int = field()
    starts_t: Tensor = field()
    counts_t: Tensor = field()
    positions: Tensor = field()

    @staticmethod
    def at(starts: Tensor, counts: Tensor, width: int) -> DeviceStep:
        rows, device = starts.shape[0], starts.device
        positions = starts[:, None] + torch.arange(width, device=device)
        return DeviceStep(
            (), (), device, (0,) * rows, width=width, starts_t=starts, counts_t=counts, positions=positions
        )  # fmt: skip

    @property
    def rows(self) -> int:
        return self.starts_t.shape[0]

    @property
    def new_tokens(self) -> int:
        return self.rows * self.width

    def packed(self, x: Tensor) -> Tensor:
        """All of them: what is padding is on the device."""
        return x.flatten(0, 1)


def integers(values: Sequence[int] | Sequence[Sequence[int]]) -> Tensor:
    """A tensor of int64 on the host; of a few numbers `torch.tensor` takes longer to make one."""
    return torch.from_numpy(np.array(values, dtype=np.int64))


def as_counts(value: int | Sequence[int] | None, limits: Sequence[int]) -> tuple[int, ...] | None:
    """A verdict as one number per row: None is all, a number that of each row with tokens. None if it does not fit.

    Raises `StateError` for anything else.
    """
    if value is None:
        return tuple(limits)
    try:
        counts = tuple(whole_number(count, "a count of tokens") for count in value)  # type: ignore[union-attr]
    except TypeError:  # one number
        every = whole_number(value, "a count of tokens")  # type: ignore[arg-type]
        counts = tuple(every if limit else 0 for limit in limits) if any(limits) else (every,) * len(limits)
    if len(counts) != len(limits) or any(not 0 <= count <= limit for count, limit in zip(counts, limits)):
        return None
    return counts
