"""The prefix store: what was computed, found again by its tokens."""

from lmstate.engine.prefix.store import Match, PrefixStore

__all__ = ["Match", "PrefixStore"]
