"""Reading from a tier without waiting for it, or not for long."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from queue import Empty, SimpleQueue
from threading import Lock, Thread
from time import perf_counter
from typing import TypeVar

from lmstate.engine.prefix.parts import Layers
from lmstate.engine.results import StoreUnreachable
from lmstate.engine.tiers.record_store import RecordStore, StoredRecord
from lmstate.engine.tiers.tier import Entry, Tier, TierError

Result = TypeVar("Result")

ASKING_SECONDS = 2.0  # that a caller waits for what a store says of a session
ASKING_SILENCE = 1.0  # seconds in which a store that did not say so in time is not asked again
AT_ONCE = 2  # keys that are read beside each other: to wait for a file, to check its bytes, to fill blocks
SILENCE = 30.0  # seconds in which one that did not answer in time is not asked again


class Patience:
    """Asks a tier while a caller waits: not for long, and after an answer that was too late not again for a while."""

    def __init__(self) -> None:
        self._silent_until = 0.0

    def ask(self, question: Callable[[], Result]) -> Result:
        """`question()`, on a thread of its own. Raises StoreUnreachable if it raises, or does not end in time."""
        if perf_counter() < self._silent_until:
            raise StoreUnreachable("the store did not answer in time just now, and is not asked yet: try again")
        answers: SimpleQueue[Result | BaseException] = SimpleQueue()

        def run() -> None:
            try:
                answers.put(question())
            except BaseException as error:
                answers.put(error)

        Thread(target=run, name="lmstate-ask", daemon=True).start()
        try:
            answer = answers.get(timeout=ASKING_SECONDS)
        except Empty:
            self._silent_until = perf_counter() + ASKING_SILENCE
            raise StoreUnreachable("the store does not answer in time: try again") from None
        if isinstance(answer, BaseException):
            why = str(answer).partition("\n")[0]
            raise StoreUnreachable(f"the store cannot be read now: {why}") from answer
        return answer


class PatientRecords:
    """The records of a tier, for callers that wait but not for long. Raises StoreUnreachable for whatever fails."""

    def __init__(self, records: RecordStore) -> None:
        self._records, self._patience = records, Patience()

    def read(self, kind: str, name: str) -> StoredRecord | None:
        return self._patience.ask(partial(self._records.read, kind, name))

    def read_generation(self, kind: str, name: str) -> int | None:
        return self._patience.ask(partial(self._records.read_generation, kind, name))

    def commit(self, kind: str, name: str, data: bytes, generation: int) -> bool:
        return self._patience.ask(partial(self._records.commit, kind, name, data, generation))

    def names(self, kind: str) -> list[str]:
        return self._patience.ask(lambda: list(self._records.names(kind)))

    def set_aside(self, kind: str, name: str) -> None:
        self._patience.ask(partial(self._records.set_aside, kind, name))

    def excess(self, kind: str, most: int) -> list[str]:
        return self._patience.ask(partial(self._records.excess, kind, most))

    def get_value(self, kind: str, name: str) -> bytes | None:
        return self._patience.ask(partial(self._records.get_value, kind, name))

    def put_values(self, kind: str, values: Mapping[str, bytes]) -> None:
        self._patience.ask(partial(self._records.put_values, kind, values))

    def remove_values(self, kind: str, names: Iterable[str]) -> None:
        self._patience.ask(partial(self._records.remove_values, kind, list(names)))

    def close(self) -> None:
        """The tier closes its records."""


class Lookup:
    """Asks a tier which entries it has of a text, on a thread of its own; `wake` is called at the end."""

    def __init__(self, tier: Tier, tokens: Sequence[int], salt: str, patience: float, wake: Callable[[], None]) -> None:
        """`patience`: seconds after which nothing is waited for."""
        self.found: list[tuple[str, Entry]] = []
        self.ended = False
        self._until = perf_counter() + patience
        self._tier, self._tokens, self._salt, self._wake = tier, tokens, salt, wake
        Thread(target=self._run, name="lmstate-lookup", daemon=True).start()

    @property
    def over(self) -> bool:
        return self.ended or perf_counter() > self._until

    def _run(self) -> None:
        self.found = self._tier.lookup(self._tokens, self._salt)
        self.ended = True
        self._wake()


class Fetch:
    """Reads some keys on threads of its own; `wake` is called at the end. A tier that hangs holds up nothing else."""

    def __init__(
        self, tier: Tier, wanted: Mapping[str, Callable[[Layers], Layers]], patience: float, wake: Callable[[], None]
    ) -> None:
        """`wanted`: keys, and what is made of what was read under each. `patience`: seconds after which it counts as
        failed."""
        self.made: dict[str, Layers] = {}
        self.failed: list[str] = []
        self.taken = False  # whether the data was used
        self._left = deque(wanted.items())
        self._running = min(AT_ONCE, len(wanted))
        self.ended = False  # whether its threads have
        self._until = perf_counter() + patience
        self._tier, self._wake, self._lock = tier, wake, Lock()
        for _ in range(self._running):
            Thread(target=self._run, name="lmstate-fetch", daemon=True).start()

    @property
    def over(self) -> bool:
        return self.ended or perf_counter() > self._until

    def stop(self) -> None:
        """Begin to read nothing more: it is not needed."""
        self._left.clear()

    def _run(self) -> None:
        with suppress(IndexError):  # none is left
            while True:
                key, make = self._left.popleft()
                try:
                    self.made[key] = make(self._tier.get(key))
                except TierError:
                    self.failed.append(key)  # the others are still tried: what is damaged is to be written again
                except Exception:  # of another kind of state, or too large for memory: no request waits for ever
                    self._tier.refuse(key)
                    self.failed.append(key)
        with self._lock:
            self._running -= 1
            self.ended = not self._running
        if self.ended:
            self._wake()
