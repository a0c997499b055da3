"""Storage policies for `model.new_state(kv=...)`: how keys and values are stored, and which are forgotten.

`Dense` and `Quantized` keep every token. `Recent`, `H2O`, `SnapKV` and `ExpectedAttention` keep a budget of them, in
any of these storages. `PerLayer` gives each layer its own. See docs/kv-policies.md for how to write one.
"""

from lmstate.state.kv import *  # noqa: F403
from lmstate.state.kv import __all__ as __all__
