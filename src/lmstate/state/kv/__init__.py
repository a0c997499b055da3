"""Storage policies: how an attention layer stores keys and values, and which of them it forgets."""

from lmstate.state.kv.policies.base import Budget, Evicting, Slots
from lmstate.state.kv.policies.expected import ExpectedAttention
from lmstate.state.kv.policies.h2o import H2O
from lmstate.state.kv.policies.per_layer import PerLayer, pyramid
from lmstate.state.kv.policies.recent import Recent
from lmstate.state.kv.policies.snapkv import SnapKV
from lmstate.state.kv.policies.storage import Dense, Quantized, Storage
from lmstate.state.layers.base import Policy

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
