"""Values that an engine hands out: pieces of text, completions, and where their prompt's tokens came from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from lmstate.generation.logprobs import TokenLogprob
from lmstate.generation.row import Finish


class EngineError(RuntimeError):
    """An engine cannot do what was asked, for a reason outside the request. Nothing was changed."""


class QueueFull(EngineError):
    """As many requests wait as the engine was told to hold."""


class EngineClosed(EngineError):
    """The engine was closed: it takes no more requests."""


class NoReplica(EngineClosed):
    """Of the replicas behind a front none takes requests now."""

    def __init__(self) -> None:
        super().__init__("no replica takes requests now: all are lost or are being drained; try again in a moment")


class Drained(EngineError):
    """The engine was drained before the request ended. `submit(..., answered=)` goes on with it elsewhere."""

    def __init__(self, answered: list[list[int]], seed: int) -> None:
        super().__init__("the engine was drained before the request ended: go on elsewhere with what was answered")
        self.answered = answered  # the tokens of each answer that were sent
        self.seed = seed  # of its random numbers, given or not


class StoreUnreachable(EngineError):
    """The store did not answer, so that it is unknown what it has. Try again."""


class SessionMoved(EngineError):
    """Another process committed a change of this session first."""

    def __init__(self, message: str, generation: int) -> None:
        super().__init__(message)
        self.generation = generation  # of the record that is in the store


@dataclass(frozen=True)
class Load:
    """The work that an engine has now, and the room that is left."""

    waiting: int  # requests that are not begun
    reading: int  # whose prompts are read
    answering: int  # whose answers are made
    unread: int  # tokens of prompts that are to be read yet, at most: of waiting ones it is not known what is reused
    free_tokens: int  # that rows have room for beside those that there are; what is kept for reuse gives way
    first_token: float | None  # estimated seconds until a prompt that comes now is begun; None: nothing was measured


@dataclass(frozen=True)
class ReplicaStatus:
    """An engine of a server, as it is now."""

    rank: int
    id: str  # of its process: another one after a restart
    pid: int
    takes: bool  # requests
    sessions: int  # that were last answered there, as far as is known
    hit_rate: float | None  # part of the tokens of all prompts that was reused; None: there were none
    load: Load


def hit_rate(stats: Mapping[str, float]) -> float | None:
    """The part of the tokens of all prompts that an engine with these counters reused; None without prompts."""
    return stats["reused_tokens"] / stats["prompt_tokens"] if stats["prompt_tokens"] else None


class Piece(str):
    """Text that one answer grew by; empty while a character or a possible stop string is unfinished."""

    __slots__ = ("certain", "finished", "index", "logprobs", "start", "tokens")

    index: int  # type: ignore[assignment]  # which of the n answers
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    finished: Finish | None  # why the answer ends with this piece
    start: int  # tokens of the answer before `tokens`
    certain: int | None  # as many of the answer's tokens so far begin in its text, before a stop string; None: all

    def __new__(
        cls,
        text: str,
        index: int = 0,
        tokens: list[int] | None = None,
        logprobs: list[TokenLogprob] | None = None,
        finished: Finish | None = None,
        certain: int | None = None,
        start: int = 0,
    ) -> Piece:
        piece = super().__new__(cls, text)
        piece.index, piece.tokens, piece.logprobs, piece.finished = index, tokens or [], logprobs, finished
        piece.certain, piece.start = certain, start
        return piece

    @property
    def text(self) -> str:
        return str(self)


@dataclass(frozen=True)
class Reuse:
    """Reused tokens of a prompt, and why not more."""

    reused: int  # tokens that were not computed again
    computed: int  # tokens of the prompt that were, or have to be
    tier: str | None = None  # where the reused ones came from: "memory", or the name of a store
    matched: int = 0  # tokens that agree with something stored; more than `reused` where a layer cannot go back there
    differs_at: int | None = None  # position of the first token that agrees with nothing stored
    differs: str = ""  # that token as text
    forced_by: str | None = None  # the layer kind that made `reused` less than `matched`


@dataclass(frozen=True)
class Usage:
    """Cost of a request: tokens and seconds."""

    prompt: int
    reused: int
    generated: int
    drafted: int = 0
    accepted: int = 0
    pictures: float = 0.0  # seconds of the tower, before it was queued
    queued: float = 0.0  # seconds until its first chunk
    prefill: float = 0.0  # from there to the first token
    decode: float = 0.0  # from there to the end
    reuse: Reuse = field(default_factory=lambda: Reuse(0, 0))


@dataclass(frozen=True)
class Completion:
    """Outcome of a request; lists have one entry an answer."""

    texts: list[str]
    tokens: list[list[int]]  # as they were sampled, those of a stop string too
    certain: list[int]  # as many of them begin in the text: before a stop string that is not in it
    logprobs: list[list[TokenLogprob]] | None
    prompt_logprobs: list[TokenLogprob | None] | None  # None at the first token: nothing comes before it
    finished: list[Finish]
    stopped_by: list[str | int | None]  # the stop string or token id
    usage: Usage
    stored: bool | None = None  # whether the session's record is in the store; None without a session or a store
