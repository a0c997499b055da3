"""Text from a model: sampling, stop strings and the one generation loop."""

from .generate import Generation, Piece, Report
from .sampling import Sampler

__all__ = ["Generation", "Piece", "Report", "Sampler"]
