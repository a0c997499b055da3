"""Pure functions on tensors: what a layer computes. Each has a reference in torch and, where it pays, faster bodies."""

from lmstate.ops.append import append
from lmstate.ops.attend import attend
from lmstate.ops.best import best
from lmstate.ops.dispatch import info
from lmstate.ops.expert_halves import Expert, ExpertsHalf
from lmstate.ops.feed_forward import feed_forward
from lmstate.ops.gated_norm import gated
from lmstate.ops.glu import ACTIVATIONS, activation, glu
from lmstate.ops.halves import AttentionHalf, FeedForwardHalf, Half
from lmstate.ops.linear import FEW, linear, linear_beside
from lmstate.ops.norm import Norm, norm
from lmstate.ops.recurrent_halves import ConvHalf, DeltaHalf, RecurrentHalf, SsdHalf
from lmstate.ops.residual import Residual
from lmstate.ops.rope import rope
from lmstate.ops.rotate_attend import Rotation, rotate_attend
from lmstate.ops.run import Chain, Coded, Rings, Run
from lmstate.ops.scoring import EVERYTHING, Scoring, Sight
from lmstate.ops.sigmoid import sigmoid
from lmstate.ops.squeezed import SqueezedWeight, squeeze
from lmstate.ops.weight import FloatWeight, Int4Weight, Int8Weight, Weight, quantize

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
    "append",
    "attend",
    "best",
    "feed_forward",
    "gated",
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
