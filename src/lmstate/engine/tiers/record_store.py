"""Interface of what a store keeps under names: records of sessions, responses and conversations, in generations."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

MOST_RECORD = 2**26  # bytes of a record: a hostile store must not fill the memory


@dataclass(frozen=True)
class StoredRecord:
    """A record as a store has it. Without data it was deleted, if it is not damaged."""

    generation: int  # the first one is 1
    data: bytes
    damaged: bool = False

    @property
    def deleted(self) -> bool:
        return not self.data and not self.damaged


class RecordStore(Protocol):
    """Bytes under a kind and a name. Thread-safe. Any call may raise anything: then its outcome is unknown.

    A record has generations; a value has none, and is for what can be found again, such as an index.
    """

    def read(self, kind: str, name: str) -> StoredRecord | None:
        """The newest record, also a deleted one as far as it is known; None if there is none."""

    def read_generation(self, kind: str, name: str) -> int | None:
        """The generation of that record: a small read."""

    def commit(self, kind: str, name: str, data: bytes, generation: int) -> bool:
        """Store a record if the newest one is of `generation - 1`, or there is none. No data: it is deleted.

        Atomic between processes. False if there is another one, also if that may have come after this one.
        """

    def names(self, kind: str) -> Iterable[str]:
        """The names of the records that are not deleted."""

    def set_aside(self, kind: str, name: str) -> None:
        """Keep a copy of a damaged record, as the bytes that it is, where no other record is written over it."""

    def excess(self, kind: str, most: int) -> list[str]:
        """The records that were not used for the longest, without which the others take at most `most` bytes.

        None of a store with limits of its own.
        """

    def get_value(self, kind: str, name: str) -> bytes | None:
        """The value of a name; None if there is none, or it is damaged."""

    def put_values(self, kind: str, values: Mapping[str, bytes]) -> None:
        """Store values, in place of others of their names."""

    def remove_values(self, kind: str, names: Iterable[str]) -> None: ...

    def close(self) -> None: ...


def joined(told: dict[str, Any], tokens: bytes = b"") -> bytes:
    """Data that says something in JSON, and has tokens."""
    header = json.dumps(told).encode()
    return len(header).to_bytes(4, "little") + header + tokens


def parted(data: bytes) -> tuple[dict[str, Any], bytes]:
    """Inverse of `joined`. Raises ValueError, or RecursionError, for bytes that it cannot have returned."""
    end = 4 + int.from_bytes(data[:4], "little")
    told = json.loads(data[4:end])
    if not isinstance(told, dict):
        raise ValueError("a stored record says nothing of itself")
    return told, data[end:]


def check_size(data: bytes) -> None:
    """Raise OSError for a record that could not be read again."""
    if len(data) > MOST_RECORD:
        raise OSError(f"a record of {len(data)} bytes is more than the {MOST_RECORD} that one may have")
