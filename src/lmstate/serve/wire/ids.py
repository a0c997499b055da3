"""Identifiers of answers, calls and conversations."""

from __future__ import annotations

import secrets
import string

ALPHABET = string.ascii_letters + string.digits


def new_id(prefix: str, length: int = 24) -> str:
    """An identifier that cannot be guessed: `prefix` and `length` letters and digits."""
    return prefix + "".join(ALPHABET[byte % len(ALPHABET)] for byte in secrets.token_bytes(length))
