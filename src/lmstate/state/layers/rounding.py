"""Carries in 16 or 8 bits: rounded at fixed positions of a row, so that the bits depend on nothing else.

A row's carry is rounded at every multiple of 64 positions, before the scan goes on from there. That is when a scan that
begins there begins; one that passes such positions runs in pieces that end at them. A rounded carry is rounded to
itself. So it does not matter how often a scan begins at one position: after a cut, a rewind or a draft.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lmstate.errors import SnapshotError
from lmstate.ops.recurrent.carry_codes import carry_codes, carry_numbers, scales_of
from lmstate.ops.types.block_table import BLOCK_TOKENS
from lmstate.state.gradients import refused, wanted
from lmstate.state.layers.scans import Carry, Scan, rows_between, rows_joined

INTERVAL = BLOCK_TOKENS
"""Positions between two roundings."""


@dataclass(frozen=True)
class CarryRounding:
    """The rounding of one layer's carry.

    `sums`: names of the rounded parts; the others stay as they are. `first`: of a part that is cut out of a larger
    one, the place of its first number there.
    """

    bits: int  # 16 or 8
    names: tuple[str, ...]
    sums: frozenset[str]
    first: Mapping[str, int] = field(default_factory=dict)

    # ---- scans

    def begun(self, carry: Carry, starts: Sequence[int], counts: Sequence[int]) -> Carry | None:
        """The carry `[R, ...]` that one scan of `counts` tokens from `starts` begins with.

        None where a row passes another on the way: `scan` then takes several.
        """
        return None if self._passes(starts, counts) else self._rounded(carry, starts, counts)

    def scan(
        self, scan: Scan, starts: Sequence[int], inputs: Tensor, carry: Carry, counts: Tensor, gate: Tensor | None
    ) -> tuple[Tensor, Carry]:
        """`scan` from `starts`, rounding wherever a row is at a multiple and goes on. Shapes as in `scan`."""
        left: list[int] = counts.tolist()
        if (whole := self.begun(carry, starts, left)) is not None:
            return scan(inputs, whole, counts, gate)
        done, pieces = [0] * len(left), []
        while any(left):
            at = [start + n for start, n in zip(starts, done)]
            now = [min(n, INTERVAL - start % INTERVAL) for n, start in zip(left, at)]
            stops = [n + more for n, more in zip(done, now)]
            part, of_gate = (None if x is None else rows_between(x, done, stops) for x in (inputs, gate))
            assert part is not None
            outputs, carry = scan(part, self._rounded(carry, at, now), counts.new_tensor(now), of_gate)
            pieces.append((outputs, now))
            done, left = stops, [n - more for n, more in zip(left, now)]
        return rows_joined(pieces), carry

    # ---- snapshots

    def packed(self, held: Mapping[str, Tensor], length: int) -> Mapping[str, Tensor]:
        """The parts of a carry, without rows, as a snapshot at `length` has them: codes at a multiple, else floats."""
        whole = dict(held)
        for name in self.sums:
            part = whole.pop(name)
            if length % INTERVAL:
                whole[self._coded(name)] = part
            else:
                codes, scales = self._codes(name, part[None], torch.tensor([length // INTERVAL]))
                whole |= {self._coded(name): codes[0], self._scales(name): scales[0]}
        return whole

    def unpacked(self, tensors: Mapping[str, Tensor], length: int) -> Mapping[str, Tensor]:
        """The inverse of `packed`. Floats are for the layer to check. Raises `SnapshotError`."""
        coded = length % INTERVAL == 0
        scaled = {self._scales(name) for name in self.sums} if coded else set()
        needed = {*self.names} - self.sums | {self._coded(name) for name in self.sums} | scaled
        if set(tensors) != needed:
            raise SnapshotError(
                f"a recurrent layer with carries of {self.bits} bits needs {sorted(needed)} at {length}; the snapshot "
                f"has {sorted(tensors)}: a state with the same carries= takes it"
            )
        whole = {name: tensors[name] for name in self.names if name not in self.sums}
        for name in self.sums:
            codes = tensors[self._coded(name)]
            if not coded:
                whole[name] = codes
                continue
            scales, dtype = tensors[self._scales(name)], torch.int8 if self.bits == 8 else torch.int16
            if codes.dtype != dtype or scales.dtype != torch.uint8 or scales.shape != (scales_of(codes.numel()),):
                raise SnapshotError(
                    f"the snapshot's {name} is {codes.dtype} {list(codes.shape)} with scales {scales.dtype} "
                    f"{list(scales.shape)}; they are {dtype} with a scale of uint8 for each 32 of them"
                )
            whole[name] = carry_numbers(codes[None], scales[None])[0]
        return whole

    # ---- the parts of it

    @staticmethod
    def _passes(starts: Sequence[int], counts: Sequence[int]) -> bool:
        return any(count and start % INTERVAL + count > INTERVAL for start, count in zip(starts, counts))

    def _rounded(self, carry: Carry, starts: Sequence[int], counts: Sequence[int]) -> Carry:
        rows = [row for row, (at, count) in enumerate(zip(starts, counts)) if count and at and at % INTERVAL == 0]
        if not rows:
            return carry
        places = torch.tensor(rows, device=carry[0].device)
        turns = torch.tensor([starts[row] // INTERVAL for row in rows])

        def rounded(name: str, part: Tensor) -> Tensor:
            with torch.no_grad():
                own = carry_numbers(*self._codes(name, part[places], turns))
                whole = own if len(rows) == len(part) else part.index_copy(0, places, own)
            return refused(whole, f"carries of {self.bits} bits") if wanted(part) else whole

        return tuple(rounded(name, part) if name in self.sums else part for name, part in zip(self.names, carry))

    def _codes(self, name: str, part: Tensor, turns: Tensor) -> tuple[Tensor, Tensor]:
        return carry_codes(part, self.bits, turns, self.first.get(name, 0))

    def _coded(self, name: str) -> str:
        return f"{name}.int{self.bits}"

    @staticmethod
    def _scales(name: str) -> str:
        return f"{name}.scales"
