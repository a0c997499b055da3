"""Tiers: where prefixes and sessions are kept in addition to memory. docs/storage-tiers.md says how to write one."""

from lmstate.engine.tiers.blobs import Blobs
from lmstate.engine.tiers.folder import FolderTier
from lmstate.engine.tiers.open import Store, check_store, open_records, open_tier
from lmstate.engine.tiers.record_store import RecordStore
from lmstate.engine.tiers.records import SavedSession
from lmstate.engine.tiers.shared import SharedTier
from lmstate.engine.tiers.sqlite_records import SqliteRecords
from lmstate.engine.tiers.tier import Entry, Tier, TierError, from_bytes, to_bytes

__all__ = [
    "Blobs",
    "Entry",
    "FolderTier",
    "RecordStore",
    "SavedSession",
    "SharedTier",
    "SqliteRecords",
    "Store",
    "Tier",
    "TierError",
    "check_store",
    "from_bytes",
    "open_records",
    "open_tier",
    "to_bytes",
]
