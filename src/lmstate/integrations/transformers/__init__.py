"""The inference state for models of transformers: a cache that rewinds, forks, is saved and is fast to grow.

Importing this registers the attention implementation "lmstate" with transformers.
"""

from lmstate.integrations.transformers.version import check, installed

check(installed())

from lmstate.integrations.transformers.attention import register  # noqa: E402
from lmstate.integrations.transformers.cache import StateCache  # noqa: E402
from lmstate.integrations.transformers.linear import use_native_linear, use_torch_linear  # noqa: E402
from lmstate.integrations.transformers.snapshot import CacheSnapshot  # noqa: E402

register()

__all__ = ["CacheSnapshot", "StateCache", "use_native_linear", "use_torch_linear"]
