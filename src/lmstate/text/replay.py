"""Answers as they were sampled, found again when a client sends a conversation back as text.

Rendered and encoded again, an answer may be other tokens than those that were sampled: a tokenizer may cut the text in
another way, a client re-serializes the JSON of a call, a template leaves thinking out. Then no stored prefix fits from
there on. So the tokens of an answer are kept under a digest of the conversation up to it.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import TYPE_CHECKING, Any, Protocol

from lmstate.errors import ModelError
from lmstate.text.nesting import refuse_deep

if TYPE_CHECKING:
    from lmstate.text.control_tokens import ControlTokens

Message = Mapping[str, Any]

MOST_TOKENS = 2**22  # of all conversations together
MARKER = "\ue000answer\ue001"  # private characters, which no text means anything by
THOUGHT = "</think>"


class RendersChats(Protocol):
    """The part of a `Tokenizer` that writes conversations."""

    def chat_text(self, messages: Sequence[Message], **variables: Any) -> str: ...

    def chat(self, messages: Sequence[Message], **variables: Any) -> list[int]: ...

    def control_tokens(self) -> ControlTokens: ...

    def encode_rendered(self, text: str, control: ControlTokens, /) -> list[int]: ...


@dataclass(frozen=True)
class Sampled:
    """Tokens of a prompt and its answer, and the token that ended the answer (None: unknown, or it was cut off)."""

    tokens: Sequence[int]
    end: int | None = None


class Replay:
    """Sampled answers by the digest of their conversation, the latest ones, up to `most` tokens in all. Thread-safe."""

    def __init__(self, most: int = MOST_TOKENS) -> None:
        self._most = most
        self._count = 0
        self._known: OrderedDict[bytes, Sampled] = OrderedDict()
        self._lock = Lock()

    def put(self, key: bytes, sampled: Sampled) -> None:
        compact = Sampled(array("q", sampled.tokens), sampled.end)
        with self._lock:
            if (old := self._known.pop(key, None)) is not None:
                self._count -= len(old.tokens)
            self._known[key] = compact
            self._count += len(compact.tokens)
            while self._count > self._most:
                _, gone = self._known.popitem(last=False)
                self._count -= len(gone.tokens)

    def get(self, key: bytes) -> Sampled | None:
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
            return self._known.get(key)

    def remember(self, messages: Sequence[Message], tokens: Sequence[int], salt: str = "", **variables: Any) -> None:
        """Keep the tokens of a conversation whose last message is an answer, up to the end of that answer's text.

        Also found with the answer's thinking left out, as templates and clients do, and with the same salt alone.
        Raises ValueError for messages that are nested too deep.
        """
        answer = dict(messages[-1])
        forms = [answer]
        if isinstance(text := answer.get("content"), str) and THOUGHT in text:
            forms.append({**answer, "content": text.rpartition(THOUGHT)[2]})
        for form in forms:
            self.put(_links([*messages[:-1], form], variables, salt)[-1], Sampled(tokens))

    def encode(
        self, tokenizer: RendersChats, messages: Sequence[Message], salt: str = "", **variables: Any
    ) -> list[int]:
        """The ids of chat messages up to where the next answer begins, the last known answer's as they were sampled.

        Raises ValueError for messages that are nested too deep.
        """
        links = _links(messages, variables, salt)
        for count in range(len(messages), 0, -1):
            if messages[count - 1].get("role") == "assistant" and (known := self.get(links[count - 1])) is not None:
                tail = _tail(tokenizer, messages, count, variables)
                if tail is not None:
                    return [*known.tokens, *tail]
        return tokenizer.chat(messages, **variables)


def chain(key: bytes, messages: Iterable[Any]) -> list[bytes]:
    """A digest for each beginning of a conversation, its first n messages, n from 1."""
    links, last = [], hashlib.blake2b(key, digest_size=16).digest()
    for message in messages:
        last = link(last, message)
        links.append(last)
    return links


def link(last: bytes, message: Any) -> bytes:
    """The digest of a conversation that goes on with one more message."""
    return hashlib.blake2b(last + _serialized(message), digest_size=16).digest()


def _serialized(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, ensure_ascii=False, default=str).encode("utf-8", "surrogatepass")


def _links(messages: Sequence[Message], variables: Mapping[str, Any], salt: str) -> list[bytes]:
    """Digests of messages in which blank ends of a text, which templates strip, do not count. Raises ValueError."""
    refuse_deep(messages)
    refuse_deep(variables, "variables of the template")
    stripped = (
        {name: value.strip() if isinstance(value, str) else value for name, value in message.items()}
        for message in messages
    )
    return chain(salt.encode() + _serialized(dict(variables)), stripped)


def _tail(
    tokenizer: RendersChats, messages: Sequence[Message], count: int, variables: Mapping[str, Any]
) -> list[int] | None:
    """The ids of what a template writes after the text of message `count - 1`; None if that cannot be told."""
    marked = {**messages[count - 1], "content": MARKER}
    marked.pop("tool_calls", None)
    marked.pop("reasoning_content", None)
    control = tokenizer.control_tokens()
    try:
        text = tokenizer.chat_text(control.hide([*messages[: count - 1], marked, *messages[count:]]), **variables)
    except ModelError:
        return None
    _, marker, after = text.partition(MARKER)
    return tokenizer.encode_rendered(after, control) if marker and MARKER not in after else None
