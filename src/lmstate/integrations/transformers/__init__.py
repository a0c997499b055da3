"""The inference state for models of transformers: a cache that rewinds, forks, is saved and is fast to grow.

Importing this registers the implementations "lmstate" of attention and of experts with transformers.
"""

from lmstate.integrations.transformers.version import check, installed

check(installed())

from lmstate.integrations.transformers.cache.snapshot import CacheSnapshot  # noqa: E402
from lmstate.integrations.transformers.cache.state_cache import StateCache  # noqa: E402
from lmstate.integrations.transformers.kernels import attention, experts  # noqa: E402
from lmstate.integrations.transformers.kernels.linear import use_native_linear, use_torch_linear  # noqa: E402

attention.register()
experts.register()

__all__ = ["CacheSnapshot", "StateCache", "use_native_linear", "use_torch_linear"]
