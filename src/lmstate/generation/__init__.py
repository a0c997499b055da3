"""Text from a model: sampling, stop strings and the one generation loop."""

from lmstate.generation.generate import Generation, Piece, Report, generate, stream
from lmstate.generation.sampling import Sampler

__all__ = ["Generation", "Piece", "Report", "Sampler", "generate", "stream"]
