"""Documents to fine-tune on: lines of JSON as tokens, with what of them is to be learned."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from lmstate.errors import ModelError
from lmstate.text.tokenizer import Tokenizer
from lmstate.training.next_token import IGNORED

MOST_LINE = 1 << 28
"""Bytes of a line."""
POOL = 256
"""Documents that are sorted by length together, so that few of a batch's tokens are padding."""


@dataclass(frozen=True)
class Document:
    """Token ids, and for each of them the label of `lmstate.training.loss`."""

    tokens: list[int]
    labels: list[int]

    @property
    def learned(self) -> int:
        """Number of predicted tokens."""
        return sum(label != IGNORED for label in self.labels[1:])


def read_documents(path: str | os.PathLike[str], tokenizer: Tokenizer, eos: int | None) -> list[Document]:
    """The documents of a file with one JSON object a line.

    `{"messages": [{"role": ..., "content": ...}, ...]}`: a chat, of which the assistant's answers are learned.
    `{"prompt": ..., "completion": ...}`: the completion is learned. `{"text": ...}`: all of it. `eos` ends the
    last two.
    Raises `ModelError` that names the line of what is none of these, `OSError`.
    """
    documents = []
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), 1):
            if not line.strip():
                continue
            where = f"{os.fspath(path)}, line {number}"
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ModelError(f"{where} is no JSON ({error})") from None
            document = _document(entry, tokenizer, [] if eos is None else [eos], where)
            if document.learned:
                documents.append(document)
    if not documents:
        raise ModelError(f"{os.fspath(path)} holds nothing to learn: no document of two tokens or more")
    return documents


def _document(entry: Any, tokenizer: Tokenizer, end: list[int], where: str) -> Document:
    if not isinstance(entry, dict):
        raise ModelError(f"{where} holds a {type(entry).__name__}; a document is an object with text, or messages")
    if "messages" in entry:
        return _chat(entry["messages"], tokenizer, where)
    if "completion" in entry:
        prompt = tokenizer.encode(_text(entry.get("prompt", ""), where))
        whole = [*prompt, *tokenizer.encode(_text(entry["completion"], where), add_special_tokens=False), *end]
        return Document(whole, [*[IGNORED] * len(prompt), *whole[len(prompt) :]])
    if "text" not in entry:
        raise ModelError(f'{where} has none of "messages", "completion" and "text"')
    tokens = [*tokenizer.encode(_text(entry["text"], where)), *end]
    return Document(tokens, tokens)


def _chat(messages: Any, tokenizer: Tokenizer, where: str) -> Document:
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise ModelError(f'{where}: "messages" is a list of objects with a role and a content')
    tokens = tokenizer.chat(messages, add_generation_prompt=False)
    labels = [IGNORED] * len(tokens)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before = tokenizer.chat(messages[:index], add_generation_prompt=True)
        after = tokenizer.chat(messages[: index + 1], add_generation_prompt=False)
        if tokens[: len(before)] != before or tokens[: len(after)] != after:
            raise ModelError(
                f"{where}: the chat template writes message {index} otherwise once others follow, so that it is not "
                "clear which tokens are the answer; give each answer as a document of its own"
            )
        labels[len(before) : len(after)] = tokens[len(before) : len(after)]
    return Document(tokens, labels)


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str):
        raise ModelError(f"{where}: a {type(value).__name__} stands where text is meant")
    return value


def split(documents: Sequence[Document], share: float, seed: int) -> tuple[list[Document], list[Document]]:
    """Those to train on, and a share of them to evaluate on: chosen by the seed, none where the share is 0."""
    order = list(range(len(documents)))
    random.Random(f"{seed} split").shuffle(order)
    count = min(max(round(len(order) * share), 1 if share else 0), len(order) - 1)
    chosen = set(order[:count])
    return (
        [each for index, each in enumerate(documents) if index not in chosen],
        [each for index, each in enumerate(documents) if index in chosen],
    )


def batches(documents: Sequence[Document], tokens: int, order: random.Random | None) -> Iterator[list[Document]]:
    """One pass over documents, in batches of at most `tokens` tokens, padding counted, or of one document.

    A document is a row of its batch, with a state of its own from position 0: none sees another.
    """
    queue = list(documents)
    if order is not None:
        order.shuffle(queue)
    made = []
    for first in range(0, len(queue), POOL):
        batch: list[Document] = []
        for document in sorted(queue[first : first + POOL], key=lambda each: len(each.tokens)):
            if batch and (len(batch) + 1) * len(document.tokens) > tokens:
                made.append(batch)
                batch = []
            batch.append(document)
        made.append(batch)
    if order is not None:
        order.shuffle(made)
    yield from made
