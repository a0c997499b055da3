"""Chat messages to token ids, with what the model itself said as it said it.

A client that resends a conversation resends the answers as text. Rendered and encoded again they may be other tokens
than those that were sampled (another way to cut the text, thinking left out, a tool call written anew), and the prefix
would be lost from there on. So the tokens of each answer are kept beside its messages.
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from threading import Lock
from typing import TYPE_CHECKING, Any

from lmstate.errors import ModelError

if TYPE_CHECKING:
    from lmstate.text.tokenizer import Tokenizer

Message = Mapping[str, Any]

MOST_TOKENS = 2**22  # of all conversations together
MARKER = "\ue000answer\ue001"  # private characters, which no text means anything by
THOUGHT = "</think>"


class Replay:
    """Conversations that ended with an answer, by their messages, and their tokens. Safe to use from any thread."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, array[int]] = OrderedDict()
        self._tokens = 0
        self._lock = Lock()

    def remember(self, messages: Sequence[Message], tokens: Sequence[int], **variables: Any) -> None:
        """`tokens` are those of a conversation whose last message is an answer, up to the end of that answer's text.

        Also found with the answer's thinking left out, as templates and clients do.
        """
        kept = array("q", tokens)
        answer = dict(messages[-1])
        forms = [answer]
        if isinstance(text := answer.get("content"), str) and THOUGHT in text:
            forms.append({**answer, "content": text.rpartition(THOUGHT)[2]})
        with self._lock:
            for form in forms:
                key = _key([*messages[:-1], form], variables)
                if (old := self._known.pop(key, None)) is not None:
                    self._tokens -= len(old)
                self._known[key] = kept
                self._tokens += len(kept)
            while self._tokens > MOST_TOKENS and self._known:
                self._tokens -= len(self._known.popitem(last=False)[1])

    def encode(self, tokenizer: Tokenizer, messages: Sequence[Message], **variables: Any) -> tuple[list[int], int]:
        """(the ids of a conversation up to where the next answer begins, how many of them were kept from before)."""
        for count in range(len(messages), 0, -1):
            if messages[count - 1].get("role") != "assistant":
                continue
            with self._lock:
                known = self._known.get(key := _key(messages[:count], variables))
                if known is not None:
                    self._known.move_to_end(key)
            if known is not None and (tail := _tail(tokenizer, messages, count, variables)) is not None:
                return [*known, *tokenizer.encode(tail, add_special_tokens=False)], len(known)
        return tokenizer.chat(messages, **variables), 0


def _tail(tokenizer: Tokenizer, messages: Sequence[Message], count: int, variables: Mapping[str, Any]) -> str | None:
    """Template output after the text of message `count - 1`; None if that cannot be told."""
    marked = {**messages[count - 1], "content": MARKER}
    marked.pop("tool_calls", None)
    marked.pop("reasoning_content", None)
    try:
        text = tokenizer.chat_text([*messages[: count - 1], marked, *messages[count:]], **variables)
    except ModelError:
        return None
    _, marker, after = text.partition(MARKER)
    return after if marker and MARKER not in after else None


def _key(messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
    """Of a conversation: blank ends of a text, which templates strip, do not count."""
    plain = [
        {name: value.strip() if isinstance(value, str) else value for name, value in message.items()}
        for message in messages
    ]
    text = json.dumps([plain, dict(variables)], sort_keys=True, default=str)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
