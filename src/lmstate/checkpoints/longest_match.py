"""Tokenizers that take the longest token of a vocabulary at each place of a text: RWKV's World, as a tokenizer.json.

The format has no such model. A regular expression made of the vocabulary's trie parts a text there, and each part is
a token. Texts are bytes, under GPT-2's characters for them.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lmstate.checkpoints.tokenizer_json import added_token, byte_characters, byte_level, document, split
from lmstate.errors import ModelError
from lmstate.files.regular import open_regular

NAME = "rwkv_vocab_v20230424.txt"
END = "<s>"  # token 0, which begins and ends a text; no file lists it
LONGEST = 512  # bytes of a token
MOST_BYTES = 2**25
ESCAPE = re.compile(rb"\\(?:x([0-9a-fA-F]{2})|(.))", re.DOTALL)
NAMED = {b"t": b"\t", b"n": b"\n", b"r": b"\r"}

TEMPLATE = """\
{%- for message in messages -%}
{{- {"system": "System", "user": "User", "assistant": "Assistant"}[message.role] + ": " + message.content.strip() -}}
{{- "\\n\\n" -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "Assistant:" -}}{%- endif -%}"""
"""The conversation that llama.cpp writes for files that name theirs `rwkv-world`. An empty line ends an answer."""

Node = dict[str, Any]  # of a trie: a node for each next character, and whether a token ends here under ""


def unescaped(text: str) -> bytes:
    """The bytes of a token as llama.cpp's converter writes it, as the inside of a bytes literal of Python."""

    def byte(found: re.Match[bytes]) -> bytes:
        if found[1] is not None:
            return bytes([int(found[1], 16)])
        return NAMED.get(found[2], found[2])

    return ESCAPE.sub(byte, text.encode("utf-8"))


def longest_match(tokens: Mapping[int, bytes], where: str, others: Mapping[str, int] | None = None) -> dict[str, Any]:
    """The tokenizer.json of tokens by their ids. `others`: tokens that no text has, by their names.

    Raises `ModelError` for a token without bytes or with too many, and where one of the 256 bytes is missing: texts
    with it would lose it.
    """
    characters = byte_characters()
    pieces: dict[str, int] = {}
    for index, data in tokens.items():
        if not 1 <= len(data) <= LONGEST:
            raise ModelError(f"{where}: token {index} has {len(data)} bytes; expected 1 to {LONGEST}")
        pieces.setdefault(data.decode("latin-1").translate(characters), index)
    if missing := [byte for byte, character in characters.items() if character not in pieces]:
        raise ModelError(f"{where} has no token for the byte {missing[0]}; it is damaged")
    made = document({**(others or {}), **pieces}, [], ignore_merges=True)
    steps = [byte_level(False), split(_pattern(_trie(pieces)))]
    made["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": steps}
    made["decoder"] = byte_level(True)
    return made


def world_json(path: Path) -> str:
    """The tokenizer.json of RWKV's file."""
    made = longest_match(_read_vocabulary(path), str(path), {END: 0})
    return json.dumps(made | {"added_tokens": [added_token(0, END, True)]}, ensure_ascii=False)


def _read_vocabulary(path: Path) -> dict[int, bytes]:
    """The tokens of RWKV's file by their ids: on each line an id, a literal of Python, and its number of bytes.

    Raises `ModelError` for files that are damaged.
    """
    with open_regular(path) as file:
        data = file.read(MOST_BYTES + 1)
    if len(data) > MOST_BYTES:
        raise ModelError(f"{path} is too large; a vocabulary has at most {MOST_BYTES} bytes")
    tokens: dict[int, bytes] = {}
    for number, line in enumerate(data.decode("utf-8", "replace").rstrip("\n").split("\n"), 1):
        index, _, rest = line.partition(" ")
        literal, _, count = rest.rpartition(" ")
        try:
            token = ast.literal_eval(literal) if len(literal) <= 6 * LONGEST else None
        except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
            token = None
        token = token.encode("utf-8", "surrogatepass") if isinstance(token, str) else token
        if not isinstance(token, bytes) or index != str(number) or count != str(len(token)):
            raise ModelError(f"{path} must have token {number}, its text and its size on line {number}; it is damaged")
        tokens[number] = token
    return tokens


def _trie(pieces: Mapping[str, int]) -> Node:
    root: Node = {}
    for piece in pieces:
        node = root
        for character in piece:
            node = node.setdefault(character, {})
        node[""] = True
    return root


def _pattern(node: Node) -> str:
    """A regular expression of the tokens below a node, the longest of those that fit. Depth: of its branches."""
    options = []
    for character, following in node.items():
        if not character:
            continue
        text = _quoted(character)
        while len(following) == 1 and "" not in following:  # a run without a branch
            ((character, following),) = following.items()
            text += _quoted(character)
        options.append(text + _pattern(following))
    if not options:
        return ""
    inside = f"(?:{'|'.join(options)})"
    return f"{inside}?" if "" in node else inside


def _quoted(character: str) -> str:
    return "\\" + character if character in r"\.^$*+?{}[]|()" else character
