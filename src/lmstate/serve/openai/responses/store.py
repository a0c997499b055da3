"""Responses that later ones may go on from: their items, and the very tokens that stand for their state.

Records of the engine's store, so that each process of one store goes on from them, or of the server's own file; the
engine's prefix store finds the state of the tokens. In a file the oldest in use go when they take more bytes than
allowed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from time import time
from typing import Any

from lmstate.engine.prefix.digests import packed, unpacked
from lmstate.engine.tiers.record_store import RecordStore, joined, parted
from lmstate.errors import SnapshotError
from lmstate.serve.answer.messages import Call, Message
from lmstate.serve.wire.owned_records import ATTEMPTS
from lmstate.serve.wire.tenants import as_owner

RESPONSES, ITEMS = "responses", "items of responses"  # kinds: a value of the second is the id of a response
ALIVE_SECONDS = 60.0  # after which one that is made elsewhere, and was not stored again, counts as lost


@dataclass(frozen=True)
class StoredResponse:
    """A response, and the conversation up to its end: `messages`, whose prompt and answer are `tokens`, then `end`."""

    id: str
    model: str  # fingerprint: tokens mean nothing to another model
    body: dict[str, Any]
    input: list[Any]
    messages: tuple[Message, ...]
    tokens: Sequence[int]
    end: int | None
    key: bytes  # of instructions, tools and what else the prompt depends on
    stored_at: float = field(default_factory=time)

    @property
    def ended(self) -> bool:
        """Whether it was answered: one in the background may be asked for before, and a kill ends it."""
        return self.body["status"] not in ("queued", "in_progress")

    @property
    def items(self) -> list[dict[str, Any]]:
        return [*self.input, *self.body["output"]]

    def to_bytes(self) -> bytes:
        told = {
            "model": self.model,
            "body": self.body,
            "input": self.input,
            "messages": [asdict(message) for message in self.messages],
            "end": self.end,
            "key": self.key.hex(),
            "stored_at": self.stored_at,
        }
        return joined(told, packed(self.tokens))

    @staticmethod
    def of(id: str, data: bytes) -> StoredResponse | None:
        """Inverse of `to_bytes`; None for other bytes."""
        try:
            told, tokens = parted(data)
            body, listed, model, end = told["body"], told["input"], str(told["model"]), told["end"]
            items = [*listed, *body["output"]]
            if not (type(body["status"]) is str and all(type(item["id"]) is str for item in items)):
                return None
            messages, key = tuple(map(_message, told["messages"])), bytes.fromhex(told["key"])
            end = None if end is None else int(end)
            return StoredResponse(
                id, model, body, listed, messages, unpacked(tokens), end, key, float(told["stored_at"])
            )
        except (SnapshotError, ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None


class ResponseStore:
    """Stored responses; at most `most` bytes of them, if their store has no limits of its own. Thread-safe."""

    def __init__(self, records: RecordStore, most: int) -> None:
        self._records, self._most = records, most

    def put(self, stored: StoredResponse, *, begun: bool = False) -> None:
        """Store a response. One that had `begun` before stays deleted if it was, and ended if it has."""
        data = stored.to_bytes()
        for old in self._records.excess(RESPONSES, self._most):
            as_owner(old, self.delete)
        self._records.put_values(ITEMS, {item["id"]: stored.id.encode() for item in stored.items})
        for _ in range(ATTEMPTS):
            there = self._records.read(RESPONSES, stored.id)
            if begun and there is not None:
                before = StoredResponse.of(stored.id, there.data)
                if there.deleted or (before is not None and before.ended and not stored.ended):
                    return
            if self._records.commit(RESPONSES, stored.id, data, 1 if there is None else there.generation + 1):
                return
        raise OSError(f"the response {stored.id} in the store changes all the time")

    def get(self, id: str) -> StoredResponse | None:
        found = self._records.read(RESPONSES, id)
        return None if found is None else StoredResponse.of(id, found.data)

    def find_item(self, id: str) -> dict[str, Any] | None:
        """An item of the input or output of any response."""
        holder = self._records.get_value(ITEMS, id)
        stored = None if holder is None else self.get(holder.decode(errors="replace"))
        return None if stored is None else next((item for item in stored.items if item["id"] == id), None)

    def delete(self, id: str) -> bool:
        for _ in range(ATTEMPTS):
            there = self._records.read(RESPONSES, id)
            if there is None or there.deleted:
                return False
            if self._records.commit(RESPONSES, id, b"", there.generation + 1):
                if (stored := StoredResponse.of(id, there.data)) is not None:
                    self._records.remove_values(ITEMS, [item["id"] for item in stored.items])
                return True
        raise OSError(f"the response {id} in the store changes all the time")


def _message(given: dict[str, Any]) -> Message:
    calls = tuple(Call(**call) for call in given.pop("calls"))
    pictures = tuple(given.pop("pictures", ()))  # records of older versions have none
    return Message(**given, calls=calls, pictures=pictures)
