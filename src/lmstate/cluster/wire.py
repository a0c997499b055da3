"""Messages between a front and its replicas: MessagePack, checked as it is read. Nothing is pickled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import msgspec
import torch

from lmstate.audio.speech import OneOf, SpeechGrammar
from lmstate.cluster.handle import ReplicaLost, Told, Unreached, Work
from lmstate.cluster.pictures import PictureMissing
from lmstate.engine.results import (
    Completion,
    Drained,
    EngineClosed,
    EngineError,
    Load,
    Piece,
    QueueFull,
    SessionMoved,
    StoreUnreachable,
)
from lmstate.engine.session import SessionBusy
from lmstate.errors import CapacityError, RanksError, SnapshotError, StateError, UnsupportedError
from lmstate.generation.grammar import Grammar
from lmstate.generation.logprobs import TokenLogprob
from lmstate.generation.params import SamplingParams
from lmstate.generation.row import Finish
from lmstate.models.config import ModelConfig
from lmstate.models.describe import WeightTotals
from lmstate.state import SourceFeatures
from lmstate.state.media import MediaSpan, spans_from_json, spans_to_json
from lmstate.vision.reader import PicturePrompt

# Errors that keep their class on the way; what is of a subclass goes as the nearest of these.
ERRORS: dict[str, type[Exception]] = {
    error.__name__: error
    for error in (
        QueueFull, EngineClosed, StoreUnreachable, SessionBusy, Unreached, ReplicaLost, CapacityError, UnsupportedError,
        SnapshotError, StateError, EngineError, ValueError, TypeError,
    )
}  # fmt: skip
MOST_MESSAGE = 2**27  # bytes of a request, half of what Ray is told to let through; longer things go in parts
Message = TypeVar("Message", bound=msgspec.Struct)
Found = TypeVar("Found")


@runtime_checkable
class WrittenGrammar(Protocol):
    """A grammar that another process can compile again."""

    lark: str


class WireSound(msgspec.Struct, frozen=True):
    """The features of a sound, float32 `[N, F]`."""

    width: int
    values: bytes

    @staticmethod
    def of(source: SourceFeatures) -> WireSound:
        assert source.values is not None
        return WireSound(source.shape[1], source.values.numpy().tobytes())

    def read(self) -> SourceFeatures:
        """Raises StateError for bytes of another length."""
        if self.width < 1 or not self.values or len(self.values) % (4 * self.width):
            raise StateError(f"{len(self.values)} bytes are not rows of {self.width} floats")
        numbers = torch.frombuffer(bytearray(self.values), dtype=torch.float32)
        return SourceFeatures.of(numbers.view(-1, self.width))


class WirePrompt(msgspec.Struct, frozen=True):
    """Tokens, with their source and with pictures as `spans_to_json` writes them: replicas have these by hash."""

    ids: list[int] = []
    media: list[Any] = []
    source: list[int] | None = None
    sound: WireSound | None = None  # that they read in place of a text
    seconds: float = 0.0  # that the tower took

    @staticmethod
    def of(prompt: PicturePrompt) -> WirePrompt:
        read = prompt.source
        source = list(read) if isinstance(read, tuple) else None
        sound = WireSound.of(read) if isinstance(read, SourceFeatures) else None
        return WirePrompt(prompt.tokens, spans_to_json(prompt.media), source, sound, prompt.seconds)

    def read(self) -> PicturePrompt:
        """Its pictures have no embeddings. Raises SnapshotError for pictures that are not in such tokens."""
        media = tuple(spans_from_json(self.media, self.ids))
        source = None if self.source is None else tuple(self.source)
        return PicturePrompt(self.ids, media, self.seconds, source if self.sound is None else self.sound.read())


class WireOneOf(msgspec.Struct, frozen=True, tag="one_of"):
    """The grammar of one token, which is one of these."""

    ids: list[int]


class WireSpeech(msgspec.Struct, frozen=True, tag="speech"):
    """The grammar of a transcript, with times or without."""

    times: bool


WireGrammar: TypeAlias = str | WireOneOf | WireSpeech
"""A grammar as another process can make it again: a text in Lark, or one of those of transcripts."""


class WireWork(msgspec.Struct, frozen=True):
    """A request for a replica. Its prompt is one of `text`, `prompt` and `messages`."""

    to: str  # the replica
    id: str  # of the request, for `WireNote` and `WireHeard`
    feed: str  # the stream that its news come in
    params: dict[str, Any]  # those that are not at their defaults
    answered: list[list[int]]
    text: str | None = None
    prompt: WirePrompt | None = None
    messages: list[dict[str, Any]] | None = None
    grammar: WireGrammar | None = None
    priority: int = 0
    deadline: float | None = None
    itl: float | None = None
    session: str | None = None
    key: str | None = None
    salt: str = ""
    sender: str = ""
    answered_to: list[int] | None = None


class WireNote(msgspec.Struct, frozen=True):
    """A wish of a request's sender."""

    id: str
    cancel: bool = False
    end_thinking: bool = False
    read: int | None = None  # pieces that its reader has taken, see `Request.read_elsewhere`
    max_unread: int = 0


