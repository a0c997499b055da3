"""Many requests on one model: continuous batching, reuse of prefixes, sessions."""

from lmstate.engine.engine import Engine
from lmstate.engine.request import Request
from lmstate.engine.results import (
    Completion,
    Drained,
    EngineClosed,
    EngineError,
    Load,
    Piece,
    QueueFull,
    Reuse,
    SessionMoved,
    StoreUnreachable,
    Usage,
)
from lmstate.engine.session import Session, SessionBusy
from lmstate.engine.tiers import Blobs, Tier
from lmstate.generation import Grammar, TokenLogprob

__all__ = [
    "Blobs",
    "Completion",
    "Drained",
    "Engine",
    "EngineClosed",
    "EngineError",
    "Grammar",
    "Load",
    "Piece",
    "QueueFull",
    "Request",
    "Reuse",
    "Session",
    "SessionBusy",
    "SessionMoved",
    "StoreUnreachable",
    "Tier",
    "TokenLogprob",
    "Usage",
]
