"""Open the tier that a store names."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from lmstate.engine.tiers.blob_records import BlobRecords
from lmstate.engine.tiers.blobs import Blobs, ObjectBlobs, RedisBlobs
from lmstate.engine.tiers.folder import RECORDS, FolderTier
from lmstate.engine.tiers.record_store import RecordStore
from lmstate.engine.tiers.seal import SealedBlobs, store_key
from lmstate.engine.tiers.shared import SharedTier
from lmstate.engine.tiers.sqlite_records import SqliteRecords
from lmstate.engine.tiers.tier import Tier

Store: TypeAlias = "str | os.PathLike[str] | Blobs | Callable[[str], Tier]"


def open_tier(store: Store, namespace: str, limit: int) -> Tier:
    """Open the tier that `Engine(store=...)` names: a folder, a `redis://` URL, or an object store's (`s3://`, ...).

    Also of `Blobs`, or by a function that makes a tier of a namespace. Raises ValueError for anything else, and for an
    empty name, which would be the folder that the process happens to be in.
    """
    if callable(store):
        if not isinstance(tier := store(namespace), Tier):
            raise ValueError(f"store={store!r:.80} returned {tier!r:.80}; it must return a Tier")
        return tier
    if isinstance(store, Blobs):
        return SharedTier(store, namespace)
    where, blobs = _opened(store)
    return FolderTier(where, namespace, limit) if blobs is None else SharedTier(blobs, namespace)


def open_records(store: str | os.PathLike[str]) -> RecordStore:
    """The records of a store, for callers that can wait, without the engines of its models. Raises as `open_tier`."""
    where, blobs = _opened(store)
    if blobs is None:
        return SqliteRecords(Path(where) / RECORDS, store_key())
    return BlobRecords(SealedBlobs(blobs, key) if (key := store_key()) else blobs)


def check_store(store: str | os.PathLike[str]) -> None:
    """Refuse a store that cannot be opened, before a model is loaded for nothing. Raises ValueError and OSError."""
    where, blobs = _opened(store)
    if blobs is not None:
        return
    folder = Path(where).absolute()
    there = next(path for path in (folder, *folder.parents) if path.exists())
    if not there.is_dir():
        raise OSError(f"{folder} cannot be made: {there} is a file")
    if not os.access(there, os.R_OK | os.W_OK | os.X_OK):
        raise OSError(f"{folder} cannot be used: this process may not read and write {there}")


def _opened(store: str | os.PathLike[str]) -> tuple[str, Blobs | None]:
    """(the store's name, its blobs if it is not a folder). Nothing is asked of it yet."""
    if not isinstance(store, str | os.PathLike) or not isinstance(where := os.fspath(store), str):
        raise ValueError(f"store={store!r:.80} was asked for; name a folder or a URL, or give Blobs or a Tier")
    if not where:
        raise ValueError("store='' was asked for; name a folder or a URL, or give None to keep nothing")
    scheme = where.partition("://")[0] if "://" in where else ""
    if scheme in ("redis", "rediss", "unix"):
        return where, RedisBlobs(where)
    if scheme:
        return where, ObjectBlobs(where)
    if os.path.exists(where) and not os.path.isdir(where):
        raise ValueError(f"store={where!r} was asked for, and is a file; name a folder, or a URL")
    return where, None