class WirePiece(msgspec.Struct, frozen=True, array_like=True):
    text: str
    index: int
    tokens: list[int]
    logprobs: list[TokenLogprob] | None
    finished: Finish | None
    certain: int | None
    start: int


class WireError(msgspec.Struct, frozen=True):
    kind: str
    message: str
    answered: list[list[int]] = []
    seed: int = 0
    generation: int = 0
    hashes: list[str] = []


class WireNews(msgspec.Struct, frozen=True):
    """News of a request. The first of a session's turn has all of its `prompt`."""

    pieces: list[WirePiece] = []
    computed: int = 0
    reused: int | None = None
    prompt: list[int] | None = None
    completion: Completion | None = None
    error: WireError | None = None


class WireFeed(msgspec.Struct, frozen=True):
    """A stream of news that a front wants to hear: of the requests that name it, after the message it `heard` last."""

    id: str
    heard: int = 0


class WireHeard(msgspec.Struct, frozen=True, array_like=True):
    """News of several requests, by their ids."""

    of: str  # the replica
    number: int  # one more than that of the last ones of this stream; the first is 1
    news: list[tuple[str, WireNews]]


class WireRecord(msgspec.Struct, frozen=True):
    """A session's record, as `Record.to_json` writes it."""

    tokens: list[int]
    text: str


class WireFile(msgspec.Struct, frozen=True):
    """A file of a session: to be read from an upload under a `name`, or to be written of an uploaded `WireRecord`."""

    to: str  # the replica
    id: str  # of the upload
    salt: str
    name: str = ""


class WireView(msgspec.Struct, frozen=True):
    """A replica as it is now."""

    id: str
    load: Load
    takes: bool
    unstored: int
    hit_rate: float | None


class WireFacts(msgspec.Struct, frozen=True):
    """A replica, as it stays, and the limits of its model."""

    id: str
    rank: int
    pid: int
    namespace: str
    rows: int
    fingerprint: str
    config: ModelConfig
    layers: int
    max_positions: int | None
    context_size: int | None
    weights: WeightTotals
    eos_ids: list[int]
    start_id: int | None
    hears: bool
    no_pictures: str | None
    defaults: dict[str, Any]


class WireQuestion(msgspec.Struct, frozen=True):
    """A look at a replica's memory. `prompt` and `salt`: of what it is about."""

    about: str
    prompt: WirePrompt = WirePrompt()
    salt: str | None = None
    seconds: float = 0.0
    pooling: str = ""


class WireAnswer(msgspec.Struct, frozen=True):
    found: msgspec.Raw = msgspec.Raw(b"\xc0")  # MessagePack's null
    error: WireError | None = None

    def read(self, kind: type[Found]) -> Found:
        """Return the result. Raises the error of the other side, and ReplicaLost for what is of another kind."""
        if self.error is not None:
            raise error_of_wire(self.error)
        try:
            return msgspec.msgpack.decode(self.found, type=kind)
        except (msgspec.MsgspecError, RecursionError) as error:
            raise ReplicaLost(f"an answer that is not a {kind} came over the wire: {error}") from None


def pack(message: object) -> bytes:
    return msgspec.msgpack.encode(message)


def unpack(told: bytes, kind: type[Message]) -> Message:
    """Raises ReplicaLost for anything but such a message: the other side is not to be trusted with more."""
    try:
        return msgspec.msgpack.decode(told, type=kind)
    except (msgspec.MsgspecError, RecursionError) as error:
        raise ReplicaLost(f"a message that is not a {kind.__name__} came over the wire: {error}") from None


