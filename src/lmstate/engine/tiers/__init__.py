"""Where prefixes and sessions are kept beside memory."""

from lmstate.engine.tiers.tier import Entry, SavedSession, Tier, TierError, open_tier

__all__ = ["Entry", "SavedSession", "Tier", "TierError", "open_tier"]
