"""A conversation as the tree that it is: messages, and the tokens that each answer was computed from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from lmstate.serve.answer.messages import Message
from lmstate.serve.answer.pictures import picture_mark
from lmstate.vision.reader import kind_of_file

Alternative = tuple[int, float]


@dataclass
class MessageNode:
    """A message. `parent` None: it begins the conversation.

    An answer's text of tokens is the first `base` ones of the answer before it, then `added`; its own begin at `start`.
    `end` is the token that ended it. `logprobs` has (its log probability, the likeliest tokens) for each own token.
    """

    id: str
    parent: str | None
    role: str  # user or assistant
    text: str = ""
    pictures: list[str] = field(default_factory=list)  # the SHA-256 of each picture or sound, which is before the text
    sounds: list[str] = field(default_factory=list)  # those of them that are sounds
    reasoning: str = ""
    status: str = "done"  # running, done, stopped, length, failed
    error: str = ""
    created: float = 0.0
    system: str = ""
    base: int = 0
    start: int = 0
    added: list[int] = field(default_factory=list)
    end: int | None = None
    logprobs: list[tuple[float, list[Alternative]]] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    turn: int = 0  # how often it was begun before: an answer that was stopped is gone on with
    writer: str = ""  # the server that began it

    def copy(self) -> MessageNode:
        """This message as it is now, for a thread to which the lists of an answer must not grow."""
        return replace(self, added=[*self.added], logprobs=[*self.logprobs])

    def to_dict(self) -> dict[str, Any]:
        return dict(vars(self))

    def without_tokens(self) -> MessageNode:
        return replace(self, added=[], logprobs=[])

    def is_like(self, stored: MessageNode) -> bool:
        """Whether a record has this message as it is here, and no server writes it."""
        here, there = ((one.turn, one.writer, one.status, one.text) for one in (self, stored))
        return here == there and self.status != "running"

    def follows(self, stored: MessageNode) -> bool:
        """Whether this message may be stored in place of another one: no other server has begun it meanwhile."""
        return self.turn == stored.turn + 1 or (self.turn, self.writer) == (stored.turn, stored.writer)


@dataclass
class Conversation:
    """A tree of messages with a title and settings."""

    id: str
    title: str
    updated: float
    settings: dict[str, Any] = field(default_factory=dict)
    nodes: dict[str, MessageNode] = field(default_factory=dict)
    generation: int = 0  # of its record, as far as it is known here

    def path(self, node: MessageNode | None) -> list[MessageNode]:
        """The messages from the first to this one."""
        found: list[MessageNode] = []
        while node is not None:
            found.append(node)
            node = self.nodes[node.parent] if node.parent is not None else None
        return found[::-1]

    def children(self, id: str | None) -> list[MessageNode]:
        return [node for node in self.nodes.values() if node.parent == id]

    def answer_before(self, node: MessageNode | None) -> MessageNode | None:
        """The nearest answer above a message."""
        while node is not None and node.parent is not None:
            node = self.nodes[node.parent]
            if node.role == "assistant":
                return node
        return None

    def tokens(self, answer: MessageNode | None) -> list[int]:
        """All tokens up to the end of an answer."""
        found: list[int] = []
        for node in self.path(answer):
            if node.role == "assistant":
                found = [*found[: node.base], *node.added]
        return found

    def own_tokens(self, answer: MessageNode) -> list[int]:
        return self.tokens(answer)[answer.start :]

    def messages(self, node: MessageNode | None, system: str) -> tuple[Message, ...]:
        """The path to a message as what is rendered to a prompt."""
        said = [_message(one) for one in self.path(node)]
        return (*([Message("system", system)] if system else []), *said)

    def pictures(self, node: MessageNode | None) -> list[str]:
        """The pictures of the path to a message, in order."""
        return [name for one in self.path(node) for name in one.pictures]

    def has_picture(self, name: str) -> bool:
        return any(name in node.pictures for node in self.nodes.values())

    def sounds(self, names: list[str], new: Mapping[str, bytes]) -> list[str]:
        """Those of the files of a message that are sounds. `new`: of those that the conversation does not have yet."""
        known = {name for node in self.nodes.values() for name in node.sounds}
        known |= {name for name, file in new.items() if kind_of_file(file) == "audio"}
        return [name for name in names if name in known]


def _message(node: MessageNode) -> Message:
    content = "\n".join([*map(picture_mark, node.pictures), node.text])
    return Message(node.role, content, node.reasoning, pictures=tuple(node.pictures))
