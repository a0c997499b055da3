"""One native library: the bodies of a variant, by subject."""

from __future__ import annotations

import ctypes

from lmstate.ops.cpu.attention import Attention
from lmstate.ops.cpu.dense import Dense
from lmstate.ops.cpu.fused import Fused
from lmstate.ops.cpu.mixers import Mixers
from lmstate.ops.cpu.recurrent import Recurrent
from lmstate.ops.cpu.slots import Slots


class Library:
    """The bodies of one variant, for tensors on the processor."""

    def __init__(self, variant: str, library: ctypes.CDLL) -> None:
        self.variant = variant
        self.dense = Dense(library)
        self.attention = Attention(library)
        self.slots = Slots(library)
        self.recurrent = Recurrent(library)
        self.mixers = Mixers(library)
        self.fused = Fused(library)
