"""Storage policies: how an attention layer stores keys and values, and which of them it forgets."""

from lmstate.state.kv.expected import ExpectedAttention
from lmstate.state.kv.h2o import H2O
from lmstate.state.kv.per_layer import PerLayer, pyramid
from lmstate.state.kv.policy import Budget, Evicting, Slots
from lmstate.state.kv.recent import Recent
from lmstate.state.kv.snapkv import SnapKV
from lmstate.state.kv.storage import Dense, Policy, Quantized, Storage

__all__ = [
    "H2O",
    "Budget",
    "Dense",
    "Evicting",
    "ExpectedAttention",
    "PerLayer",
    "Policy",
    "Quantized",
    "Recent",
    "Slots",
    "SnapKV",
    "Storage",
    "pyramid",
]
