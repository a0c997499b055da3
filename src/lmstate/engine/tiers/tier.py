"""Interface of a tier outside memory, and the background thread that writes to it."""

from __future__ import annotations

import hashlib
import logging
import re
from abc import ABC, abstractmethod
from array import array
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Condition, Thread
from typing import Literal, cast, get_args

from torch import Tensor

from lmstate.engine.prefix.digests import packed
from lmstate.engine.prefix.parts import Layers, nbytes
from lmstate.engine.tiers.record_store import RecordStore
from lmstate.engine.tiers.records import RecordWriter, SavedSession
from lmstate.engine.tiers.seal import key_name, store_key
from lmstate.errors import ModelError, SnapshotError, StateError
from lmstate.files.mmap_file import FileBuffer
from lmstate.files.safetensors import TensorFile
from lmstate.state.layer_file import by_layer
from lmstate.state.snapshot import VERSION

LOG = logging.getLogger(__name__)
WAITING_BYTES = 2**28  # of tensors that may wait to be written; what comes beyond waits alone, or is not kept here
MOST_LAYERS = 100_000  # of an entry: what a store says is not to fill the memory
CARRIES = re.compile(r" carries=\d+")
Kind = Literal["run", "carry", "end"]


class TierError(StateError):
    """Something that a tier was to have is gone, or damaged."""


@dataclass(frozen=True)
class Entry:
    """A run (what the tokens from `start` on left), or the carry after the last token, of a text. An end has logits."""

    kind: Kind
    frequency_key: int
    start: int
    tokens: array[int]  # all of the text, from its beginning
    salt: str = ""  # under which alone it is found

    @property
    def label(self) -> str:
        """Its kind and salt in one text, as stores write them."""
        return f"{self.kind}|{self.salt}" if self.salt else self.kind

    @staticmethod
    def labelled(label: str, frequency_key: int, start: int, tokens: array[int]) -> Entry:
        """The entry of a label. Raises ValueError for one that has no kind, or is not in its text."""
        kind, _, salt = label.partition("|")
        if kind not in get_args(Kind) or not 0 <= start <= len(tokens):
            raise ValueError(f"a stored entry is of kind {kind[:20]!r} and begins at {start} of {len(tokens)} tokens")
        return Entry(cast("Kind", kind), frequency_key, start, tokens, salt)

    def key(self, namespace: str) -> str:
        """The same for the same content in the same version of the format, on any machine."""
        told = f"{namespace}|{VERSION}|{self.label}|{self.frequency_key}|{self.start}|".encode()
        return hashlib.sha256(told + packed(self.tokens)).hexdigest()


@dataclass(frozen=True)
class _Write:
    entry: Entry
    key: str
    layers: Layers
    above: tuple[str, ...]


