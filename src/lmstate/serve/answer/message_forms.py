"""Forms of one conversation for templates that refuse some, and whether a rendered text has all of it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from lmstate.serve.answer.messages import Message, loads
from lmstate.serve.answer.pictures import without_marks
from lmstate.text.replay import THOUGHT

WORD = re.compile(r"\w+")
FEW_WORDS = 200  # of a text that a template writes in another way


def left_out(text: str, messages: Sequence[Message]) -> str | None:
    """The first part of the messages that a rendered text does not have, by its path; None if it has all.

    Thoughts of earlier answers do not count: templates leave them out on purpose.
    """
    for index, message in enumerate(messages):
        content = without_marks(message.content)
        content = content.rpartition(THOUGHT)[2] if message.role == "assistant" else content
        if not is_written(text, content):
            return f"messages[{index}].content"
        for number, call in enumerate(message.calls):
            if not all(is_written(text, value) for value in [*_texts(loads(call.arguments))] or [call.name]):
                return f"messages[{index}].tool_calls[{number}].function"
    return None


def is_written(text: str, part: str) -> bool:
    """Whether a text has a part of it: as it stands, escaped as in JSON, or line by line, or by its first words."""

    def has(piece: str) -> bool:
        return piece in text or json.dumps(piece, ensure_ascii=False)[1:-1] in text or json.dumps(piece)[1:-1] in text

    part = part.strip()
    if has(part) or all(has(line.strip()) for line in part.splitlines()):
        return True
    return all(has(word) for word in WORD.findall(part)[:FEW_WORDS])


def _texts(value: Any) -> Iterator[str]:
    """The names and the strings of a JSON value."""
    if isinstance(value, dict):
        yield from value
        value = list(value.values())
    if isinstance(value, list):
        for one in value:
            yield from _texts(one)
    elif isinstance(value, str):
        yield value


def joined(messages: Sequence[Message], leading: bool) -> list[Message]:
    """System messages as one at the beginning: those that lead, or all of them."""
    count = 0
    while count < len(messages) and messages[count].role == "system":
        count += 1
    others = [message for message in messages[count:] if leading or message.role != "system"]
    system = [*messages[:count], *(m for m in messages[count:] if not leading and m.role == "system")]
    text = "\n\n".join(message.content for message in system)
    return [*([Message("system", text)] if system else []), *others]


def alternating(messages: Sequence[Message]) -> list[Message]:
    """Messages of the user, or of the assistant without calls, that follow each other as one."""
    turns: list[Message] = []
    for message in messages:
        if turns and _goes_on(turns[-1], message):
            texts = [[one.content, one.reasoning] for one in (turns[-1], message)]
            content, reasoning = ("\n\n".join(filter(None, both)) for both in zip(*texts, strict=True))
            turns[-1] = replace(turns[-1], content=content, reasoning=reasoning)
        else:
            turns.append(message)
    return turns


def _goes_on(last: Message, message: Message) -> bool:
    return last.role == message.role and message.role in ("user", "assistant") and not (last.calls or message.calls)


def parted(messages: Sequence[Message]) -> list[Message]:
    """Each call in a message of its own, followed by its result; results without an id go in the order of the calls."""
    turns: list[Message] = []
    at = 0
    while at < len(messages):
        message, at = messages[at], at + 1
        if len(message.calls) < 2:
            turns.append(message)
            continue
        results = []
        while at < len(messages) and messages[at].role == "tool":
            results.append(messages[at])
            at += 1
        for index, call in enumerate(message.calls):
            turns.append(replace(message, calls=(call,)) if not index else Message("assistant", calls=(call,)))
            own = [one for one in results if one.call_id == call.id] or [one for one in results if not one.call_id][:1]
            turns += own
            results = [one for one in results if not any(one is other for other in own)]
        turns += results
    return turns


def without_system(messages: Sequence[Message]) -> list[Message]:
    """The system message in front of the first message, as a text of the user."""
    return alternating([replace(one, role="user") if one.role == "system" else one for one in messages])


def spoken(messages: Sequence[Message]) -> list[Message]:
    """The text beside calls in a message of its own before them."""
    turns: list[Message] = []
    for message in messages:
        if message.calls and message.content.strip():
            turns.append(replace(message, calls=()))
            message = replace(message, content="", reasoning="")
        turns.append(message)
    return turns


def forms(messages: Sequence[Message]) -> Iterator[list[Message]]:
    """Ways to write the same conversation, the one that changes the least first; each once."""
    given: list[list[Message]] = []
    for calls in (list(messages), parted(messages), spoken(messages), spoken(parted(messages))):
        system = [joined(calls, leading=True), joined(calls, leading=False)]
        for form in (*system, *map(alternating, system), without_system(system[1])):
            if form not in given:
                given.append(form)
                yield form
