"""Many requests on one model: continuous batching, reuse of prefixes, sessions."""

from lmstate.engine.engine import Engine
from lmstate.engine.request import Request
from lmstate.engine.results import (
    Completion,
    EngineClosed,
    EngineError,
    Piece,
    QueueFull,
    Reuse,
    SessionMoved,
    StoreUnreachable,
    Usage,
)
from lmstate.engine.session import Session, SessionBusy
from lmstate.generation import Grammar, TokenLogprob

__all__ = [
    "Completion",
    "Engine",
    "EngineClosed",
    "EngineError",
    "Grammar",
    "Piece",
    "QueueFull",
    "Request",
    "Reuse",
    "Session",
    "SessionBusy",
    "SessionMoved",
    "StoreUnreachable",
    "TokenLogprob",
    "Usage",
]