def work_to_wire(work: Work, answered: list[list[int]], to: str, id: str, feed: str) -> WireWork:
    """Raises UnsupportedError for a grammar that is an object of this process."""
    params, grammar = work.params, work.params.grammar
    told = {
        field.name: value
        for field in fields(params)
        if field.name not in ("grammar", "logit_bias", "stop_token_ids")
        and (value := getattr(params, field.name)) != field.default
    }
    if isinstance(grammar, str):
        told["grammar"] = grammar
    if params.biases:
        told["logit_bias"] = dict(params.biases)
    if params.stop_token_ids:
        told["stop_token_ids"] = sorted(params.stop_token_ids)
    prompt = work.prompt
    return WireWork(
        to, id, feed, told, answered,
        prompt if isinstance(prompt, str) else None,
        WirePrompt.of(prompt) if isinstance(prompt, PicturePrompt) else None,
        prompt if isinstance(prompt, list) else None,
        None if isinstance(grammar, str | None) else _grammar_to_wire(grammar),
        work.priority, work.deadline, work.itl, work.session, work.key, work.salt, work.sender, work.answered_to,
    )  # fmt: skip


def _grammar_to_wire(grammar: Grammar) -> WireGrammar:
    match grammar:
        case WrittenGrammar():
            return grammar.lark
        case OneOf():
            return WireOneOf(list(grammar.ids))
        case SpeechGrammar():
            return WireSpeech(grammar.times)
    raise UnsupportedError(
        f"the grammar {grammar!r:.80} was given to a front; replicas take those that the server compiles, from text"
    )


def work_of_wire(
    told: WireWork,
    compiled: Callable[[WireGrammar], Grammar],
    placed: Callable[[Sequence[MediaSpan]], tuple[MediaSpan, ...]] = tuple,
) -> Work:
    """Inverse of `work_to_wire`. Raises ValueError and TypeError for parameters that are out of range or unknown.

    `placed`: gives pictures their embeddings; raises PictureMissing.
    """
    params = SamplingParams(**told.params)
    if told.grammar is not None:
        params = replace(params, grammar=compiled(told.grammar))
    read = None if told.prompt is None else told.prompt.read()
    pictured = None if read is None else replace(read, media=placed(read.media))
    given = [prompt for prompt in (told.text, pictured, told.messages) if prompt is not None]
    if len(given) != 1:
        raise ValueError(f"a request came with {len(given)} prompts; it has one: text, tokens or messages")
    terms = (told.priority, told.deadline, told.itl, told.session, told.key, told.salt, told.sender)
    return Work(given[0], params, *terms, told.answered_to)


def news_to_wire(told: Told) -> WireNews:
    pieces = [
        WirePiece(str(piece), piece.index, piece.tokens, piece.logprobs, piece.finished, piece.certain, piece.start)
        for piece in told.pieces
    ]
    outcome = told.outcome
    completion = outcome if isinstance(outcome, Completion) else None
    error = error_to_wire(outcome) if isinstance(outcome, BaseException) else None
    return WireNews(pieces, told.computed, told.reused, told.prompt, completion, error)


def news_of_wire(news: WireNews) -> Told:
    pieces = [
        Piece(piece.text, piece.index, piece.tokens, piece.logprobs, piece.finished, piece.certain, piece.start)
        for piece in news.pieces
    ]
    outcome = news.completion if news.error is None else error_of_wire(news.error)
    return Told(pieces, news.computed, news.reused, outcome, news.prompt)


def error_to_wire(error: BaseException) -> WireError:
    """Other errors than the known ones go as an EngineError that tells their class: their text may hold a prompt."""
    if isinstance(error, RanksError):
        return WireError("ReplicaLost", str(error))
    if isinstance(error, Drained):
        return WireError("Drained", str(error), error.answered, error.seed)
    if isinstance(error, SessionMoved):
        return WireError("SessionMoved", str(error), generation=error.generation)
    if isinstance(error, PictureMissing):
        return WireError("PictureMissing", str(error), hashes=error.hashes)
    kind = next((name for name, known in ERRORS.items() if isinstance(error, known)), None)
    if kind is None:
        return WireError("EngineError", f"a replica failed to answer, with {type(error).__name__}; its log says why")
    return WireError(kind, str(error))


def error_of_wire(told: WireError) -> Exception:
    if told.kind == "Drained":
        return Drained(told.answered, told.seed)
    if told.kind == "SessionMoved":
        return SessionMoved(told.message, told.generation)
    if told.kind == "PictureMissing":
        return PictureMissing(told.hashes)
    return ERRORS.get(told.kind, EngineError)(told.message)
