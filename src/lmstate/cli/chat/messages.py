"""Messages of a conversation, and what two sequences have in common."""

from __future__ import annotations

from collections.abc import Sequence

Message = dict[str, str]
ROLES = ("system", "user", "assistant")


def common_prefix(a: Sequence[object], b: Sequence[object]) -> int:
    """The number of tokens, or messages, with which two sequences begin alike."""
    return next((n for n, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))
