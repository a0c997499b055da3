"""Documents to fine-tune on: lines of JSON, or a text, as tokens, with what of them is to be learned."""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
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
SHAREGPT = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
"""Roles of ShareGPT's conversations."""
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


@dataclass(frozen=True)
class DocumentEntry:
    """One document of a file as it is written there; `where` names its line."""

    fields: dict[str, Any]
    where: str


def read_entries(path: str | os.PathLike[str]) -> list[DocumentEntry]:
    """The entries of a file with one JSON object a line; one entry of a file of plain text (.txt, .md).

    `{"messages": [{"role": ..., "content": ...}, ...]}`: a chat, of which the assistant's answers are learned; with
    "tools" beside it, they go to the chat template. `{"prompt": ..., "completion": ...}`: the completion is learned.
    `{"text": ...}`: all of it. `{"conversations": [{"from": "human", "value": ...}, ...]}` (ShareGPT) and
    `{"instruction": ..., "input": ..., "output": ...}` (Alpaca) are chats. Raises `ModelError` that names the line of
    any other entry, `OSError`.
    """
    name = str(path)
    if Path(path).suffix.lower() in TEXTS:
        try:
            return [DocumentEntry({"text": Path(path).read_text("utf-8-sig")}, name)]
        except UnicodeDecodeError as error:
            raise ModelError(f"{name} is not UTF-8 text ({error})") from None
    entries = []
    with open(path, "rb") as file:
        for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), b""), 1):
            if not line.strip():
                continue
            where = f"{name}, line {number}"
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise ModelError(f"{where} is not JSON ({error}); give one object per line, or a .txt") from None
            entry = _as_messages(entry)
            _check(entry, where)
            entries.append(DocumentEntry(entry, where))
    if not entries:
        raise ModelError(f"{name} holds nothing to learn: it is empty")
    return entries


def _as_messages(entry: Any) -> Any:
    """A line of ShareGPT's or Alpaca's form as one with messages; any other as it is."""
    if not isinstance(entry, dict) or entry.keys() & {"messages", "completion", "text"}:
        return entry
    if isinstance(turns := entry.get("conversations"), list) and all(isinstance(turn, dict) for turn in turns):
        roles = [str(turn.get("from")) for turn in turns]
        chat = [{"role": SHAREGPT.get(role, role), "content": turn.get("value")} for role, turn in zip(roles, turns)]
    elif "instruction" in entry and "output" in entry:
        asked = [entry["instruction"], entry.get("input")]
        text = "\n\n".join(part for part in asked if isinstance(part, str) and part)
        chat = [{"role": "user", "content": text}, {"role": "assistant", "content": entry["output"]}]
    else:
        return entry
    system = [{"role": "system", "content": entry["system"]}] if entry.get("system") else []
    return {"messages": [*system, *chat], "tools": entry.get("tools")}


def _check(entry: Any, where: str) -> None:
    """Refuse anything but a document, for every model."""
    if not isinstance(entry, dict):
        raise ModelError(f"{where} holds a {type(entry).__name__}; a document is an object with text, or messages")
    if "messages" in entry:
        messages, tools = entry["messages"], entry.get("tools")
        if not isinstance(messages, list) or not all(isinstance(each, dict) and "role" in each for each in messages):
            raise ModelError(f'{where}: "messages" is a list of objects with a role and a content')
        if tools is not None and not isinstance(tools, list):
            raise ModelError(f'{where}: "tools" is a list of descriptions of functions')
        return
    if "completion" in entry:
        texts = [entry.get("prompt", ""), entry["completion"]]
    elif "text" in entry:
        texts = [entry["text"]]
    else:
        raise ModelError(f'{where} has none of "messages", "completion" and "text"')
    for value in texts:
        if not isinstance(value, str):
            raise ModelError(f"{where}: a {type(value).__name__} stands where text is meant")


def tokenize(
    entries: Sequence[DocumentEntry],
    tokenizer: Tokenizer,
    eos: int | None,
    skipped: Callable[[str], None] = lambda where: None,
) -> list[Document]:
    """The documents of the entries. `eos` ends texts and completions; `skipped` is told where nothing is to be learned.

    Raises `ModelError` for a text that is not Unicode, and for a chat that the template refuses, or writes so that no
    answer can be told from the rest.
    """
    end = [] if eos is None else [eos]
    documents = []
    for entry in entries:
        try:
            document = _document(entry.fields, tokenizer, end)
        except (ValueError, TypeError) as error:
            raise ModelError(f"{entry.where}: {error}") from error
        if document.learned:
            documents.append(document)
        else:
            skipped(entry.where)
    if not documents:
        first = entries[0].where
        raise ModelError(f"from {first} on there is nothing to learn: no text of two tokens, no answer, no completion")
    return documents


def _document(fields: Mapping[str, Any], tokenizer: Tokenizer, end: list[int]) -> Document:
    if "messages" in fields:
        return _chat(fields["messages"], fields.get("tools"), tokenizer)
    if "completion" in fields:
        prompt = tokenizer.encode(fields.get("prompt", ""))
        whole = [*prompt, *tokenizer.encode(fields["completion"], add_special_tokens=False), *end]
        return Document(whole, [*[IGNORED] * len(prompt), *whole[len(prompt) :]])
    tokens = [*tokenizer.encode(fields["text"]), *end]
    return Document(tokens, tokens)


def _chat(messages: list[dict[str, Any]], tools: list[Any] | None, tokenizer: Tokenizer) -> Document:
    variables: dict[str, Any] = {"tools": tools} if tools else {}

    def rendered(count: int, add_generation_prompt: bool) -> list[int]:
        return tokenizer.chat(messages[:count], add_generation_prompt, **variables)

    tokens = rendered(len(messages), False)
    labels = [IGNORED] * len(tokens)
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = rendered(index, True), rendered(index + 1, False)
        if tokens[: len(before)] != before or tokens[: len(after)] != after:
            raise ModelError(
                f"the chat template writes message {index} otherwise once others follow, so that it is not "
                "clear which tokens are the answer; give each answer as a document of its own"
            )
        labels[len(before) : len(after)] = tokens[len(before) : len(after)]
    return Document(tokens, labels)


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
