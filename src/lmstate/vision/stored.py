"""Messages with pictures as JSON: of sessions and of saved conversations."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any

from lmstate.vision.reader import KINDS


def to_json(value: object) -> Any:
    """The form of what JSON does not have, for `json.dumps(default=...)`: bytes of pictures, other values as text."""
    return {"base64": b64encode(value).decode()} if isinstance(value, bytes) else str(value)


def with_bytes(message: dict[str, Any]) -> dict[str, Any]:
    """A message that was written so, with the bytes of its pictures. Raises ValueError for damaged ones."""
    if not isinstance(parts := message.get("content"), list):
        return message
    pictured = [isinstance(part, dict) and part.get("type") in KINDS for part in parts]
    return {**message, "content": [_decoded(part) if so else part for part, so in zip(parts, pictured)]}


def _decoded(part: dict[str, Any]) -> dict[str, Any]:
    kind = part["type"]
    file = part.get(kind)
    if not isinstance(file, dict) or not isinstance(text := file.get("base64"), str):
        raise ValueError("pictures and sounds of stored messages are written in base64")
    return {**part, kind: b64decode(text, validate=True)}
