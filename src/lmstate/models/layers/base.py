"""What mixes tokens in a block: attention or a recurrence. It has weights and no memory."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Protocol, TypeAlias

from torch import Tensor

from lmstate import ops
from lmstate.ops import Norm, Residual
from lmstate.state import LayerState, Layout, RecurrentState, Step

Sublayers: TypeAlias = ops.Sublayer | tuple[ops.Sublayer, ops.Sublayer]


class Mixer(Protocol):
    """`x [R, T, E] -> [R, T, E]`. What it remembers lies in the `memory` that it made with `new_state`.

    `norm` is applied to x first; `residual` is added last.
    """

    @property
    def kind(self) -> str:
        """The layer kind, as in `State.memory`."""
        ...

    def __call__(
        self, x: Tensor, step: Step, memory: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor: ...

    def new_state(self, layout: Layout) -> LayerState: ...


class JoiningMixer(ABC):
    """One that may wait in a run of layers, as a half of its block. Called alone, it is a run of its own if it can."""

    @abstractmethod
    def half(self, norm: Norm | None, after: Norm | None, scale: float) -> Sublayers | None:
        """What waits, with the norms before and after it; None if this one never does."""

    @abstractmethod
    def joins(self, run: ops.Run, half: Sublayers, step: Step, memory: LayerState) -> bool:
        """Have its half wait in a run; False where it cannot."""

    def rotation(self, step: Step) -> ops.RopeTables | None:
        """How a step's positions turn what it compares."""
        return None

    @abstractmethod
    def apart(self, x: Tensor, step: Step, memory: LayerState, norm: Norm | None, residual: Residual | None) -> Tensor:
        """The same as operations one after the other."""

    def __call__(
        self, x: Tensor, step: Step, memory: LayerState, norm: Norm | None = None, residual: Residual | None = None
    ) -> Tensor:
        stream, after, scale = residual or (None, None, 1.0)
        run = ops.Run(x, step.starts_t, step.counts_t)
        run.add_to(stream, x)
        half = self.half(norm, after, scale) if run.native else None
        if half is not None and self.joins(run, half, step, memory):
            return run.stream()
        return self.apart(x, step, memory, norm, residual)


class RecurrentMixer(JoiningMixer):
    """One whose memory is a fold with a convolution's tail, and mostly a state."""

    def joins(self, run: ops.Run, half: Sublayers, step: Step, memory: LayerState) -> bool:
        assert isinstance(memory, RecurrentState) and isinstance(half, ops.RecurrentSublayer)
        if not run.native or (carry := memory.single_scan_carry(step)) is None:
            return False
        if (folded := run.folds(half, carry)) is None:
            return False
        memory.record(step, *folded)
        return True
