"""Responses that later ones may go on from: their items, and the very tokens that stand for their state.

One SQLite file, so that they survive a restart; the engine's prefix store finds the state of the tokens. The oldest in
use go when they take more bytes than allowed.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from time import time
from typing import Any

from lmstate.serve.answer.messages import Call, Message
from lmstate.serve.wire.database import Uses, open_database

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, used REAL, bytes INTEGER, model TEXT, body TEXT, input TEXT, messages TEXT, tokens BLOB,
    end INTEGER, key BLOB
);
CREATE INDEX IF NOT EXISTS responses_used ON responses (used);
CREATE TABLE IF NOT EXISTS items (id TEXT, response TEXT, item TEXT, PRIMARY KEY (response, id));
CREATE INDEX IF NOT EXISTS items_id ON items (id);
"""


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

    @property
    def ended(self) -> bool:
        """Whether it was answered: one in the background may be asked for before, and a kill ends it."""
        return self.body["status"] not in ("queued", "in_progress")


class ResponseStore:
    """Stored responses, at most `most` bytes of them, in `folder` or in memory. Thread-safe."""

    def __init__(self, folder: Path | None, most: int) -> None:
        self._most = most
        self._lock = Lock()
        self._uses = Uses("responses")
        self._connection = open_database(folder, "responses.sqlite", SCHEMA)

    def put(self, stored: StoredResponse) -> None:
        body, items = json.dumps(stored.body), json.dumps(stored.input)
        messages = json.dumps([asdict(message) for message in stored.messages])
        tokens = array("I", stored.tokens).tobytes()
        size = 2 * (len(body) + len(items)) + len(messages) + len(tokens)  # items are there once more, by their ids
        row = (stored.id, time(), size, stored.model, body, items, messages, tokens, stored.end, stored.key)
        with self._lock, self._connection as connection:
            self._uses.write(connection)
            connection.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            listed = [(item["id"], stored.id, json.dumps(item)) for item in (*stored.input, *stored.body["output"])]
            connection.executemany("INSERT OR REPLACE INTO items VALUES (?, ?, ?)", listed)
            (held,) = connection.execute("SELECT total(bytes) FROM responses").fetchone()
            for id, count in connection.execute("SELECT id, bytes FROM responses ORDER BY used").fetchall():
                if held <= self._most:
                    break
                self._delete(id)
                held -= count

    def get(self, id: str) -> StoredResponse | None:
        with self._lock:
            row = self._connection.execute(
                "SELECT model, body, input, messages, tokens, end, key FROM responses WHERE id = ?", (id,)
            ).fetchone()
            if row is None:
                return None
            self._uses.note(id)
        model, body, items, messages, tokens, end, key = row
        ids = array("I")
        ids.frombytes(tokens)
        return StoredResponse(
            id, model, json.loads(body), json.loads(items), tuple(map(_message, json.loads(messages))), ids, end, key
        )

    def find_item(self, id: str) -> dict[str, Any] | None:
        """An item of the input or output of any response."""
        with self._lock:
            row = self._connection.execute("SELECT item FROM items WHERE id = ?", (id,)).fetchone()
        return None if row is None else json.loads(row[0])

    def delete(self, id: str) -> bool:
        with self._lock, self._connection:
            return self._delete(id)

    def _delete(self, id: str) -> bool:
        self._connection.execute("DELETE FROM items WHERE response = ?", (id,))
        return self._connection.execute("DELETE FROM responses WHERE id = ?", (id,)).rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def _message(given: dict[str, Any]) -> Message:
    calls = tuple(Call(**call) for call in given.pop("calls"))
    return Message(**given, calls=calls)
