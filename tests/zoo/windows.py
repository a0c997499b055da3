"""Families of this kind, see `tests.zoo`."""

from __future__ import annotations

from typing import Any

CASES: dict[str, Any] = {}
