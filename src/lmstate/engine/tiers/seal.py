"""Seals of what a store keeps: a store that others can write to can lose it, but not change it."""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Iterable

from lmstate.engine.tiers.blobs import Blobs
from lmstate.errors import SnapshotError

KEY = "LMSTATE_STORE_KEY"  # environment variable with the secret; processes of one store have the same
SEAL_BYTES = hashlib.sha256().digest_size


class SealBroken(SnapshotError):
    """A sealed record is not as it was written. `generation` and `data` are what the store gave."""

    def __init__(self, name: str, generation: int, data: bytes) -> None:
        super().__init__(f"{name} does not have the seal of {KEY}")
        self.generation, self.data = generation, data


def store_key() -> bytes:
    """The secret of the environment; empty: nothing is sealed."""
    return os.environ.get(KEY, "").encode()


def key_name(key: bytes) -> str:
    """A name for a secret that does not tell it: processes of another one, or of none, have another namespace."""
    return seal(key, b"lmstate store").hex()[:16]


def seal(key: bytes, *parts: bytes | bytearray) -> bytes:
    """HMAC-SHA256 (RFC 2104) over parts, each with its length, so that no byte can move from one to the next."""
    made = hmac.new(key, digestmod=hashlib.sha256)
    for part in parts:
        made.update(len(part).to_bytes(8, "little"))
        made.update(part)
    return made.digest()


class SealedBlobs:
    """Blobs, each behind a seal over its name and its bytes; what has another seal counts as absent.

    The name begins with the namespace. Whether a session was closed is not sealed: who can delete can close.
    """

    def __init__(self, blobs: Blobs, key: bytes) -> None:
        self._blobs, self._key = blobs, key

    def get(self, name: str, most: int) -> bytes | None:
        found = self._blobs.get(name, SEAL_BYTES + most)
        if found is None:
            return None
        data = found[SEAL_BYTES:]
        return data if hmac.compare_digest(found[:SEAL_BYTES], self._seal(name, data)) else None

    def put(self, name: str, data: bytes) -> None:
        self._blobs.put(name, self._seal(name, data) + data)

    def delete(self, name: str) -> None:
        self._blobs.delete(name)

    def names(self, prefix: str) -> Iterable[str]:
        return self._blobs.names(prefix)

    def read_record(self, name: str, most: int) -> tuple[int, bytes] | None:
        """Raises SealBroken. With `most=0` the generation alone is read, which no seal is over then."""
        if (found := self._blobs.read_record(name, SEAL_BYTES + most if most else 0)) is None:
            return None
        generation, sealed = found
        if not most or not sealed:
            return generation, b""
        data = sealed[SEAL_BYTES:]
        if not hmac.compare_digest(sealed[:SEAL_BYTES], self._seal(name, data, generation)):
            raise SealBroken(name, generation, sealed)
        return generation, data

    def commit_record(self, name: str, data: bytes, generation: int) -> bool:
        sealed = self._seal(name, data, generation) + data if data else b""
        return self._blobs.commit_record(name, sealed, generation)

    def record_names(self, prefix: str) -> Iterable[str]:
        return self._blobs.record_names(prefix)

    def _seal(self, name: str, data: bytes, generation: int = 0) -> bytes:
        return seal(self._key, name.encode(), generation.to_bytes(8, "little"), data)
