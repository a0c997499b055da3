"""Many requests on one model: continuous batching, reuse of prefixes, sessions."""

from lmstate.engine.engine import Engine
from lmstate.engine.options import Grammar
from lmstate.engine.request import Request
from lmstate.engine.results import Completion, EngineClosed, Piece, QueueFull, Reuse, TokenLogprob, Usage
from lmstate.engine.session import Session, SessionBusy

__all__ = [
    "Completion",
    "Engine",
    "EngineClosed",
    "Grammar",
    "Piece",
    "QueueFull",
    "Request",
    "Reuse",
    "Session",
    "SessionBusy",
    "TokenLogprob",
    "Usage",
]
