"""Blocks whose weights are in host memory. Each comes to its device for a step while the one before it computes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Generic, Self, TypeVar

import torch

from lmstate.models.layers.in_states import beside_states, read_by_state
from lmstate.models.mapped import mapped, moved
from lmstate.ops import Weight

Block = TypeVar("Block")
Result = TypeVar("Result")
HOST = torch.device("cpu")


class Offload(Generic[Block]):
    """The blocks of one device whose weights are in host memory, in their order. For any number of threads.

    The device holds the weights of two of them at most for each thread that computes: those of the block that runs, and
    those of the next one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._next: dict[int, Block] = {}  # by the id of the block before it; the network holds both
        self._last: Block | None = None
        self._ahead: tuple[Block, Block] | None = None  # a block, and itself on the device
        self._lock = threading.Lock()
        self._copies = torch.cuda.Stream(device) if torch.cuda.is_available() else None

    def stored(self, block: Block) -> Block:
        """The block with its matrices in host memory, as the last of these blocks."""
        part: Any = mapped(block, _in_host_memory)
        kept: Block = replace(part, offload=self, device=self.device)
        if self._last is not None:
            self._next[id(self._last)] = kept
        self._last = kept
        return kept

    def run(self, block: Block, compute: Callable[[Block], Result]) -> Result:
        """Compute with a block on the device. Meanwhile the weights of the next block come there."""
        here = self._taken(block)
        try:
            out = compute(here)
            if (following := self._next.get(id(block))) is not None:
                ahead = following, self._fetched(following)
                with self._lock:
                    self._ahead = ahead
            return out
        finally:
            if self._copies is not None:  # before the memory of this block's weights is used again
                torch.cuda.current_stream(self.device).synchronize()

    def _taken(self, block: Block) -> Block:
        with self._lock:
            ahead, self._ahead = self._ahead, None
        return ahead[1] if ahead is not None and ahead[0] is block else self._fetched(block)

    def _fetched(self, block: Block) -> Block:
        """The block on the device, once all of it is there. Other streams go on."""
        if self._copies is None:
            return moved(block, self.device)
        with torch.cuda.stream(self._copies):
            return moved(block, self.device)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        """Itself: it holds nothing that a copy of a model changes."""
        return self


def _in_host_memory(part: Any) -> Any:
    """A matrix in host memory. Other tensors stay where they are, and so do matrices that states read."""
    if isinstance(part, Weight):
        kept = part.to(HOST)
        if torch.cuda.is_available():
            kept.storage = kept.storage.pin_memory()  # which a GPU reads without the processor's help
        return kept
    return beside_states(part, _in_host_memory) if read_by_state(part) else part
