"""The state of a recurrent layer: the carry of a scan, and what it takes to go back.

A scan is `(inputs [R, T, F], carry, counts [R], gate) -> (outputs [R, T, G], carry)`, like `lax.scan` over the tokens
of a step. Its inputs are the layer's projections, so that a log of inputs replays exactly. `gate [R, T, B]`, for
example an output gate, changes the outputs and not the carry; it is None if only the carry is needed. A scan does not
write to its arguments.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from operator import add, sub
from typing import Any

import torch
from torch import Tensor

from lmstate.ops import ScanStart, Unscanned
from lmstate.state.changes import Changes
from lmstate.state.layers.base import LayerState, Layout
from lmstate.state.layers.rounding import CarryRounding
from lmstate.state.layers.scans import (
    Carry,
    Checkpoint,
    Inputs,
    PassedCarry,
    PendingCarry,
    Scan,
    captured,
    log_places,
    logged,
    places_again,
    places_since,
    position_of,
    prefix,
    scan_with_stops,
    scanned,
    stops_of,
)
from lmstate.state.step import DeviceStep, Step

MOST_UNSCANNED = 8  # tokens of a row that are left to the next step's scan: each is scanned again in every step


class RecurrentState(LayerState):
    """The carry of every row, float32 `[R, ...]` each, at the row's committed length.

    A step scans to a next carry, which `commit` adopts. If only a prefix was accepted, the step's inputs are scanned
    again from the old carry: at once, or, where a native body does it in passing, at the beginning of the next step's
    scan (what is `unscanned` until then). To go back, each row keeps its carry at the last two multiples of `rewind`
    (its checkpoints) and the inputs since the older of them (the log, a ring). Any of the last `rewind` positions, and
    usually more, is reached by scanning again from a checkpoint. Tensors of a carry are never written into, so that
    they are shared freely.

    Of a static layout, carry, next carry and the step's inputs have tensors of their own, that a `DeviceStep` fills.
    """

    kind = "recurrent"
    lossy = True

    def __init__(
        self,
        layout: Layout,
        scan: Scan,
        shapes: Sequence[tuple[int, ...]],
        inputs: int,
        *,
        names: Sequence[str] | None = None,
        sums: Sequence[str] = (),
    ):
        """`shapes`: of each part of the carry, without rows; `inputs`: F, the width of the scan's input.

        `sums`: names of the parts that sum over tokens: a layout with `carries` below 32 has them rounded.
        """
        self.layout, self.scan = layout, scan
        self.names = tuple(names or (f"carry.{i}" for i in range(len(shapes))))
        rounds = layout.carries < 32 and bool(sums)
        self.rounding = CarryRounding(layout.carries, self.names, frozenset(sums)) if rounds else None
        rows, device = layout.rows, layout.device
        self.carry: Carry = tuple(torch.zeros(rows, *shape, dtype=torch.float32, device=device) for shape in shapes)
        self._zero: Carry = tuple(torch.zeros(1, *shape, dtype=torch.float32, device=device) for shape in shapes)
        self.unscanned: Inputs | None = None
        """Committed inputs of each row that the carry does not have yet."""
        self._pending: PendingCarry | None = None
        self.period = layout.rewind
        # It is read only where it was written: to zero it would take longer than all else that a new row costs.
        self.log = torch.empty(rows, 2 * self.period, inputs, dtype=torch.float32, device=device)
        self.checkpoints = [self._start() for _ in range(rows)]
        """Of each row, those at an even and at an odd multiple of `period`."""
        self.next_carry: Carry = tuple(map(torch.zeros_like, self.carry)) if layout.static else ()
        self.step_inputs = torch.zeros(
            rows, layout.chunk if layout.static else 0, inputs, dtype=torch.float32, device=device
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> RecurrentState:
        """A copy of what is remembered, which goes on with the same weights, unless their model is copied with it."""
        if id(getattr(self.scan, "__self__", None)) not in memo:
            memo[id(self.scan)] = self.scan
        twin = memo[id(self)] = object.__new__(type(self))
        twin.__dict__.update({name: copy.deepcopy(value, memo) for name, value in vars(self).items()})
        return twin

    # ---- the step

    def reserve(self, step: Step) -> None:
        self._pending = PendingCarry(step)

    def advance(self, inputs: Tensor, step: Step, gate: Tensor | None = None) -> Tensor:
        """Scan a step's inputs `[R, T, F]` -> `[R, T, G]`, from where the chunk before it ended."""
        if isinstance(step, DeviceStep):
            outputs, carry = self.scan(inputs, self.carry, step.counts_t, gate)
            self._fill(self.next_carry, carry)
            self.step_inputs[:, : step.width].copy_(inputs)
            return outputs
        if (whole := self.single_scan_carry(step)) is not None:
            outputs, carry = self.scan(inputs, whole, step.counts_t, gate)
            self.record(step, step.packed(inputs), carry)
            return outputs
        pending = self._log(step, step.packed(inputs))
        carry = self._scanned() if pending.carry is None else pending.carry
        outputs, pending.carry, passed = scan_with_stops(
            self._scan_from, inputs, carry, step, pending.step.ends, self.period, gate
        )
        pending.passed += passed
        return outputs

    def single_scan_carry(self, step: Step) -> Carry | None:
        """The carry that all of a step's inputs are scanned from at once; None where a checkpoint is between them.

        The scan is then reported with `record`.
        """
        pending = self._reserved()
        if any(stops != list(step.counts) for stops, _ in stops_of(step, pending.step.ends, self.period)):
            return None
        carry = self._scanned() if pending.carry is None else pending.carry
        return carry if self.rounding is None else self.rounding.begun(carry, step.starts, step.counts)

    def fused_scan_start(self, step: Step) -> ScanStart | None:
        """The same for a native call that makes the inputs and scans them, after what is unscanned.

        Between those of a short step a checkpoint may be. None for a `DeviceStep`, which copies what it gets.
        """
        if isinstance(step, DeviceStep):
            return None
        pending = self._reserved()
        start = ScanStart(self.carry, self._unscanned(step)) if pending.carry is None else ScanStart(pending.carry)
        if self.rounding is not None:
            since = (0,) * step.rows if start.unscanned is None else start.unscanned.counts
            starts, counts = map(sub, step.starts, since), map(add, step.counts, since)
            if (carry := self.rounding.begun(start.carry, [*starts], [*counts])) is None:
                return None
            start = start._replace(carry=carry)
        cuts = stops_of(step, pending.step.ends, self.period)
        if all(stops == list(step.counts) for stops, _ in cuts):
            return start
        if not self._is_short(step, pending):
            return None
        ((_, positions),) = cuts

        def marks() -> Tensor:
            after = [0 if at is None else at - start for at, start in zip(positions, step.starts)]
            return torch.tensor(after, dtype=torch.int64, device=step.device)

        return start._replace(marks=step.cached(("marks", self.period), marks))

    def record(
        self, step: Step, inputs: Tensor, carry: Carry, marked: Carry | None = None, *, fused: bool = False
    ) -> None:
        """A step's inputs `[N, F]`, without padding, were scanned from `single_scan_carry`, and gave this carry.

        Or, `fused`, from `fused_scan_start`, with `marked` at its marks, or will be before anything else is asked of
        this state: all are only kept.
        """
        pending = self._log(step, inputs)
        pending.resumable = fused and self._is_short(step, pending)
        at_marks = carry if marked is None else marked
        pending.passed += [
            PassedCarry(positions, at_marks) for _, positions in stops_of(step, pending.step.ends, self.period)
        ]
        pending.carry = carry

    def _is_short(self, step: Step, pending: PendingCarry) -> bool:
        """Whether no row passes more than one checkpoint in it, which is the whole step."""
        return step is pending.step and step.width <= self.period and step.rewindable is None and not self.layout.static

    def adopt_device_step(self, step: Step) -> None:
        inputs = self.step_inputs[:, : step.width]
        cuts = stops_of(step, step.ends, self.period)
        if all(stops == list(step.counts) for stops, _ in cuts):
            passed = [PassedCarry(positions, self.next_carry) for _, positions in cuts]
        else:  # a checkpoint inside the step is not what the device has kept
            passed = scan_with_stops(self._scan_from, inputs, self.carry, step, step.ends, self.period)[2]
        self._pending = PendingCarry(step, self.next_carry, [(step, step.packed(inputs))], passed)

    def static_tensors(self) -> dict[str, Tensor]:
        parts = {name: (own, next_carry) for name, own, next_carry in zip(self.names, self.carry, self.next_carry)}
        named = {f"{name}.{i}": tensor for name, pair in parts.items() for i, tensor in enumerate(pair)}
        return {**named, "step_inputs": self.step_inputs}

    def rebind(self, tensors: dict[str, Tensor]) -> None:
        self.carry = tuple(tensors[f"{name}.0"] for name in self.names)
        self.next_carry = tuple(tensors[f"{name}.1"] for name in self.names)
        self.step_inputs = tensors["step_inputs"]

    def commit_on_device(self) -> None:
        self._fill(self.carry, self.next_carry)

    def commit(self, step: Step, accepted: tuple[int, ...], changes: Changes) -> None:
        pending = self._pending
        changes.assign(self, "_pending", None)
        if pending is None or pending.carry is None:
            return
        lengths = [start + n for start, n in zip(step.starts, accepted)]
        carry, unscanned, passed = pending.carry, None, pending.passed
        if accepted != step.counts:
            if pending.resumable:
                carry, unscanned = self._resumed(pending, step, accepted)
            else:
                carry, passed = self._replay(pending, carry, step, accepted)
        self._hold(carry, changes)
        changes.assign(self, "unscanned", unscanned)
        if not self.period:
            return
        if passed:
            changes.assign(self, "checkpoints", self._with_passed(passed, lengths, step))
        if not pending.inputs:
            return
        # A log is written where no rewind before this commit reads, or it is a copy.
        spare = self.log.shape[1]
        taken = any(
            n and length - spare > self.earliest_rewind(row, 0)
            for row, (n, length) in enumerate(zip(accepted, lengths))
        )
        log = self.log.clone() if taken or self.log.requires_grad else self.log
        for slots, rows in self._log_writes(pending, step, accepted):
            log.flatten(0, 1).index_copy_(0, slots, rows)
        if log is not self.log:
            changes.assign(self, "log", log)

    def discard(self) -> None:
        self._pending = None

    # ---- moving about

    def earliest_rewind(self, row: int, length: int) -> int:
        return min((one.position for one in self.checkpoints[row] if one is not None), default=length)

    def rewind(self, row: int, length: int, to: int, changes: Changes) -> None:
        if to == length:
            return
        base, carry = max(
            (one for one in self.checkpoints[row] if one is not None and one.position <= to), key=position_of
        )
        if to > base:
            counts = torch.tensor([to - base], device=self.log.device)
            _, carry = self._scan_from([base])(logged(self.log[row : row + 1], base, to), carry, counts, None)
        even, odd = (None if one is None or one.position > to else one for one in self.checkpoints[row])
        self._put(row, carry, (even, odd), changes)

    def select(self, rows: Sequence[int | None], changes: Changes) -> None:
        source = torch.tensor([0 if row is None else row for row in rows], device=self.log.device)
        empty = [i for i, row in enumerate(rows) if row is None]

        def picked(part: Tensor) -> Tensor:
            part = part[source]
            part[empty] = 0
            return part

        self._hold(tuple(map(picked, self._scanned())), changes)
        changes.assign(self, "unscanned", None)
        changes.assign(self, "log", picked(self.log))
        checkpoints = [self._start() if row is None else self.checkpoints[row] for row in rows]
        changes.assign(self, "checkpoints", checkpoints)

    def add_row(self, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        def longer(part: Tensor) -> Tensor:
            return torch.cat([part, torch.zeros_like(part[:1])])

        def with_own(parts: Carry) -> Carry:
            return tuple(torch.cat([part, row]) for part, row in zip(parts, own))

        own, checkpoints = self._restored(length, tensors)
        changes.assign(self, "carry", with_own(self._scanned()))
        changes.assign(self, "unscanned", None)
        changes.assign(self, "log", longer(self.log))
        changes.assign(self, "step_inputs", longer(self.step_inputs))
        changes.assign(self, "checkpoints", [*self.checkpoints, checkpoints if self.period else self._start()])
        if (pending := self._pending) is not None:
            wider = replace(
                pending,
                step=pending.step.with_idle_row(),
                carry=None if pending.carry is None else with_own(pending.carry),
                inputs=[(step.with_idle_row(), x) for step, x in pending.inputs],
                passed=[
                    PassedCarry([*each.positions, None], tuple(map(longer, each.carry))) for each in pending.passed
                ],
            )
            changes.assign(self, "_pending", wider)

    def capture(self, row: int, length: int) -> Mapping[str, Tensor]:
        # The only row's carry is never written into; of several, a part would keep them all alive.
        shared = len(self.checkpoints) == 1 and not self.layout.static
        carry = tuple(part[row : row + 1] for part in self.carry)
        if self.unscanned is not None and (count := self.unscanned.counts[row]):
            inputs = self.unscanned.inputs.split(self.unscanned.counts)[row][None]
            scan = self._scan_from([self.unscanned.starts[row]])
            carry = scan(inputs, carry, torch.tensor([count], device=self.log.device), None)[1]
        held = {name: part[0] if shared else part[0].clone() for name, part in zip(self.names, carry)}
        return held if self.rounding is None else self.rounding.packed(held, length)

    def restore(self, row: int, length: int, tensors: Mapping[str, Tensor], changes: Changes) -> None:
        self._put(row, *self._restored(length, tensors), changes)

    def _restored(
        self, length: int, tensors: Mapping[str, Tensor]
    ) -> tuple[Carry, tuple[Checkpoint | None, Checkpoint | None]]:
        """The carry `[1, ...]` and the checkpoints of a row that was captured at `length`."""
        if length == 0 and not tensors:
            tensors = {name: torch.zeros_like(part[0]) for name, part in zip(self.names, self.carry)}
        elif self.rounding is not None:
            tensors = self.rounding.unpacked(tensors, length)
        carry = captured(tensors, self.names, self.carry)
        here = Checkpoint(length, carry)
        even = not self.period or length // self.period % 2 == 0
        return carry, (here, None) if even else (None, here)

    def tensors(self) -> list[Tensor]:
        held = [*self.carry, *self._zero, self.log]
        held += [part for pair in self.checkpoints for one in pair if one is not None for part in one.carry]
        held += [] if self.unscanned is None else [self.unscanned.inputs]
        if (pending := self._pending) is not None:
            held += [*(pending.carry or ()), *(inputs for _, inputs in pending.inputs)]
            held += [part for passage in pending.passed for part in passage.carry]
        held += [*self.next_carry, self.step_inputs]
        # Inputs may be a part of `step_inputs`; tensors without numbers have no address.
        return list({tensor.data_ptr() or id(tensor): tensor for tensor in held}.values())

    def nbytes_to_come(self) -> int:
        if not self.period:
            return 0
        missing = sum(one is None or one.position == 0 for pair in self.checkpoints for one in pair)
        unscanned = 0 if self.layout.static else MOST_UNSCANNED * self.log[:, :1].nbytes
        return missing * sum(part.nbytes for part in self._zero) + unscanned

    # ---- the parts of it

    def _reserved(self) -> PendingCarry:
        assert self._pending is not None, "a step without reserve"
        return self._pending

    def _log(self, step: Step, inputs: Tensor) -> PendingCarry:
        """Keep a chunk's inputs if they may be scanned again."""
        pending = self._reserved()
        logged = any(
            n and step.rewinds(row) and end > last - 2 * self.period
            for row, (n, end, last) in enumerate(zip(step.counts, step.ends, pending.step.ends))
        )
        if step.speculative or logged:
            pending.inputs.append((step, inputs))
        return pending

    def _scanned(self) -> Carry:
        """The carry at each row's committed length, with what is unscanned in it."""
        return self.carry if self.unscanned is None else scanned(self._scan_from, self.carry, self.unscanned)

    def _scan_from(self, starts: Sequence[int]) -> Scan:
        """The scan of rows that begin at these positions."""
        return self.scan if self.rounding is None else partial(self.rounding.scan, self.scan, starts)

    def _unscanned(self, step: Step) -> Unscanned | None:
        if self.unscanned is None:
            return None
        inputs, counts, _ = self.unscanned

        def places() -> tuple[Tensor, Tensor]:
            numbers = (counts, tuple(accumulate(counts, initial=0)))
            counts_t, begins_t = (torch.tensor(each, dtype=torch.int64, device=step.device) for each in numbers)
            return counts_t, begins_t

        return Unscanned(inputs, counts, *step.cached(("unscanned", counts), places))

    def _resumed(self, pending: PendingCarry, step: Step, accepted: tuple[int, ...]) -> tuple[Carry, Inputs | None]:
        """The carry after accepted prefixes, and what it lacks: nothing is scanned here before that becomes much."""
        since = self._since(pending, step, accepted)
        if max(since.counts) <= MOST_UNSCANNED:
            return self.carry, since
        return scanned(self._scan_from, self.carry, since), None

    def _since(self, pending: PendingCarry, step: Step, accepted: tuple[int, ...]) -> Inputs:
        """All inputs that come after the carry: what is unscanned, and the accepted prefixes of a step's."""
        ((_, inputs),) = pending.inputs
        before = (0,) * len(accepted) if self.unscanned is None else self.unscanned.counts

        known = inputs if self.unscanned is None else torch.cat([self.unscanned.inputs, inputs])
        build = partial(places_since, step, before, accepted, self.log.device)
        taken = known[step.cached(("since", before, accepted), build)]
        counts = tuple(old + new for old, new in zip(before, accepted))
        return Inputs(taken, counts, tuple(start - old for start, old in zip(step.starts, before)))

    def _replay(
        self, pending: PendingCarry, carry: Carry, step: Step, accepted: tuple[int, ...]
    ) -> tuple[Carry, list[PassedCarry]]:
        """The carry after the accepted prefixes: rows accepted in part are scanned again from the committed carry.

        carry: that after all of the step.
        """
        again = tuple(n if n < count else 0 for n, count in zip(accepted, step.counts))
        partly = [n < count for n, count in zip(accepted, step.counts)]
        redone = self._scanned()
        passed: list[PassedCarry] = []
        if any(again):
            parts, pieces = zip(*pending.inputs)
            index = step.cached(("again", again), lambda: places_again(parts, step, again, self.log.device))
            inputs = (pieces[0] if len(pieces) == 1 else torch.cat(pieces))[index]
            short = prefix(step, again)
            _, redone, passed = scan_with_stops(self._scan_from, inputs, redone, short, short.ends, self.period)
        whole = [
            PassedCarry([None if p else at for p, at in zip(partly, passage.positions)], passage.carry)
            for passage in pending.passed
        ]
        if not all(p or not count for p, count in zip(partly, step.counts)):
            mask = torch.tensor(partly, device=self.log.device)
            redone = tuple(
                torch.where(mask.view(-1, *[1] * (old.ndim - 1)), old, new) for old, new in zip(redone, carry)
            )
        return redone, whole + passed

    def _log_writes(self, pending: PendingCarry, step: Step, accepted: tuple[int, ...]) -> list[tuple[Tensor, Tensor]]:
        """(flat slots, inputs to put there) for the inputs accepted that the log still holds afterwards."""
        writes = []
        for part, inputs in pending.inputs:
            key = ("log", self.period, accepted)
            slots, sources = part.cached(
                key, partial(log_places, part, step, accepted, self.log.shape[1], self.log.device)
            )
            writes.append((slots, inputs if len(sources) == len(inputs) else inputs[sources]))
        return writes

    def _start(self) -> tuple[Checkpoint | None, Checkpoint | None]:
        """The checkpoints of an empty row."""
        return (Checkpoint(0, self._zero) if self.period else None), None

    def _with_passed(
        self, passed: Sequence[PassedCarry], lengths: Sequence[int], step: Step
    ) -> list[tuple[Checkpoint | None, Checkpoint | None]]:
        """The checkpoints once rows of these lengths have passed where they did in a step; older ones of rows that it
        `rewinds` alone."""
        rows = list(self.checkpoints)
        for passage in passed:
            for row, (at, length) in enumerate(zip(passage.positions, lengths)):
                if at is None or at > length:
                    continue
                # The only row's is the carry itself, which nothing writes into; of several, each keeps its own alone.
                shared = len(rows) == 1 and not self.layout.static
                carry = passage.carry if shared else tuple(part[row : row + 1].clone() for part in passage.carry)
                even, odd = rows[row] if step.rewinds(row) else (None, None)
                here = Checkpoint(at, carry)
                rows[row] = (here, odd) if at // self.period % 2 == 0 else (even, here)
        return rows

    def _hold(self, carry: Carry, changes: Changes) -> None:
        if self.layout.static:
            for own, part in zip(self.carry, carry):
                changes.copy(own, part)
        else:
            changes.assign(self, "carry", carry)

    def _put(
        self, row: int, carry: Carry, checkpoints: tuple[Checkpoint | None, Checkpoint | None], changes: Changes
    ) -> None:
        """Give a row a carry `[1, ...]` and checkpoints, also beside a pending step of others."""

        def with_row(parts: Carry) -> Carry:
            parts = tuple(part.clone() for part in parts)
            for part, own in zip(parts, carry):
                part[row] = own[0]
            return parts

        alone = len(self.carry[0]) == 1
        self._hold(carry if alone else with_row(self._scanned()), changes)
        changes.assign(self, "unscanned", None)
        if (pending := self._pending) is not None and pending.carry is not None:
            wanted = carry if alone else with_row(pending.carry)
            changes.assign(self, "_pending", replace(pending, carry=wanted))
        if self.period:
            changes.assign(self, "checkpoints", [*self.checkpoints[:row], checkpoints, *self.checkpoints[row + 1 :]])

    @staticmethod
    def _fill(own: Carry, parts: Carry) -> None:
        for tensor, part in zip(own, parts):
            tensor.copy_(part)
