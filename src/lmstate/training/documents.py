"""Documents to fine-tune on: lines of JSON, or a text, as tokens, with what of them is to be learned."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lmstate.errors import ModelError
from lmstate.text.tokenizer import Tokenizer
from lmstate.training.next_token import IGNORED

MOST_LINE = 1 << 28
"""Bytes of a line."""
TEXTS = (".txt", ".md")
"""Endings of files that are one document, whatever is in them."""
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


def read_documents(
    path: str | os.PathLike[str],
    tokenizer: Tokenizer,
    eos: int | None,
    skipped: Callable[[str], None] = lambda where: None,
) -> list[Document]:
    """The documents of a file with one JSON object a line; one document of a file of plain text (.txt, .md).

    `{"messages": [{"role": ..., "content": ...}, ...]}`: a chat, of which the assistant's answers are learned; with
    "tools" beside it, they go to the chat template. `{"prompt": ..., "completion": ...}`: the completion is learned.
    `{"text": ...}`: all of it. `eos` ends the last two. `skipped` is told which lines hold nothing to learn.
    Raises `ModelError` that names the line of what is none of these, `OSError`.
    """
    end = [] if eos is None else [eos]
    documents = []
    if Path(path).suffix.lower() in TEXTS:
        try:
            tokens = [*tokenizer.encode(Path(path).read_text("utf-8-sig")), *end]
        except UnicodeDecodeError as error:
            raise ModelError(f"{os.fspath(path)} is no UTF-8 text ({error})") from None
        documents.append(Document(tokens, tokens))
    else:
        with open(path, "rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), 1):
                if not line.strip():
                    continue
                where = f"{os.fspath(path)}, line {number}"
                try:
                    entry = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise ModelError(f"{where} is no JSON ({error}); give one object a line, or a .txt") from None
                document = _document(entry, tokenizer, end, where)
                if document.learned:
                    documents.append(document)
                else:
                    skipped(where)
    if not any(document.learned for document in documents):
        raise ModelError(f"{os.fspath(path)} holds nothing to learn: no text of two tokens, no answer, no completion")
    return documents


def _document(entry: Any, tokenizer: Tokenizer, end: list[int], where: str) -> Document:
    if not isinstance(entry, dict):
        raise ModelError(f"{where} holds a {type(entry).__name__}; a document is an object with text, or messages")
    if "messages" in entry:
        return _chat(entry["messages"], entry.get("tools"), tokenizer, where)
    if "completion" in entry:
        prompt = tokenizer.encode(_text(entry.get("prompt", ""), where))
        whole = [*prompt, *tokenizer.encode(_text(entry["completion"], where), add_special_tokens=False), *end]
        return Document(whole, [*[IGNORED] * len(prompt), *whole[len(prompt) :]])
    if "text" not in entry:
        raise ModelError(f'{where} has none of "messages", "completion" and "text"')
    tokens = [*tokenizer.encode(_text(entry["text"], where)), *end]
    return Document(tokens, tokens)


def _chat(messages: Any, tools: Any, tokenizer: Tokenizer, where: str) -> Document:
    if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
        raise ModelError(f'{where}: "messages" is a list of objects with a role and a content')
    if tools is not None and not isinstance(tools, list):
        raise ModelError(f'{where}: "tools" is a list of descriptions of functions')
    variables: dict[str, Any] = {"tools": tools} if tools else {}

    def rendered(count: int, add_generation_prompt: bool) -> list[int]:
        try:
            return tokenizer.chat(messages[:count], add_generation_prompt, **variables)
        except (ValueError, TypeError) as error:
            raise ModelError(f"{where}: {error}") from error

    tokens = rendered(len(messages), False)
    labels = [IGNORED] * len(tokens)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = rendered(index, True), rendered(index + 1, False)
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
    """Split documents into those to train on and a share to evaluate on, by the seed; none where it is 0."""
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
