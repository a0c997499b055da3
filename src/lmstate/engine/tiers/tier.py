"""Interface of a tier outside memory, and the background thread that writes to it."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from threading import Condition, Thread
from typing import Literal

from torch import Tensor

from lmstate.engine.prefix.parts import Layers, nbytes
from lmstate.errors import SnapshotError, StateError
from lmstate.state.layer_file import by_layer

WAITING_BYTES = 2**28  # of tensors that may wait to be written; what comes beyond is not kept here
Kind = Literal["run", "carry", "end"]


class TierError(StateError):
    """Something that a tier was to have is gone, or damaged."""


@dataclass(frozen=True)
class Entry:
    """A run (what the tokens from `start` on left), or the carry after the last token, of a text. An end has logits."""

    kind: Kind
    regime: int
    start: int
    tokens: array[int]  # all of the text, from its beginning

    def key(self, namespace: str) -> str:
        """The same for the same content, on any machine."""
        told = f"{namespace}|{self.kind}|{self.regime}|{self.start}|".encode()
        return hashlib.sha256(told + packed(self.tokens)).hexdigest()


@dataclass(frozen=True)
class SavedSession:
    """A conversation: its tokens, and its record as text."""

    name: str
    tokens: list[int]
    record: str


@dataclass(frozen=True)
class _Write:
    entry: Entry
    key: str
    layers: Layers
    above: tuple[str, ...]


class Tier(ABC):
    """Keeps entries by their keys. `put` and `put_session` return at once; a thread of the tier's own writes.

    `namespace` names the model and how its keys and values are stored. What fails is counted and leaves the rest
    whole; only `get` raises, `TierError`.
    """

    name: str

    def __init__(self, namespace: str) -> None:
        self.namespace = namespace
        self.counts = {"written": 0, "dropped": 0, "failed": 0, "read": 0, "quarantined": 0}
        self._keys: set[str] = set()
        self._changed = Condition()
        self._writes: deque[_Write | SavedSession | str] = deque()
        self._waiting = 0  # bytes of tensors
        self._busy = False
        self._closed = False
        self._thread = Thread(target=self._run, name=f"lmstate-{self.name}", daemon=True)

    # ---- for the engine

    def has(self, key: str) -> bool:
        return key in self._keys

    def put(self, entry: Entry, layers: Layers, above: Sequence[str] = ()) -> str | None:
        """Have it written. Returns its key; None if too much waits to be written already.

        `above`: the keys of what it is of no use without.
        """
        key, size = entry.key(self.namespace), nbytes(layers)
        with self._changed:
            if key in self._keys:
                return key
            if self._closed or self._waiting + size > WAITING_BYTES:
                self.counts["dropped"] += 1
                return None
            self._waiting += size
            self._writes.append(_Write(entry, key, layers, tuple(above)))
            self._changed.notify_all()
        return key

    def put_session(self, session: SavedSession) -> None:
        with self._changed:
            self._writes.append(session)
            self._changed.notify_all()

    def drop_session(self, name: str) -> None:
        with self._changed:
            self._writes.append(name)
            self._changed.notify_all()

    def get(self, key: str) -> Layers:
        """Entry under a key. Raises TierError if it is gone or damaged."""
        try:
            layers = self.read(key)
        except Exception as error:
            with self._changed:
                self._keys.discard(key)
                self.counts["failed"] += 1
            raise TierError(f"{self.name} cannot give {key[:12]}: {error}") from error
        self.counts["read"] += 1
        return layers

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all is written. False if it is not in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._writes and not self._busy, timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Write what waits, and end the thread; what is not written in time is lost."""
        self.flush(timeout)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(1.0)
        self.end()

    # ---- for a kind of tier

    @abstractmethod
    def entries(self) -> Iterable[tuple[str, Entry]]:
        """(key, entry) of all there is of this namespace."""

    @abstractmethod
    def sessions(self) -> Iterable[SavedSession]: ...

    @abstractmethod
    def read(self, key: str) -> Layers:
        """Raises anything for what is gone or damaged."""

    @abstractmethod
    def write(self, entry: Entry, key: str, layers: Layers, above: Sequence[str]) -> None: ...

    @abstractmethod
    def write_session(self, session: SavedSession) -> None: ...

    @abstractmethod
    def remove_session(self, name: str) -> None: ...

    def end(self) -> None:  # noqa: B027
        """Let go of files and connections."""

    # ---- the thread

    def _run(self) -> None:
        while True:
            with self._changed:
                self._busy = False
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._writes or self._closed)
                if not self._writes:
                    return
                job = self._writes.popleft()
                self._busy = True
            try:
                self._write(job)
                self.counts["written"] += 1
            except Exception:
                self.counts["failed"] += 1

    def _write(self, job: _Write | SavedSession | str) -> None:
        if isinstance(job, str):
            self.remove_session(job)
        elif isinstance(job, SavedSession):
            self.write_session(job)
        else:
            try:
                self.write(job.entry, job.key, job.layers, job.above)
                with self._changed:
                    self._keys.add(job.key)
            finally:
                with self._changed:
                    self._waiting -= nbytes(job.layers)


def packed(tokens: Sequence[int]) -> bytes:
    """Token ids as int32, little-endian."""
    import sys

    ids = array("i", tokens)
    if sys.byteorder == "big":
        ids.byteswap()
    return ids.tobytes()


def unpacked(data: bytes) -> array[int]:
    """Inverse of `packed`. Raises SnapshotError for bytes that it cannot have returned."""
    import sys

    if len(data) % 4:
        raise SnapshotError("a stored text is no list of token ids")
    ids = array("i")
    ids.frombytes(data)
    if sys.byteorder == "big":
        ids.byteswap()
    if any(token < 0 for token in ids):
        raise SnapshotError("a stored text has negative token ids")
    return array("q", ids)


def to_bytes(layers: Layers) -> bytes:
    """A safetensors file: tensors `layers.{index}.{name}`."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {
        f"layers.{index}.{name}": tensor.detach().cpu().contiguous()
        for index, layer in enumerate(layers)
        for name, tensor in layer.items()
    }
    return save(tensors, {"format": "lmstate-prefix", "version": "1", "layers": str(len(layers))})


def from_bytes(data: bytes, where: str, layers: int) -> Layers:
    """Inverse of `to_bytes` for a model of so many layers. Raises SnapshotError for a damaged or foreign file."""
    from pathlib import Path

    from safetensors import SafetensorError
    from safetensors.torch import load

    try:
        tensors = load(data)
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise SnapshotError(f"{where} is damaged: {error}") from error
    return by_layer(Path(where), tensors, layers)
