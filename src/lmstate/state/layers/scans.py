"""Scans over the tokens of a step, with stops at positions that are kept, and a ring that logs their inputs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from lmstate.errors import SnapshotError
from lmstate.state.step import Step

Carry = tuple[Tensor, ...]
Scan = Callable[[Tensor, Carry, Tensor, Tensor | None], tuple[Tensor, Carry]]
ScanFrom = Callable[[Sequence[int]], Scan]
"""The scan of rows that begin at these positions."""


class Inputs(NamedTuple):
    """Inputs of a scan `[N, F]`, of all rows without padding, how many each row has, and the position of its first."""

    inputs: Tensor
    counts: tuple[int, ...]
    starts: tuple[int, ...]


class Checkpoint(NamedTuple):
    """The carry of one row at a position, `[1, ...]` each; never written into."""

    position: int
    carry: Carry


@dataclass(frozen=True)
class PassedCarry:
    """The carry `[R, ...]` of a step where some rows pass a multiple of `rewind`: row r's, or None."""

    positions: list[int | None]
    carry: Carry


@dataclass
class PendingCarry:
    """Results of a step that is not committed: the carry after its chunks so far, None before the first.

    `inputs`: of those chunks that may be scanned again. `resumable`: a part of the step may be left unscanned.
    """

    step: Step
    carry: Carry | None = None
    inputs: list[tuple[Step, Tensor]] = field(default_factory=list)
    passed: list[PassedCarry] = field(default_factory=list)
    resumable: bool = False


def position_of(checkpoint: Checkpoint) -> int:
    return checkpoint.position


def scanned(scan_from: ScanFrom, carry: Carry, unscanned: Inputs) -> Carry:
    """The carry with these inputs in it as well."""
    inputs, counts, starts = unscanned
    padded = pad_sequence(inputs.split(counts), batch_first=True)
    with torch.no_grad():  # they were scanned without a gradient before
        return scan_from(starts)(padded, carry, torch.tensor(counts, device=inputs.device), None)[1]


def prefix(step: Step, counts: tuple[int, ...]) -> Step:
    """A step of the first tokens of each row alone."""
    return Step(step.starts, counts, step.device, step.rope_lengths, media=step.media)


def scan_with_stops(
    scan_from: ScanFrom,
    inputs: Tensor,
    carry: Carry,
    step: Step,
    ends: Sequence[int],
    period: int,
    gate: Tensor | None = None,
) -> tuple[Tensor, Carry, list[PassedCarry]]:
    """Scan a step, stopping for the carry at the last two multiples of `period` before each row's end."""
    cuts = stops_of(step, ends, period)
    if not cuts:
        outputs, carry = scan_from(step.starts)(inputs, carry, step.counts_t, gate)
        return outputs, carry, []
    done, pieces, passed = [0] * step.rows, [], []
    for stops, positions in [*cuts, (list(step.counts), None)]:
        counts = [stop - begin for stop, begin in zip(stops, done)]
        if any(counts):
            piece = rows_between(inputs, done, stops)
            part_gate = None if gate is None else rows_between(gate, done, stops)
            scan = scan_from([start + begin for start, begin in zip(step.starts, done)])
            folded, carry = scan(piece, carry, torch.tensor(counts, device=inputs.device), part_gate)
            pieces.append((folded, counts))
        if positions is not None:
            passed.append(PassedCarry(positions, carry))
        done = stops
    return rows_joined(pieces), carry, passed


def stops_of(step: Step, ends: Sequence[int], period: int) -> list[tuple[list[int], list[int | None]]]:
    """The stops of `scan_with_stops`: how many of each row's tokens come before each, and which positions rows pass."""
    return step.cached(("cuts", period, tuple(ends)), lambda: _cuts(step, ends, period))


