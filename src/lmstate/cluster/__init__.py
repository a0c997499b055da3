"""Many engines behind one front: requests go where the state that they go on from is.

with lmstate.cluster.deploy("smollm2", 2, "redis://localhost", port=8080) as cluster:
    print(cluster.url, cluster.status())
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmstate.cluster.application import app
    from lmstate.cluster.cluster import Cluster
    from lmstate.cluster.on_ray import deploy

__all__ = ["Cluster", "app", "deploy"]

# Placement needs no engine: the rest is imported when it is first asked for.
_LAZY = {
    "Cluster": "lmstate.cluster.cluster",
    "app": "lmstate.cluster.application",
    "deploy": "lmstate.cluster.on_ray",
}


def __getattr__(name: str) -> object:
    if name not in _LAZY:
        raise AttributeError(f"module 'lmstate.cluster' has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_LAZY[name]), name)
    return value
