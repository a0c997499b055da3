"""Tiers: where prefixes and sessions are kept in addition to memory."""

from lmstate.engine.tiers.open import check_store, open_records, open_tier
from lmstate.engine.tiers.record_store import RecordStore
from lmstate.engine.tiers.records import SavedSession
from lmstate.engine.tiers.tier import Entry, Tier, TierError

__all__ = ["Entry", "RecordStore", "SavedSession", "Tier", "TierError", "check_store", "open_records", "open_tier"]
