"""Conversations of the responses protocol: items that requests go on from by the conversation's id, and add to."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from time import time
from typing import Any

from lmstate.serve.wire.database import Uses, open_database
from lmstate.serve.wire.ids import new_id

SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, created INTEGER, used REAL, metadata TEXT, last TEXT, bytes INTEGER
);
CREATE INDEX IF NOT EXISTS conversations_used ON conversations (used);
CREATE TABLE IF NOT EXISTS conversation_items (
    conversation TEXT, position INTEGER, id TEXT, item TEXT, PRIMARY KEY (conversation, position)
);
CREATE INDEX IF NOT EXISTS conversation_items_id ON conversation_items (id);
"""


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


class ResponseConversations:
    """At most `most` bytes of conversations, in `folder` or in memory; the oldest in use go first. Thread-safe."""

    def __init__(self, folder: Path | None, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._uses = Uses("conversations")
        self._connection = open_database(folder, "response_conversations.sqlite", SCHEMA)

    def create(self, metadata: dict[str, Any], items: Sequence[dict[str, Any]]) -> StoredConversation:
        made = StoredConversation(new_id("conv_"), int(time()), metadata, tuple(items), None)
        with self._lock, self._connection as connection:
            text = json.dumps(metadata)
            row = (made.id, made.created, time(), text, None, len(text))
            connection.execute("INSERT INTO conversations VALUES (?, ?, ?, ?, ?, ?)", row)
            self._append(made.id, items)
            self._shrink()
        return made

    def get(self, id: str) -> StoredConversation | None:
        with self._lock:
            row = self._connection.execute(
                "SELECT created, metadata, last FROM conversations WHERE id = ?", (id,)
            ).fetchone()
            if row is None:
                return None
            self._uses.note(id)
            found = self._connection.execute(
                "SELECT item FROM conversation_items WHERE conversation = ? ORDER BY position", (id,)
            ).fetchall()
        created, metadata, last = row
        return StoredConversation(id, created, json.loads(metadata), tuple(json.loads(item) for (item,) in found), last)

    def change(self, id: str, metadata: dict[str, Any]) -> None:
        with self._lock, self._connection as connection:
            connection.execute("UPDATE conversations SET metadata = ? WHERE id = ?", (json.dumps(metadata), id))

    def append(
        self, id: str, items: Sequence[dict[str, Any]], *, response: str | None = None, after: int | None = None
    ) -> None:
        """Add items, unless `response` has added them. It is the one that they end with, if it was made of the first
        `after` items."""
        with self._lock, self._connection as connection:
            row = connection.execute("SELECT last FROM conversations WHERE id = ?", (id,)).fetchone()
            if row is None or (response is not None and row[0] == response):
                return
            (count,) = connection.execute(
                "SELECT count(*) FROM conversation_items WHERE conversation = ?", (id,)
            ).fetchone()
            self._append(id, items)
            last = response if count == after else None
            connection.execute("UPDATE conversations SET last = ?, used = ? WHERE id = ?", (last, time(), id))
            self._shrink()

    def _append(self, id: str, items: Sequence[dict[str, Any]]) -> None:
        (end,) = self._connection.execute(
            "SELECT coalesce(max(position), -1) FROM conversation_items WHERE conversation = ?", (id,)
        ).fetchone()
        rows = [(id, end + 1 + number, item["id"], json.dumps(item)) for number, item in enumerate(items)]
        self._connection.executemany("INSERT INTO conversation_items VALUES (?, ?, ?, ?)", rows)
        size = sum(len(row[3]) for row in rows)
        self._connection.execute("UPDATE conversations SET bytes = bytes + ? WHERE id = ?", (size, id))

    def _shrink(self) -> None:
        (held,) = self._connection.execute("SELECT total(bytes) FROM conversations").fetchone()
        if held <= self._most:
            return
        self._uses.write(self._connection)
        for id, size in self._connection.execute("SELECT id, bytes FROM conversations ORDER BY used").fetchall():
            if held <= self._most:
                break
            self._delete(id)
            held -= size

    def remove_item(self, id: str, item: str) -> bool:
        with self._lock, self._connection as connection:
            removed = connection.execute(
                "DELETE FROM conversation_items WHERE conversation = ? AND id = ?", (id, item)
            ).rowcount
            connection.execute("UPDATE conversations SET last = NULL WHERE id = ?", (id,))
        return removed > 0

    def find_item(self, item: str) -> dict[str, Any] | None:
        """An item of any conversation."""
        with self._lock:
            row = self._connection.execute("SELECT item FROM conversation_items WHERE id = ?", (item,)).fetchone()
        return None if row is None else json.loads(row[0])

    def delete(self, id: str) -> bool:
        with self._lock, self._connection:
            return self._delete(id)

    def _delete(self, id: str) -> bool:
        self._connection.execute("DELETE FROM conversation_items WHERE conversation = ?", (id,))
        return self._connection.execute("DELETE FROM conversations WHERE id = ?", (id,)).rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._connection.close()
