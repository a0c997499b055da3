"""Messages of a conversation."""

from __future__ import annotations

Message = dict[str, str]
ROLES = ("system", "user", "assistant")
