"""Conversations as every protocol hands them over, and the prompt that they become."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from typing import Any

from lmstate.serve.tools import Tool
from lmstate.serve.wire.body import MAX_DEPTH
from lmstate.text.nesting import is_deeper
from lmstate.vision.reader import PicturePrompt

# Claude Code begins its system prompt with a line that changes with every request: no prefix would ever be reused.
VOLATILE = re.compile(r"^x-anthropic-billing-header:.*\n?", re.MULTILINE)


@dataclass(frozen=True)
class Call:
    """A call in an earlier answer. `arguments` is JSON."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True)
class Message:
    """One turn. `role` is system, user, assistant or tool; `pictures` has the URLs of those that `content` marks."""

    role: str
    content: str = ""
    reasoning: str = ""
    calls: tuple[Call, ...] = ()
    call_id: str | None = None  # of a tool's answer
    name: str | None = None
    pictures: tuple[str, ...] = ()

    def canonical(self) -> list[Any]:
        """The message without what clients write in other ways when they send it back."""
        calls = [[call.name, _whole_numbers(loads(call.arguments))] for call in self.calls]
        return [
            self.role,
            self.content.strip(),
            self.reasoning.strip(),
            calls,
            self.name if self.role == "tool" else "",
        ]


@dataclass(frozen=True)
class Chat:
    """A conversation to be answered. `thinking` None: the template's way; `continued`: the last answer goes on."""

    messages: tuple[Message, ...]
    tools: tuple[Tool, ...] = ()
    thinking: bool | None = None
    variables: dict[str, Any] = field(default_factory=dict)
    continued: bool = False
    control_tokens: bool = False  # whether `<|im_end|>` in a message ends a turn, instead of being text
    generation: bool = True  # whether the template begins an answer after the messages

    def key(self) -> bytes:
        """Digest of everything besides the messages that the prompt depends on."""
        tools = [tool.described() for tool in self.tools]
        return json.dumps([tools, self.thinking, self.variables, self.control_tokens], sort_keys=True).encode()


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation, whose last answer goes on if `continued`. `chain` identifies it, for `Replay`."""

    pictured: PicturePrompt
    text: str
    chain: bytes
    continued: bool = False

    @property
    def tokens(self) -> list[int]:
        return self.pictured.tokens


def _whole_numbers(value: Any) -> Any:
    """A JSON value with 1.0 as 1: languages that have one kind of number write it so."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {key: _whole_numbers(one) for key, one in value.items()}
    return [_whole_numbers(one) for one in value] if isinstance(value, list) else value


def without_volatile(text: str) -> str:
    """A system prompt without lines that change with every request."""
    return VOLATILE.sub("", text)


def loads(text: str) -> Any:
    """The value of a JSON text; the text itself where it is not JSON, or nested deeper than a body may be."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return text if is_deeper(value, MAX_DEPTH) else value