def _cuts(step: Step, ends: Sequence[int], period: int) -> list[tuple[list[int], list[int | None]]]:
    """Positions to stop at inside a step: the last two multiples of `period` before each row's end, or, of a row that
    the step does not rewind, the end.

    For each of the two: how many of each row's tokens come before it, and its position in the rows that pass it here.
    """
    if not period:
        return []
    last = [end // period * period if step.rewinds(row) else end for row, end in enumerate(ends)]
    before = [mark - period if step.rewinds(row) else 0 for row, mark in enumerate(last)]
    cuts = []
    for marks in (before, last):
        passes: list[int | None] = [
            mark if start < mark <= start + n else None for mark, start, n in zip(marks, step.starts, step.counts)
        ]
        if any(mark is not None for mark in passes):
            # At the last stop the rows that pass nothing may be anywhere: at their ends, where the others mostly are.
            stops = [
                n if marks is last and at is None else min(max(mark - start, 0), n)
                for mark, at, start, n in zip(marks, passes, step.starts, step.counts)
            ]
            cuts.append((stops, passes))
    return cuts


def rows_between(inputs: Tensor, begins: Sequence[int], stops: Sequence[int]) -> Tensor:
    """Row r's tokens `begins[r] .. stops[r] - 1` of `[R, T, F]`, moved to the left: a view where all rows agree."""
    if len(set(zip(begins, stops))) == 1:
        return inputs[:, begins[0] : stops[0]]
    rows = [row[begin:stop] for row, begin, stop in zip(inputs, begins, stops)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def rows_joined(pieces: Sequence[tuple[Tensor, Sequence[int]]]) -> Tensor:
    """Pieces `[R, t, G]` of each row one after the other, `counts[r]` tokens of each: the inverse of the above."""
    if all(len(set(counts)) == 1 for _, counts in pieces):
        return torch.cat([piece for piece, _ in pieces], dim=1)
    cut = [[row[:count] for row, count in zip(piece, counts)] for piece, counts in pieces]
    return torch.nn.utils.rnn.pad_sequence([torch.cat(row) for row in zip(*cut)], batch_first=True)


def places_again(parts: Sequence[Step], step: Step, again: Sequence[int], device: torch.device) -> Tensor:
    """Places of the first `again[r]` inputs of each row among those of a step's parts, int64 `[R, t]`."""
    index = [[0] * max(again) for _ in again]
    offset = 0
    for part in parts:
        for row, (start, count) in enumerate(zip(part.starts, part.counts)):
            first = start - step.starts[row]
            for at in range(first, min(first + count, again[row])):
                index[row][at] = offset + part.begins[row] + at - first
        offset += part.new_tokens
    return torch.tensor(index, device=device)


def places_since(step: Step, before: Sequence[int], accepted: Sequence[int], device: torch.device) -> Tensor:
    """Places of each row's first `before[r]` inputs and of its `accepted[r]` of a step, where the step's come after
    all of the former; int64."""
    begins = list(accumulate(before, initial=0))
    return torch.tensor([
        place
        for first, old, begin, new in zip(begins, before, step.begins, accepted)
        for place in (*range(first, first + old), *range(begins[-1] + begin, begins[-1] + begin + new))
    ], dtype=torch.int64, device=device)  # fmt: skip


def log_places(
    part: Step, step: Step, accepted: tuple[int, ...], size: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    """(flat slots, places of inputs to put there), int64 each, for the accepted inputs of a step's part that a log of
    `size` slots a row still holds after the step."""
    slots: list[int] = []
    sources: list[int] = []
    for row, (start, count) in enumerate(zip(part.starts, part.counts)):
        length = step.starts[row] + accepted[row]
        for position in range(max(start, length - size), min(start + count, length)):
            slots.append(row * size + position % size)
            sources.append(part.begins[row] + position - start)
    index = torch.tensor([slots, sources], dtype=torch.int64, device=device)
    return index[0], index[1]


def logged(own: Tensor, start: int, stop: int) -> Tensor:
    """A row's inputs `[1, stop - start, F]` at positions that its log, a ring `[1, size, F]`, holds."""
    size = own.shape[1]
    first, last = start % size, (stop - 1) % size + 1
    return own[:, first:last] if first < last else torch.cat([own[:, first:], own[:, :last]], dim=1)


def captured(tensors: Mapping[str, Tensor], names: Sequence[str], like: Carry) -> Carry:
    """The carry `[1, ...]` of a snapshot's tensors, as copies. Raises `SnapshotError` if they are not such parts."""
    if set(tensors) != set(names):
        raise SnapshotError(
            f"a recurrent layer needs {sorted(names)}; the snapshot has {sorted(tensors)}: a state with the same "
            "carries= takes it"
        )
    for name, own in zip(names, like):
        given = tensors[name]
        if given.shape != own.shape[1:] or not given.dtype.is_floating_point:
            raise SnapshotError(
                f"the snapshot's {name} is {given.dtype} {list(given.shape)}; this layer holds {list(own.shape[1:])}"
            )
    return tuple(tensors[name][None].to(own, copy=True) for name, own in zip(names, like))
