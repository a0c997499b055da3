"""Text from a model: sampling, stop strings and the one generation loop."""

from lmstate.generation.beams import BeamParams, BeamSearch
from lmstate.generation.generate import Generation, generate, stream
from lmstate.generation.grammar import Grammar
from lmstate.generation.logprobs import TokenLogprob
from lmstate.generation.params import SamplingParams
from lmstate.generation.report import Report, RowPiece
from lmstate.generation.sampling import Sampler
from lmstate.generation.transcript import Segment, Transcript, TranscriptOptions

__all__ = [
    "BeamParams",
    "BeamSearch",
    "Generation",
    "Grammar",
    "Report",
    "RowPiece",
    "Sampler",
    "SamplingParams",
    "Segment",
    "TokenLogprob",
    "Transcript",
    "TranscriptOptions",
    "generate",
    "stream",
]
