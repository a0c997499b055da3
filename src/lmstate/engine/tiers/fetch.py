"""Reading from a tier without waiting for it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from threading import Thread
from time import perf_counter

from lmstate.engine.prefix.parts import Layers
from lmstate.engine.tiers.tier import Tier, TierError


class Fetch:
    """Reads some keys on a thread of its own; `wake` is called at the end. A tier that hangs holds up nothing else."""

    def __init__(self, tier: Tier, keys: Sequence[str], patience: float, wake: Callable[[], None]) -> None:
        """`patience`: seconds after which it counts as failed."""
        self.read: dict[str, Layers] = {}
        self.failed: list[str] = []
        self.taken = False  # whether somebody has used what was read
        self._ended = False
        self._until = perf_counter() + patience
        self._tier, self._keys, self._wake = tier, keys, wake
        Thread(target=self._run, name="lmstate-fetch", daemon=True).start()

    @property
    def over(self) -> bool:
        return self._ended or perf_counter() > self._until

    def _run(self) -> None:
        for key in self._keys:
            try:
                self.read[key] = self._tier.get(key)
            except TierError:
                self.failed.append(key)  # the others are still tried: what is damaged is to be known and written again
        self._ended = True
        self._wake()
