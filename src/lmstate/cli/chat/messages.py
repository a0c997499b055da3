"""Messages of a conversation, as templates take them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from lmstate.state import Snapshot
from lmstate.vision.reader import KINDS, file_part
from lmstate.vision.stored import to_json, with_bytes

Message = dict[str, Any]
"""`role`, and `content`: a text, or parts of text, pictures and sounds (`{"type": "image", "image": bytes}`)."""
ROLES = ("system", "user", "assistant")
SHOWN = {"image": "[picture]", "audio": "[sound]"}


def question_of(text: str, files: Sequence[bytes]) -> Message:
    """A message of the user: its pictures and sounds, and the text after them."""
    if not files:
        return {"role": "user", "content": text}
    parts = list(map(file_part, files))
    return {"role": "user", "content": [*parts, {"type": "text", "text": text}] if text else parts}


def shown(message: Message) -> str:
    """The text of a message as a terminal shows it."""
    if isinstance(content := message["content"], str):
        return content
    return " ".join(SHOWN.get(part["type"]) or part["text"] for part in content)


def asked(message: Message) -> str:
    """The text of a message without its pictures and sounds."""
    if isinstance(content := message["content"], str):
        return content
    return " ".join(part["text"] for part in content if part["type"] == "text")


def is_message(value: Any) -> bool:
    """Whether this is a message, as files may have it."""
    if not isinstance(value, dict) or set(value) != {"role", "content"} or value["role"] not in ROLES:
        return False
    if isinstance(content := value["content"], list):
        return all(isinstance(part, dict) and _is_part(part) for part in content)
    return isinstance(content, str)


def _is_part(part: dict[str, Any]) -> bool:
    if (kind := part.get("type")) in KINDS:
        return set(part) == {"type", kind} and isinstance(part[kind], bytes)
    return set(part) == {"type", "text"} and part["type"] == "text" and isinstance(part["text"], str)


def with_messages(snapshot: Snapshot, messages: list[Message]) -> Snapshot:
    """The snapshot with a conversation's messages in its notes, where `messages_of` and `Engine.load_session` find
    them."""
    record = {"messages": messages, "turns": [], "marks": []}  # as `lmstate.engine.session_record` writes it
    return dataclasses.replace(snapshot, notes=json.dumps(record, default=to_json))


def messages_of(snapshot: Snapshot) -> list[Message] | None:
    """The messages in a snapshot's notes; None if it is of no conversation."""
    try:
        messages = list(map(with_bytes, json.loads(snapshot.notes)["messages"]))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return None
    return messages if all(map(is_message, messages)) else None
