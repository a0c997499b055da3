"""Deep copies of a cache: which tensors the copy shares, and which of the others torch refuses to copy."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from lmstate.integrations.transformers.cache.history import ForwardCall, InputHistory
from lmstate.integrations.transformers.cache.layers.base import RewindableLayer
from lmstate.integrations.transformers.cache.layers.growable import GrowableTensor
from lmstate.integrations.transformers.cache.rewind_log import Anchor, RewindLog


def shared(value: object) -> Iterator[Tensor]:
    """The tensors in here that a copy shares: those of layers of ours and of what is kept to go back.

    Only their owners write into them in place, and each asks its `Sharing` first.
    """
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, RewindableLayer | GrowableTensor | RewindLog | Anchor | InputHistory | ForwardCall):
        for part in vars(value).values():
            yield from shared(part)
    else:
        for part in _parts(value):
            yield from shared(part)


def computed(value: object) -> Iterator[Tensor]:
    """The tensors in layers of transformers' own that a gradient follows, which torch refuses to copy deeply."""
    if isinstance(value, Tensor):
        if not value.is_leaf:
            yield value
    elif isinstance(value, CacheLayerMixin | LinearAttentionCacheLayerMixin):
        if not isinstance(value, RewindableLayer):
            yield from computed(vars(value))
    else:
        for part in _parts(value):
            yield from computed(part)


def _parts(value: object) -> Iterator[object]:
    if isinstance(value, dict):
        yield from value.values()
    elif isinstance(value, list | tuple | deque):
        yield from value
