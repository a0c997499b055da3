"""Pure functions on tensors: what a layer computes. Each has a reference in torch and, where it pays, faster bodies."""

from lmstate.ops.attention.attend import attend, rotate_attend
from lmstate.ops.attention.kv_store import append
from lmstate.ops.attention.rope import rope
from lmstate.ops.dense.activations import ACTIVATIONS, activation, glu, sigmoid
from lmstate.ops.dense.argmax import best
from lmstate.ops.dense.linear import FEW, linear, linear_beside
from lmstate.ops.dense.mlp import feed_forward
from lmstate.ops.dense.norm import add_residual, norm
from lmstate.ops.dispatch import info
from lmstate.ops.fused.graph import Chain, Run
from lmstate.ops.types.moe_sublayer import Expert, ExpertsHalf
from lmstate.ops.types.params import EVERYTHING, Coded, Norm, Residual, Rings, Rotation, Scoring, Sight
from lmstate.ops.types.recurrent_sublayers import ConvHalf, DeltaHalf, RecurrentHalf, SsdHalf
from lmstate.ops.types.sublayers import AttentionHalf, FeedForwardHalf, Half
from lmstate.ops.types.weight import Weight
from lmstate.ops.weights.bfloat12 import SqueezedWeight, squeeze
from lmstate.ops.weights.grouped import FloatWeight, Int4Weight, Int8Weight, quantize

__all__ = [
    "ACTIVATIONS",
    "EVERYTHING",
    "FEW",
    "AttentionHalf",
    "Chain",
    "Coded",
    "ConvHalf",
    "DeltaHalf",
    "Expert",
    "ExpertsHalf",
    "FeedForwardHalf",
    "FloatWeight",
    "Half",
    "Int4Weight",
    "Int8Weight",
    "Norm",
    "RecurrentHalf",
    "Residual",
    "Rings",
    "Rotation",
    "Run",
    "Scoring",
    "Sight",
    "SqueezedWeight",
    "SsdHalf",
    "Weight",
    "activation",
    "add_residual",
    "append",
    "attend",
    "best",
    "feed_forward",
    "glu",
    "info",
    "linear",
    "linear_beside",
    "norm",
    "quantize",
    "rope",
    "rotate_attend",
    "sigmoid",
    "squeeze",
]
