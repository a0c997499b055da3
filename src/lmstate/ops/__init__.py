"""Pure functions on tensors: the computations of layers. Each has a reference in torch and, if it pays, faster bodies.

Conventions. Shapes: R rows, T new tokens, H heads, D their width, S slots. Steps are ragged: `counts` int64 `[R]` says
how many of a row's T tokens are real; those after them are padding, whose content is never read, which leaves carries
and stored keys alone, and whose outputs are finite. A carry is float32, returned as a new tensor and not
written; with a float64 one all is computed in float64, which is how references check gradients and the native bodies.
`lmstate.ops.cpu` checks shapes, dtypes and layouts before it calls C, which trusts its pointers.
"""

from lmstate.ops import fork as _fork  # noqa: F401 - registers what a forked child does
from lmstate.ops.attention.attend import attend, rotate_attend
from lmstate.ops.attention.attend_whole import as_heads, as_tokens, attend_whole
from lmstate.ops.attention.kv_store import append
from lmstate.ops.attention.rope import rope
from lmstate.ops.dense.activations import ACTIVATIONS, activation, glu, in_double, sigmoid
from lmstate.ops.dense.argmax import argmax
from lmstate.ops.dense.linear import linear, linear_split_concat
from lmstate.ops.dense.norm import add_residual, norm
from lmstate.ops.dense.sample import candidates, sample
from lmstate.ops.dispatch import info
from lmstate.ops.fused.choose_experts import choose_experts
from lmstate.ops.fused.experts import RoutedExperts
from lmstate.ops.fused.graph import CapturedGraph, Fusable, FusedGraph, last_tokens, packable
from lmstate.ops.fused.mlp import feed_forward
from lmstate.ops.recurrent.gated_norm import gated
from lmstate.ops.types.params import (
    FULL_CAUSAL,
    AttentionParams,
    CausalMask,
    KVView,
    Norm,
    QuantizedKV,
    Residual,
    RopeTables,
)
from lmstate.ops.types.sublayers import (
    AttentionSublayer,
    Expert,
    GatedDeltaSublayer,
    Mamba2Sublayer,
    MLPSublayer,
    MoESublayer,
    RecurrentSublayer,
    RouterParams,
    ScanStart,
    ShortConvSublayer,
    Sublayer,
    Unscanned,
)
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.bfloat12 import Bfloat12Weight, to_bfloat12
from lmstate.ops.weights.grouped import FloatWeight, Int4Weight, Int8Weight, quantize

__all__ = [
    "ACTIVATIONS",
    "FULL_CAUSAL",
    "AttentionParams",
    "AttentionSublayer",
    "Bfloat12Weight",
    "CapturedGraph",
    "CausalMask",
    "Expert",
    "FloatWeight",
    "Fusable",
    "FusedGraph",
    "GatedDeltaSublayer",
    "Int4Weight",
    "Int8Weight",
    "KVView",
    "MLPSublayer",
    "Mamba2Sublayer",
    "MoESublayer",
    "Norm",
    "QuantizedKV",
    "RecurrentSublayer",
    "Residual",
    "RopeTables",
    "RoutedExperts",
    "RouterParams",
    "ScanStart",
    "ShortConvSublayer",
    "Sublayer",
    "Unscanned",
    "Weight",
    "activation",
    "add_residual",
    "append",
    "argmax",
    "as_heads",
    "as_tokens",
    "attend",
    "attend_whole",
    "candidates",
    "choose_experts",
    "feed_forward",
    "gated",
    "glu",
    "in_double",
    "info",
    "last_tokens",
    "linear",
    "linear_split_concat",
    "norm",
    "packable",
    "quantize",
    "rope",
    "rotate_attend",
    "sample",
    "sigmoid",
    "to_bfloat12",
]
