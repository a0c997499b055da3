"""Conversations of the responses protocol: items that requests go on from by the conversation's id, and add to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import time
from typing import Any

from lmstate.engine.tiers.record_store import RecordStore, joined, parted
from lmstate.serve.wire.ids import new_id
from lmstate.serve.wire.owned_records import ATTEMPTS
from lmstate.serve.wire.tenants import as_owner

CONVERSATIONS, ITEMS = "conversations", "items of conversations"  # kinds: a value of the second is an id of the first


@dataclass(frozen=True)
class StoredConversation:
    """A conversation with its items. `last` is the response whose end is the end of these items, if one is."""

    id: str
    created: int
    metadata: dict[str, Any]
    items: tuple[dict[str, Any], ...]
    last: str | None

    def shown(self) -> dict[str, Any]:
        return {"id": self.id, "object": "conversation", "created_at": self.created, "metadata": self.metadata}

    def to_bytes(self) -> bytes:
        told = {"created": self.created, "metadata": self.metadata, "items": self.items, "last": self.last}
        return joined(told)

    @staticmethod
    def of(id: str, data: bytes) -> StoredConversation | None:
        """Inverse of `to_bytes`; None for other bytes."""
        try:
            told, _ = parted(data)
            items, last, metadata = tuple(told["items"]), told["last"], dict(told["metadata"])
            if not all(type(item["id"]) is str for item in items):
                return None
            return StoredConversation(id, int(told["created"]), metadata, items, None if last is None else str(last))
        except (ValueError, TypeError, KeyError, OverflowError, RecursionError):
            return None


class ResponseConversations:
    """Conversations; at most `most` bytes of them, if their store has no limits of its own. Thread-safe."""

    def __init__(self, records: RecordStore, most: int) -> None:
        self._records, self._most = records, most

    def create(self, metadata: dict[str, Any], items: Sequence[dict[str, Any]]) -> StoredConversation:
        made = StoredConversation(new_id("conv_"), int(time()), metadata, tuple(items), None)
        self._make_room()
        self._note_items(made.id, items)
        if not self._records.commit(CONVERSATIONS, made.id, made.to_bytes(), 1):
            raise OSError(f"there is a conversation {made.id} already")
        return made

    def get(self, id: str) -> StoredConversation | None:
        found = self._records.read(CONVERSATIONS, id)
        return None if found is None else StoredConversation.of(id, found.data)

    def change(self, id: str, metadata: dict[str, Any]) -> None:
        self._change(id, lambda there: replace(there, metadata=metadata))

    def append(
        self, id: str, items: Sequence[dict[str, Any]], *, response: str | None = None, after: int | None = None
    ) -> None:
        """Add items, unless they are of a `response` and their last one is there. It is the response that the
        conversation ends with, if it was made of the first `after` items."""

        def appended(there: StoredConversation) -> StoredConversation:
            if response is not None and any(item["id"] == items[-1]["id"] for item in there.items):
                return there
            last = response if len(there.items) == after else None
            return replace(there, items=(*there.items, *items), last=last)

        self._make_room()
        self._note_items(id, items)
        self._change(id, appended)

    def remove_item(self, id: str, item: str) -> bool:
        def without(there: StoredConversation) -> StoredConversation:
            return replace(there, items=tuple(one for one in there.items if one["id"] != item), last=None)

        before = self._change(id, without)
        return before is not None and any(one["id"] == item for one in before.items)

    def find_item(self, item: str) -> dict[str, Any] | None:
        """An item of any conversation."""
        holder = self._records.get_value(ITEMS, item)
        found = None if holder is None else self.get(holder.decode(errors="replace"))
        return None if found is None else next((one for one in found.items if one["id"] == item), None)

    def delete(self, id: str) -> bool:
        before = self._change(id, lambda there: None)
        if before is not None:
            self._records.remove_values(ITEMS, [item["id"] for item in before.items])
        return before is not None

    def _change(
        self, id: str, change: Callable[[StoredConversation], StoredConversation | None]
    ) -> StoredConversation | None:
        """Commit a change of a conversation as it is in the store; None deletes it. Returns what was there before."""
        for _ in range(ATTEMPTS):
            there = self._records.read(CONVERSATIONS, id)
            before = None if there is None else StoredConversation.of(id, there.data)
            if there is None or before is None or (after := change(before)) is before:
                return before
            data = b"" if after is None else after.to_bytes()
            if self._records.commit(CONVERSATIONS, id, data, there.generation + 1):
                return before
        raise OSError(f"the conversation {id} in the store changes all the time")

    def _note_items(self, id: str, items: Sequence[dict[str, Any]]) -> None:
        if items:
            self._records.put_values(ITEMS, {item["id"]: id.encode() for item in items})

    def _make_room(self) -> None:
        for old in self._records.excess(CONVERSATIONS, self._most):
            as_owner(old, self.delete)