class Tier(ABC):
    """Keeps entries by their keys, and records of sessions. `put` returns at once; a thread of the tier's own writes.

    A kind of tier has a `name`, and implements `entries`, `read` and `write`; its `__init__` ends with `start()`.
    `namespace` names the model and how its keys and values are stored. Failures are counted and leave the rest whole;
    only `get` raises, `TierError`.
    """

    name: str
    most_read = 2**36  # bytes of an entry; to an engine, as many as it has memory
    looks_up = False  # whether others write to it, so that it is worth asking for texts that were not seen here

    def __init__(self, namespace: str, stored: RecordStore) -> None:
        """`stored`: where it keeps records."""
        self.key = store_key()
        self.namespace = f"{namespace} sealed={key_name(self.key)}" if self.key else namespace
        self.stored = stored
        self._sessions = sessions_of(self.namespace)  # the kind of their records
        self.counts = {"written": 0, "dropped": 0, "failed": 0, "read": 0, "quarantined": 0}
        self._keys: set[str] = set()
        self._coming: set[str] = set()  # keys of what is queued, or being written
        self._changed = Condition()
        self._writes: deque[_Write] = deque()
        self._waiting = 0  # bytes of tensors
        self._now: _Write | None = None  # what is being written
        self.records = RecordWriter(self)
        self._closed = False
        self._told = False  # that it cannot be read or written
        self._thread = Thread(target=self._run, name=f"lmstate-{self.name}", daemon=True)

    def start(self) -> None:
        """Begin to write what is `put`."""
        self._thread.start()

    # ---- for the engine

    def has(self, key: str) -> bool:
        return key in self._keys

    def keeps(self, key: str) -> bool:
        """Whether it has an entry, or is to have it: what could not be written, or went since, is to be `put` again."""
        return key in self._coming or key in self._keys

    def all_entries(self) -> list[tuple[str, Entry]]:
        """`entries`, as far as they can be read now."""
        found: list[tuple[str, Entry]] = []
        try:
            for item in self.entries():
                found.append(item)  # noqa: PERF402 - what was read before it fails counts
        except Exception as error:
            self.counts["failed"] += 1
            self._tell("cannot be read", error)
        with self._changed:
            self._keys.update(key for key, _ in found)
        return found

    def put(self, entry: Entry, layers: Layers, above: Sequence[str] = ()) -> str | None:
        """Have it written. Returns its key; None if too much waits to be written already.

        `above`: the keys of what it is of no use without.
        """
        key, size = entry.key(self.namespace), nbytes(layers)
        with self._changed:
            if self.keeps(key):
                return key
            if self._closed or (self._waiting and self._waiting + size > WAITING_BYTES):
                self.counts["dropped"] += 1
                return None
            self._waiting += size
            self._coming.add(key)
            self._writes.append(_Write(entry, key, layers, tuple(above)))
            self._changed.notify_all()
        return key

    def lookup(self, tokens: Sequence[int], salt: str = "") -> list[tuple[str, Entry]]:
        """`find`, of which nothing is raised: a store that cannot be asked has nothing."""
        try:
            found = self.find(tokens, salt)
        except Exception:
            self.counts["failed"] += 1
            return []
        with self._changed:
            self._keys.update(key for key, _ in found)
        return found

    def get(self, key: str) -> Layers:
        """Entry under a key. Raises TierError if it is gone or damaged."""
        try:
            layers = self.read(key)
        except Exception as error:  # whatever a store's client raises: the entry counts as gone, and is computed again
            self.refuse(key)
            raise TierError(f"{self.name} cannot give {key[:12]}: {error}") from error
        with self._changed:
            self.counts["read"] += 1
        return layers

    def check_size(self, size: int) -> None:
        """Raise SnapshotError if an entry of `size` bytes is too large for this process. Others may have room."""
        if size > self.most_read:
            raise SnapshotError(f"it is larger than the {self.most_read} bytes that there are for it")

    def refuse(self, key: str) -> None:
        """Have an entry that is damaged count as gone, so that `put` writes it again."""
        with self._changed:
            self._keys.discard(key)
            self.counts["failed"] += 1

    @property
    def writing(self) -> bool:
        """Whether something is to be written still, whose blocks are held for that."""
        with self._changed:  # between the queue and the writer's hands a job is in neither
            return bool(self._writes) or self._now is not None

    def flush(self, timeout: float | None = None) -> bool:
        """Wait until all is written. False if it is not in time."""
        if not self.records.flush(timeout):
            return False
        with self._changed:
            return self._changed.wait_for(lambda: not self.writing, timeout)

    def close(self, timeout: float = 30.0) -> None:
        """Write what waits, records first, and end the threads; entries that are not written in time are lost."""
        self.records.close(timeout)
        self.flush(timeout)
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._thread.join(1.0)
        self.end()

    # ---- records of sessions: see `SessionRecords`, and `RecordStore` for what may be raised

    def session_names(self) -> Iterable[str]:
        """The names of all sessions that were not closed."""
        return self.stored.names(self._sessions)

    def read_session(self, name: str) -> SavedSession | None:
        if (found := self.stored.read(self._sessions, name)) is None:
            return None
        session = SavedSession.of(name, found)
        self.counts["quarantined"] += session.damaged
        return session

    def session_generation(self, name: str) -> int | None:
        return self.stored.read_generation(self._sessions, name)

    def write_session(self, session: SavedSession) -> bool:
        return self.stored.commit(self._sessions, session.name, session.to_bytes(), session.generation)

    def set_aside_session(self, name: str) -> None:
        """Keep a copy of a damaged record, where no other one is written over it."""
        self.stored.set_aside(self._sessions, name)

    # ---- for a kind of tier

    @abstractmethod
    def entries(self) -> Iterable[tuple[str, Entry]]:
        """Return (key, entry) of every entry of this namespace."""

    @abstractmethod
    def read(self, key: str) -> Layers:
        """Return the layers under a key, on the processor, in memory that nothing else writes to.

        Raises anything for an entry that is gone or damaged. The engine checks shapes alone, so check that the bytes
        are those that were written. Several threads call it, and `find`.
        """

    @abstractmethod
    def write(self, entry: Entry, key: str, layers: Layers, above: Sequence[str]) -> None:
        """Store layers under a key, so that they last when it returns; the tier's thread alone calls it.

        `above`: the keys of the entries without which this one is of no use. Raises anything where it cannot.
        """

    def find(self, tokens: Sequence[int], salt: str = "") -> list[tuple[str, Entry]]:
        """(key, entry) of what others may have written of a text's beginning under a salt. May raise anything."""
        return []

    def check_access(self) -> None:  # noqa: B027
        """Raise anything if it can be seen to be out of reach, or not to be written."""

    def tidy(self) -> None:  # noqa: B027
        """Remove what writers that were killed have left."""

    def end(self) -> None:  # noqa: B027
        """Let go of files and connections."""

    # ---- the thread

    def _run(self) -> None:
        try:
            self.check_access()
            self.tidy()
        except Exception as error:
            self._tell("cannot be used", error)
        while True:
            with self._changed:
                self._now = None
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._writes or self._closed)
                if not self._writes:
                    return
                job = self._now = self._writes.popleft()
            try:
                self._write(job)
                self.counts["written"] += 1
                self._told = False
            except Exception as error:  # whatever a client raises: the entry is not kept, and the thread goes on
                self.counts["failed"] += 1
                self._tell("keeps nothing", error)
            del job  # and the blocks that it holds

    def _tell(self, what: str, error: Exception) -> None:
        """Log a failure: once, until something is written again."""
        if not self._told:
            why = str(error).partition("\n")[0]  # a text: a record with the error would hold the job
            LOG.warning("the store (%s) %s for now, and is tried again: %s", self.name, what, why)
            self._told = True

    def _write(self, job: _Write) -> None:
        try:
            self.write(job.entry, job.key, job.layers, job.above)
            with self._changed:
                self._keys.add(job.key)
        finally:
            with self._changed:
                self._coming.discard(job.key)
                self._waiting -= nbytes(job.layers)


def sessions_of(namespace: str) -> str:
    """The kind of the records of sessions: a text, of which states of any carries are found or computed again."""
    return f"sessions of {CARRIES.sub('', namespace)}"


def to_bytes(layers: Layers) -> bytes:
    """A safetensors file: tensors `layers.{index}.{name}`."""
    from safetensors.torch import save

    tensors: dict[str, Tensor] = {
        f"layers.{index}.{name}": tensor.detach().cpu().contiguous()
        for index, layer in enumerate(layers)
        for name, tensor in layer.items()
    }
    return save(tensors, {"format": "lmstate-prefix", "version": "1", "layers": str(len(layers))})


def from_bytes(data: bytearray, where: Path, layers: int) -> Layers:
    """Inverse of `to_bytes` for a model of `layers` layers: views of `data`. Raises SnapshotError for a damaged or
    foreign file."""
    try:
        file = TensorFile(where, FileBuffer(where, data))
    except ModelError as error:
        raise SnapshotError(str(error)) from error
    return by_layer(where, {name: file.tensor(name) for name in file.entries}, layers)
