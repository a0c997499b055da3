"""Responses that later ones may go on from: their items, and the very tokens that stand for their state.

One SQLite file, so that they survive a restart; the engine's prefix store finds the state of the tokens. The oldest in
use go when they take more bytes than allowed.
"""

from __future__ import annotations

import json
import sqlite3
from array import array
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from threading import Lock
from time import time
from typing import Any

from lmstate.serve.messages import Call, Message

SCHEMA = """
CREATE TABLE IF NOT EXISTS responses (
    id TEXT PRIMARY KEY, used REAL, bytes INTEGER, model TEXT, body TEXT, input TEXT, messages TEXT, tokens BLOB,
    end INTEGER, key BLOB
);
CREATE INDEX IF NOT EXISTS responses_used ON responses (used);
"""


@dataclass(frozen=True)
class Stored:
    """A response, and the conversation up to its end: `messages`, whose prompt and answer are `tokens`, then `end`."""

    id: str
    model: str  # fingerprint: tokens mean nothing to another model
    body: dict[str, Any]
    input: list[Any]
    messages: tuple[Message, ...]
    tokens: Sequence[int]
    end: int | None
    key: bytes  # of instructions, tools and what else the prompt depends on


class ResponseStore:
    """At most `most` bytes of responses, in `folder` or in memory. Thread-safe."""

    def __init__(self, folder: Path | None, most: int) -> None:
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        where = ":memory:" if folder is None else str(folder / "responses.sqlite")
        self._most = most
        self._lock = Lock()
        self._connection = sqlite3.connect(where, check_same_thread=False)
        with self._lock, self._connection as connection:
            if folder is not None:
                connection.execute("PRAGMA journal_mode=WAL")
            connection.executescript(SCHEMA)

    def put(self, stored: Stored) -> None:
        body, items = json.dumps(stored.body), json.dumps(stored.input)
        messages = json.dumps([asdict(message) for message in stored.messages])
        tokens = array("I", stored.tokens).tobytes()
        size = len(body) + len(items) + len(messages) + len(tokens)
        row = (stored.id, time(), size, stored.model, body, items, messages, tokens, stored.end, stored.key)
        with self._lock, self._connection as connection:
            connection.execute("INSERT OR REPLACE INTO responses VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?)", row)
            (held,) = connection.execute("SELECT total(bytes) FROM responses").fetchone()
            for id, count in connection.execute("SELECT id, bytes FROM responses ORDER BY used").fetchall():
                if held <= self._most:
                    break
                connection.execute("DELETE FROM responses WHERE id = ?", (id,))
                held -= count

    def get(self, id: str) -> Stored | None:
        with self._lock, self._connection as connection:
            row = connection.execute(
                "SELECT model, body, input, messages, tokens, end, key FROM responses WHERE id = ?", (id,)
            ).fetchone()
            if row is None:
                return None
            connection.execute("UPDATE responses SET used = ? WHERE id = ?", (time(), id))
        model, body, items, messages, tokens, end, key = row
        ids = array("I")
        ids.frombytes(tokens)
        return Stored(
            id, model, json.loads(body), json.loads(items), tuple(map(_message, json.loads(messages))), ids, end, key
        )

    def delete(self, id: str) -> bool:
        with self._lock, self._connection as connection:
            return connection.execute("DELETE FROM responses WHERE id = ?", (id,)).rowcount > 0

    def close(self) -> None:
        with self._lock:
            self._connection.close()


def _message(given: dict[str, Any]) -> Message:
    calls = tuple(Call(**call) for call in given.pop("calls"))
    return Message(**given, calls=calls)
