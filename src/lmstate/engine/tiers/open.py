"""Open the tier that a store names."""

from __future__ import annotations

import os

from lmstate.engine.tiers.folder import FolderTier
from lmstate.engine.tiers.shared import ObjectBlobs, RedisBlobs, SharedTier
from lmstate.engine.tiers.tier import Tier


def open_tier(store: str | os.PathLike[str], namespace: str, limit: int) -> Tier:
    """The tier that `Engine(store=...)` names: a folder, a `redis://` URL, or an object store's (`s3://`, ...).

    Raises ValueError for what names none, and for an empty name, which would be the folder that the process happens to
    be in.
    """
    if not isinstance(store, str | os.PathLike) or not isinstance(where := os.fspath(store), str):
        raise ValueError(f"store={store!r:.80} was asked for; name a folder or a URL")
    if not where:
        raise ValueError("store='' was asked for; name a folder or a URL, or give None to keep nothing")
    scheme = where.partition("://")[0] if "://" in where else ""
    if scheme in ("redis", "rediss", "unix"):
        return SharedTier(RedisBlobs(where), namespace)
    if scheme:
        return SharedTier(ObjectBlobs(where), namespace)
    if os.path.exists(where) and not os.path.isdir(where):
        raise ValueError(f"store={where!r} was asked for, and is a file; name a folder, or a URL")
    return FolderTier(where, namespace, limit)
