"""Parts of a tokenizer.json, made from vocabularies of other files."""

from __future__ import annotations

import base64
import binascii
from collections.abc import Iterable, Mapping
from typing import Any

from lmstate.errors import ModelError

LONGEST_PIECE = 256  # characters; a longer piece is never the result of a merge


def document(vocabulary: Mapping[str, int], merges: list[tuple[str, str]], **model: Any) -> dict[str, Any]:
    """A tokenizer.json of byte pair encoding; `model`: settings of it that differ from those of byte-level files."""
    settings: dict[str, Any] = {
        "type": "BPE",
        "dropout": None,
        "unk_token": None,
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": False,
        "byte_fallback": False,
        "ignore_merges": False,
        "vocab": vocabulary,
        "merges": merges,
    }
    none = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer", "post_processor", "decoder"))
    return {"version": "1.0", **none, "model": settings | model}


def added_token(index: int, content: str, special: bool) -> dict[str, Any]:
    """An entry of `added_tokens`."""
    spaces = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    return {"id": index, "content": content, **spaces, "special": special}


def byte_level(gpt2_pattern: bool) -> dict[str, Any]:
    """GPT-2's map of bytes to characters, as a step of a tokenizer.json."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": gpt2_pattern}


def byte_characters() -> dict[int, str]:
    """GPT-2's character for each byte: itself where it can be printed, else one from U+0100 on."""
    shown = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: chr(byte if byte in shown else next(others)) for byte in range(256)}


def byte_pieces(texts: Iterable[str], where: str) -> dict[str, int]:
    """The rank of each byte string, given in base64 in the order of ranks, under GPT-2's characters for its bytes.

    Raises `ModelError` for a text that is not base64, for a byte string that comes twice, and where one of the 256
    bytes is missing: texts with it would lose it.
    """
    characters = byte_characters()
    pieces: dict[str, int] = {}
    for rank, text in enumerate(texts):
        try:
            data = base64.b64decode(text, validate=True)
        except (binascii.Error, ValueError):
            data = b""
        if not data:
            raise ModelError(f"{where} has a token {rank} of bytes that are not base64: {text[:80]!r}")
        if pieces.setdefault(data.decode("latin-1").translate(characters), rank) != rank:
            raise ModelError(f"{where} has the token {data[:40]!r} twice; it is damaged")
    if missing := [byte for byte, character in characters.items() if character not in pieces]:
        raise ModelError(f"{where} has no token for the byte {missing[0]}; it is damaged")
    return pieces


def split(pattern: str) -> dict[str, Any]:
    """A step of a pre-tokenizer that parts a text at the matches of a regular expression."""
    return {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}


def all_splits(vocabulary: Mapping[str, int], scores: Mapping[int, float]) -> list[tuple[str, str]]:
    """The merges of a vocabulary that lists none: every split of every piece, the piece of the best score first.

    SentencePiece and tiktoken join the two neighbors whose joint piece comes first. Without scores that is the order of
    ids.
    """
    ranked = sorted(vocabulary.items(), key=lambda item: (-scores.get(item[1], 0.0), item[1]))
    return [
        (piece[:cut], piece[cut:])
        for piece, _ in ranked
        if len(piece) <= LONGEST_PIECE
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]


def surrounding(begin: str | None, end: str | None, vocabulary: Mapping[str, int]) -> dict[str, Any]:
    """The post-processor that puts the begin and end tokens around a text."""
    text: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    first: list[dict[str, Any]] = [] if begin is None else [{"SpecialToken": {"id": begin, "type_id": 0}}]
    last: list[dict[str, Any]] = [] if end is None else [{"SpecialToken": {"id": end, "type_id": 0}}]
    specials = {
        token: {"id": token, "ids": [vocabulary[token]], "tokens": [token]}
        for token in (begin, end)
        if token is not None
    }
    pair = [*first, *text, *last, {"Sequence": {"id": "B", "type_id": 0}}, *last]
    return {"type": "TemplateProcessing", "single": [*first, *text, *last], "pair": pair, "special_tokens": specials}
