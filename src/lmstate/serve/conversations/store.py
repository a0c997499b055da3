"""The page's conversations as records: of the engine's store, so that each of its servers has them, or of a file.

A record is a conversation with its messages, without their tokens. The tokens of a message are a value, which changes
while an answer is written; one that is lost costs computing, not a message. A picture is a value too, under the SHA-256
of its file: messages name it, and branches share it. One that is lost leaves its messages, which cannot be answered.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from time import time
from typing import Any

from msgspec import convert

from lmstate.engine.tiers.record_store import StoredRecord, joined, parted
from lmstate.serve.conversations.tree import Conversation, MessageNode
from lmstate.serve.wire.owned_records import ATTEMPTS, STORE_ERRORS, OwnedRecords
from lmstate.vision.reader import name_of

ALIVE_SECONDS = 10.0  # after which an answer that another server writes, and was not stored again, counts as stopped
STILL_SECONDS = 3.0  # between two times that an answer is stored while it is written, at most


@dataclass(frozen=True)
class PageRecord:
    """The data of a record. Messages come after those that they answer."""

    title: str
    updated: float
    settings: dict[str, Any]
    nodes: list[MessageNode]


@dataclass(frozen=True)
class StoredMessage:
    """The data of a value."""

    node: MessageNode
    stored_at: float


class ConversationMoved(Exception):
    """Another server deleted a conversation, or began a message of it once more: nothing was stored."""


class ConversationStore:
    """Conversations of the caller and of one model: tokens mean nothing to another model. Thread-safe."""

    def __init__(self, records: OwnedRecords, model: str) -> None:
        self._records = records
        self._kind, self._values = f"page conversations of {model}", f"page messages of {model}"
        self._pictures = f"page pictures of {model}"
        self._told: dict[str, tuple[int, str, float]] = {}  # (generation, title, updated), by ids

    def list(self, search: str = "") -> list[dict[str, Any]]:
        """Id, title and time of those that have every word of `search` in the title or a message; latest first."""
        words = [word.casefold() for word in search.split()[:8]]
        found = []
        for id in self._records.names(self._kind):
            if not words and id in self._told and self._told[id][0] == self.generation(id):
                found.append((id, *self._told[id][1:]))
            elif (one := _opened(id, self._records.read(self._kind, id))) is not None:
                self._told[id] = one.generation, one.title, one.updated
                texts = [one.title.casefold(), *(node.text.casefold() for node in one.nodes.values())]
                if all(any(word in text for text in texts) for word in words):
                    found.append((id, one.title, one.updated))
        found.sort(key=lambda one: one[2], reverse=True)
        return [{"id": id, "title": title, "updated": updated} for id, title, updated in found]

    def generation(self, id: str) -> int:
        """The generation of a conversation's record; 0 if there is none."""
        return self._records.read_generation(self._kind, id) or 0

    def get(self, id: str, known: Conversation | None = None) -> Conversation | None:
        """A conversation; of one that is `known`, the messages that changed are read."""
        found = _opened(id, self._records.read(self._kind, id))
        if found is None:
            return None
        mine, lost = {} if known is None else known.nodes, set[str]()
        for node in found.nodes.values():
            if (same := mine.get(node.id)) is not None and same.is_like(node):
                found.nodes[node.id] = same
                continue
            whole = self._whole(id, node)
            above = found.answer_before(node)
            if whole is None or (whole.base and above is not None and above.id in lost):
                lost.add(node.id)
                status = "stopped" if node.status == "running" else node.status
                whole = replace(node, status=status, base=0, start=0, added=[], end=None)
            found.nodes[node.id] = whole
        return found

    def put(
        self,
        conversation: Conversation,
        *nodes: MessageNode,
        title: str | None = None,
        settings: Any = None,
        pictures: Mapping[str, bytes] | None = None,
    ) -> int:
        """Store these messages, the title and the settings, and keep all others. Returns the record's generation.

        `pictures`: those of the messages that are new to the conversation, by their names. Raises `ConversationMoved`.
        """
        id = conversation.id
        new = {_picture(id, name): content for name, content in (pictures or {}).items()}
        if new:
            self._records.put_values(self._pictures, new)
        self.put_messages(id, *nodes)
        try:
            return self._commit(conversation, nodes, title, settings)
        except ConversationMoved:  # only a conversation that was deleted refuses a message that is new, with pictures
            self._remove(self._values, {_name(id, node) for node in nodes})
            self._remove(self._pictures, set(new))
            raise

    def picture(self, id: str, name: str) -> bytes | None:
        """The file of a picture; None if it is lost, or is another file than its name says."""
        content = self._records.get_value(self._pictures, _picture(id, name))
        return None if content is None or name_of(content) != name else content

    def _commit(
        self, conversation: Conversation, nodes: Sequence[MessageNode], title: str | None, settings: Any
    ) -> int:
        id = conversation.id
        for _ in range(ATTEMPTS):
            there = self._records.read(self._kind, id)
            before = _opened(id, there)
            if before is None:
                if conversation.generation or there is not None:
                    raise ConversationMoved
                before = replace(conversation, nodes={})
            after = replace(
                before,
                title=before.title if title is None else title,
                settings=before.settings if settings is None else settings,
                updated=max(before.updated, conversation.updated),
                nodes=dict(before.nodes),
            )
            for node in nodes:
                if (old := before.nodes.get(node.id)) is not None and not node.follows(old):
                    raise ConversationMoved
                after.nodes[node.id] = node.without_tokens()
            generation = before.generation + 1
            if self._records.commit(self._kind, id, _data(after), generation):
                replaced = [before.nodes[node.id] for node in nodes if node.id in before.nodes]
                names = {_name(id, node) for node in nodes}
                self._remove(self._values, {_name(id, old) for old in replaced} - names)
                return generation
        raise OSError(f"the conversation {id} in the store changes all the time")

    def put_messages(self, id: str, *nodes: MessageNode) -> None:
        """Store the tokens of messages that a record has, or gets."""
        values = {
            _name(id, node): json.dumps({"stored_at": time(), "node": node.to_dict()}).encode()
            for node in nodes
            if node.role == "assistant"
        }
        if values:
            self._records.put_values(self._values, values)

    def delete(self, id: str) -> None:
        for _ in range(ATTEMPTS):
            there = self._records.read(self._kind, id)
            if there is None or there.deleted:
                return
            if self._records.commit(self._kind, id, b"", there.generation + 1):
                found = _opened(id, there)
                nodes = [] if found is None else [*found.nodes.values()]
                self._remove(self._values, {_name(id, node) for node in nodes})
                self._remove(self._pictures, {_picture(id, name) for node in nodes for name in node.pictures})
                self._told.pop(id, None)
                return
        raise OSError(f"the conversation {id} in the store changes all the time")

    def _remove(self, kind: str, names: set[str]) -> None:
        """Remove values that no record has any more; values that stay behind if that fails do no harm."""
        if names:
            with suppress(*STORE_ERRORS):
                self._records.remove_values(kind, names)

    def _whole(self, id: str, node: MessageNode) -> MessageNode | None:
        """A message of a record with its tokens; None if they are lost. One that no server writes any more stopped."""
        if node.role != "assistant":
            return node
        try:
            data = self._records.get_value(self._values, _name(id, node))
            stored = convert(json.loads(data or b""), StoredMessage)
        except (ValueError, RecursionError):
            return None
        if node.status != "running" and (stored.node.status, stored.node.text) != (node.status, node.text):
            return None  # an older one was stored again
        found = replace(stored.node, id=node.id, parent=node.parent, turn=node.turn, writer=node.writer)
        alive = self._records.shared and abs(time() - stored.stored_at) < ALIVE_SECONDS
        return replace(found, status="stopped") if found.status == "running" and not alive else found


def _name(id: str, node: MessageNode) -> str:
    """The name of a message's value: another one each time that it is begun."""
    return f"{id}.{node.id}.{node.turn}.{node.writer}"


def _picture(id: str, name: str) -> str:
    """The name of a picture's value: conversations share none, so that each can be deleted."""
    return f"{id}.{name}"


def _data(conversation: Conversation) -> bytes:
    nodes = [node.without_tokens().to_dict() for node in conversation.nodes.values()]
    told = {"title": conversation.title, "updated": conversation.updated, "settings": conversation.settings}
    return joined({**told, "nodes": nodes})


def _opened(id: str, there: StoredRecord | None) -> Conversation | None:
    """The conversation of a record, without tokens; None if it was deleted, or is something else."""
    if there is None or not there.data:
        return None
    try:
        told = convert(parted(there.data)[0], PageRecord)
    except (ValueError, RecursionError):
        return None
    nodes: dict[str, MessageNode] = {}
    for node in told.nodes:
        if node.parent is None or node.parent in nodes:
            nodes[node.id] = node
    return Conversation(id, told.title, told.updated, told.settings, nodes, there.generation)
