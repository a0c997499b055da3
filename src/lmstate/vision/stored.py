"""Messages with pictures as JSON: of sessions and of saved conversations."""

from __future__ import annotations

from base64 import b64decode, b64encode
from typing import Any


def to_json(value: object) -> Any:
    """The form of what JSON does not have, for `json.dumps(default=...)`: bytes of pictures, other values as text."""
    return {"base64": b64encode(value).decode()} if isinstance(value, bytes) else str(value)


def with_bytes(message: dict[str, Any]) -> dict[str, Any]:
    """A message that was written so, with the bytes of its pictures. Raises ValueError for damaged ones."""
    if not isinstance(parts := message.get("content"), list):
        return message
    pictured = [isinstance(part, dict) and part.get("type") == "image" for part in parts]
    return {**message, "content": [_decoded(part) if so else part for part, so in zip(parts, pictured)]}


def _decoded(part: dict[str, Any]) -> dict[str, Any]:
    image = part.get("image")
    if not isinstance(image, dict) or not isinstance(text := image.get("base64"), str):
        raise ValueError("pictures of stored messages are written in base64")
    return {**part, "image": b64decode(text, validate=True)}
