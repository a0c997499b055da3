"""The record of a session: its tokens and messages, with the places that it can go back to."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from typing import Any, get_args

from lmstate.errors import EmbeddingsGone
from lmstate.generation.row import Finish
from lmstate.state import MediaSpan, Snapshot
from lmstate.state.media import spans_from_json, spans_to_json
from lmstate.text.nesting import refuse_deep
from lmstate.vision.reader import PicturePrompt, SeeingModel, pictures_of
from lmstate.vision.stored import to_json, with_bytes

MARKS = 64
UNDOS = 64
ANSWERS = 8  # to requests with idempotency keys, that a session knows


@dataclass(frozen=True)
class Moment:
    """Position in a conversation, in tokens and in messages."""

    tokens: int
    messages: int


@dataclass(frozen=True)
class KeyedAnswer:
    """The answer of a turn whose request had an idempotency key: for a sender who did not hear of it."""

    key: str
    stop: int  # tokens of the session after the turn
    prompt: int  # tokens before the answer
    tokens: list[int]  # as they were sampled
    text: str
    finished: Finish

    @staticmethod
    def from_json(told: Any, length: int) -> KeyedAnswer:
        """Read an answer of a session of `length` tokens. Raises ValueError for anything else."""
        try:
            answer = KeyedAnswer(**told)
            sound = 0 <= answer.stop <= length and answer.prompt >= 0 and answer.finished in get_args(Finish)
            sound = sound and isinstance(answer.key, str) and isinstance(answer.text, str)
            if sound and all(type(token) is int and token >= 0 for token in answer.tokens):
                return answer
        except TypeError:
            pass
        raise ValueError("a session's answers are told by key, stop, prompt, tokens, text and finished")


@dataclass
class Record:
    """All of a session that outlives the engine."""

    tokens: list[int] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    turns: list[Moment] = field(default_factory=list)  # before each request, for `undo`
    marks: list[Moment] = field(default_factory=list)
    answers: list[KeyedAnswer] = field(default_factory=list)
    media: list[MediaSpan] = field(default_factory=list)  # pictures among the tokens
    parent: str | None = None  # name of the session that it was forked from

    @property
    def prompt(self) -> PicturePrompt:
        """The tokens with their pictures."""
        return PicturePrompt(list(self.tokens), tuple(self.media))

    def followed_by(self, prompt: PicturePrompt) -> PicturePrompt:
        """The tokens with those of a prompt after them."""
        behind = (MediaSpan(len(self.tokens) + span.at, span.media) for span in prompt.media)
        return PicturePrompt([*self.tokens, *prompt.tokens], (*self.media, *behind), prompt.seconds)

    def moment(self) -> Moment:
        return Moment(len(self.tokens), len(self.messages))

    def copy(self) -> Record:
        lists: dict[str, Any] = {name: list(part) for name, part in vars(self).items() if isinstance(part, list)}
        return replace(self, **lists)

    def back(self, to: Moment) -> None:
        del self.tokens[to.tokens :]
        del self.messages[to.messages :]
        self.turns = [turn for turn in self.turns if turn.tokens <= to.tokens and turn.messages <= to.messages]
        self.marks = [mark for mark in self.marks if mark.tokens <= to.tokens and mark.messages <= to.messages]
        self.answers = [answer for answer in self.answers if answer.stop <= to.tokens]
        self.media = [span for span in self.media if span.end <= to.tokens]

    def seen_again(self, model: SeeingModel) -> Record:
        """The record with the embeddings of its pictures, which the tower makes again of the files in its messages.

        Raises EmbeddingsGone where the messages do not have them, and as `PictureReader.texts`.
        """
        gone = "the session has pictures whose embeddings were let go, and its messages"
        if not (files := pictures_of(self.messages)):
            raise EmbeddingsGone(f"{gone} do not have their files: give them again, or save it where it was answered")
        media = list(model.pictures().texts(files).prompt(self.tokens).media)
        if media != self.media:
            raise EmbeddingsGone(f"{gone} have files that this model sees otherwise: save it where it was answered")
        return replace(self, media=media)

    def to_json(self) -> str:
        turns, marks = ([[at.tokens, at.messages] for at in moments] for moments in (self.turns, self.marks))
        told = {"messages": self.messages, "turns": turns, "marks": marks}
        if self.answers:
            told["answers"] = [vars(answer) for answer in self.answers]
        if self.media:
            told["media"] = spans_to_json(self.media)
        if self.parent is not None:
            told["parent"] = self.parent
        return json.dumps(told, default=to_json)

    @staticmethod
    def of(snapshot: Snapshot) -> Record:
        """The record of a session's file. Raises ValueError where it has none."""
        record = Record.from_json(list(snapshot.tokens), snapshot.notes)
        record.media = list(snapshot.media)
        return record

    @staticmethod
    def from_json(tokens: list[int], text: str) -> Record:
        """Inverse of `to_json`. Raises ValueError for text that it cannot have returned."""
        try:
            told = json.loads(text)
        except RecursionError:
            raise ValueError("a session's record is nested too deeply") from None
        if not isinstance(told, dict) or not all(isinstance(told.get(k), list) for k in ("messages", "turns", "marks")):
            raise ValueError("a session's record has no messages, turns and marks")
        refuse_deep(messages := told["messages"], "a session's messages")
        if not all(isinstance(message, dict) for message in messages):
            raise ValueError("a session's messages are objects")
        told["marks"] = [[at, 0] if type(at) is int else at for at in told["marks"]]  # as they were once written
        if not all(_places(at, len(tokens), len(messages)) for at in (*told["turns"], *told["marks"])):
            raise ValueError("a session's turns and marks lie in its tokens and messages")
        turns, marks = ([Moment(*at) for at in told[key]] for key in ("turns", "marks"))
        if not isinstance(answers := told.get("answers", []), list):
            raise ValueError("a session's answers are a list")
        known = [KeyedAnswer.from_json(answer, len(tokens)) for answer in answers[-ANSWERS:]]
        media = spans_from_json(told.get("media", []), tokens)
        if not isinstance(parent := told.get("parent"), str | None):
            raise ValueError("a session's parent is a name")
        return Record(tokens, list(map(with_bytes, messages)), turns[-UNDOS:], marks[-MARKS:], known, media, parent)


def _places(values: object, *lengths: int) -> bool:
    """Whether these are whole numbers, each up to the length of its place."""
    if not isinstance(values, list) or len(values) != len(lengths):
        return False
    return all(type(value) is int and 0 <= value <= length for value, length in zip(values, lengths))
