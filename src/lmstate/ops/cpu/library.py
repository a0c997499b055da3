"""One native library: the bodies of a variant, by subject."""

from __future__ import annotations

import ctypes

from lmstate.ops.cpu.attention import AttentionBodies
from lmstate.ops.cpu.choose import ChoosingBodies
from lmstate.ops.cpu.dense import DenseBodies
from lmstate.ops.cpu.fused import FusedBodies
from lmstate.ops.cpu.mixers import MixerBodies
from lmstate.ops.cpu.recurrent import RecurrentBodies
from lmstate.ops.cpu.slots import SlotBodies

SOFT_PAUSE = 1  # omp_pause_soft: settings stay


class Library:
    """The bodies of one variant, for tensors on the processor."""

    def __init__(self, variant: str, library: ctypes.CDLL) -> None:
        self.variant = variant
        self.dense = DenseBodies(library)
        self.attention = AttentionBodies(library)
        self.choosing = ChoosingBodies(library)
        self.slots = SlotBodies(library)
        self.recurrent = RecurrentBodies(library)
        self.mixers = MixerBodies(library)
        self.fused = FusedBodies(library)
        self._pause = getattr(library, "omp_pause_resource_all", None)  # OpenMP 5.0
        self._set_threads = getattr(library, "omp_set_num_threads", None)

    def release_threads(self) -> None:
        """End the workers that OpenMP keeps for the calling thread; its next call makes new ones."""
        if self._pause is not None:
            self._pause(SOFT_PAUSE)

    def set_threads(self, count: int) -> None:
        """Set the threads of what the calling thread computes, torch's operations too, and no other thread's."""
        if self._set_threads is not None:
            self._set_threads(count)
