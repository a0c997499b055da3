"""Tiers: where prefixes and sessions are kept in addition to memory."""

from lmstate.engine.tiers.open import open_tier
from lmstate.engine.tiers.tier import Entry, SavedSession, Tier, TierError

__all__ = ["Entry", "SavedSession", "Tier", "TierError", "open_tier"]
