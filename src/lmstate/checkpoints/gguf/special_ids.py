"""The ids of special tokens in a GGUF file's metadata."""

from __future__ import annotations

from lmstate.checkpoints.config import Config

# Ids of a SentencePiece vocabulary whose file names none, as llama.cpp takes them, by the kind of the tokenizer.
SENTENCEPIECE_IDS = {"llama": {"unknown": 0, "bos": 1, "eos": 2}, "t5": {"padding": 0, "eos": 1, "unknown": 2}}


def special_id(metadata: Config, name: str, vocab_size: int, notes: list[str] | None = None) -> int | None:
    """The id that a file gives for a special token ("bos", "unknown", ...); None without one.

    Converters wrote ids past the vocabulary, and -1 for none. Such an id is set aside, with a note. Raises `ModelError`
    for anything but a whole number.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    default = SENTENCEPIECE_IDS.get(metadata.str("tokenizer.ggml.model", default=""), {}).get(name)
    value = metadata.int(key, -(2**63), 2**64, default=default)
    if value is None or 0 <= value < vocab_size:
        return value
    if notes is not None and value not in (-1, 2**32 - 1):
        notes.append(f"{key} is {value}, past the vocabulary of {vocab_size} tokens; it is set aside")
    return default if default is not None and default < vocab_size else None
