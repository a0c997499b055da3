"""Conversations in one SQLite file, a row for each message, so that they survive reload and restart."""

from __future__ import annotations

import json
from pathlib import Path
from threading import Lock
from typing import Any

from lmstate.serve.conversations.tree import Conversation, MessageNode
from lmstate.serve.wire.database import open_database

SCHEMA = """
CREATE TABLE IF NOT EXISTS conversations (
    id TEXT PRIMARY KEY, model TEXT, title TEXT, updated REAL, settings TEXT
);
CREATE TABLE IF NOT EXISTS nodes (
    conversation TEXT, id TEXT, text TEXT, body TEXT, PRIMARY KEY (conversation, id)
);
"""


class ConversationStore:
    """Conversations of one model, in `folder` or in memory. Others are not seen: tokens mean nothing to another model.

    Thread-safe.
    """

    def __init__(self, folder: Path | None, model: str) -> None:
        self._model = model
        self._lock = Lock()
        self._connection = open_database(folder, "conversations.sqlite", SCHEMA)

    def list(self, search: str = "") -> list[dict[str, Any]]:
        """Id, title and time of those that have every word of `search` in the title or a message; latest first."""
        query = "SELECT id, title, updated FROM conversations AS c WHERE model = ?"
        values: list[Any] = [self._model]
        for word in search.split()[:8]:
            like = "%" + word.replace("\\", "\\\\").replace("%", "\\%").replace("_", "\\_") + "%"
            query += (
                " AND (title LIKE ? ESCAPE '\\' OR EXISTS"
                " (SELECT 1 FROM nodes WHERE conversation = c.id AND text LIKE ? ESCAPE '\\'))"
            )
            values += [like, like]
        with self._lock:
            rows = self._connection.execute(query + " ORDER BY updated DESC", values).fetchall()
        return [{"id": id, "title": title, "updated": updated} for id, title, updated in rows]

    def get(self, id: str) -> Conversation | None:
        with self._lock:
            row = self._connection.execute(
                "SELECT title, updated, settings FROM conversations WHERE id = ? AND model = ?", (id, self._model)
            ).fetchone()
            bodies = self._connection.execute(
                "SELECT body FROM nodes WHERE conversation = ? ORDER BY rowid", (id,)
            ).fetchall()
        if row is None:
            return None
        nodes = [MessageNode(**json.loads(body)) for (body,) in bodies]
        for node in nodes:
            if node.status == "running":  # the server ended before the answer did
                node.status = "stopped"
        return Conversation(id, row[0], row[1], json.loads(row[2]), {node.id: node for node in nodes})

    def put(self, conversation: Conversation, *nodes: MessageNode) -> None:
        """Write a conversation's own row and these of its messages."""
        settings = json.dumps(conversation.settings)
        head = (conversation.id, self._model, conversation.title, conversation.updated, settings)
        rows = [(conversation.id, node.id, node.text, json.dumps(node.to_dict())) for node in nodes]
        with self._lock, self._connection as connection:
            connection.execute(
                "INSERT INTO conversations VALUES (?, ?, ?, ?, ?) ON CONFLICT (id) DO UPDATE"
                " SET title = excluded.title, updated = excluded.updated, settings = excluded.settings",
                head,
            )
            connection.executemany(  # an update keeps the row's place: messages come back in the order they were made
                "INSERT INTO nodes VALUES (?, ?, ?, ?) ON CONFLICT (conversation, id) DO UPDATE"
                " SET text = excluded.text, body = excluded.body",
                rows,
            )

    def delete(self, id: str) -> None:
        with self._lock, self._connection as connection:
            connection.execute("DELETE FROM conversations WHERE id = ?", (id,))
            connection.execute("DELETE FROM nodes WHERE conversation = ?", (id,))

    def close(self) -> None:
        with self._lock:
            self._connection.close()
