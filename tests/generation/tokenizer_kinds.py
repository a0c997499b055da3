"""Small tokenizers of every kind, made in memory: byte-level BPE, SentencePiece's and WordPiece's."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from lmstate.text import tokenizer as text

BYTES = [f"<0x{i:02X}>" for i in range(256)]
SPACE = "\u2581"
WORDS = ["<s>", "</s>", *BYTES, SPACE, f"{SPACE}Go", "o", "G", "\U0001f680", "中", f"{SPACE}{SPACE}"]
SPM = decoders.Sequence(
    [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)


def byte_level() -> Tokenizer:
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    inner = Tokenizer(models.BPE({piece: i for i, piece in enumerate(["<s>", "</s>", *letters])}, []))
    inner.decoder = decoders.ByteLevel()
    return inner


def pieces(decoder: decoders.Decoder, unigram: bool = False) -> Tokenizer:
    if unigram:
        inner = Tokenizer(models.Unigram([(word, -1.0) for word in WORDS], 0, byte_fallback=True))
    else:
        inner = Tokenizer(models.BPE({word: i for i, word in enumerate(WORDS)}, [], byte_fallback=True))
    inner.normalizer = normalizers.Replace(" ", SPACE)
    inner.decoder = decoder
    return inner


def word_piece() -> Tokenizer:
    words = ["<s>", "</s>", "[UNK]", "un", "##aff", "##able", ".", "n't", "中", "\U0001f680"]
    inner = Tokenizer(models.WordPiece({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    inner.decoder = decoders.WordPiece()
    return inner


KINDS = {
    "byte-level": byte_level,
    "sentencepiece": lambda: pieces(SPM),
    "sentencepiece-unigram": lambda: pieces(SPM, unigram=True),
    "sentencepiece-no-strip": lambda: pieces(decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()])),
    "metaspace": lambda: pieces(decoders.Metaspace()),
    "metaspace-never": lambda: pieces(decoders.Metaspace(prepend_scheme="never")),
    "metaspace-bytes": lambda: pieces(decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "wordpiece": word_piece,
    "none": lambda: pieces(decoders.Fuse()),
}


@cache
def made(kind: str) -> text.Tokenizer:
    """The tokenizer of this kind, whose first two tokens are the control tokens `<s>` and `</s>`."""
    inner = KINDS[kind]()
    inner.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in ("<s>", "</s>")])
    with TemporaryDirectory() as folder:
        path = Path(folder) / "tokenizer.json"
        inner.save(str(path))
        return text.Tokenizer(text.TokenizerFiles(path, {}))


def raw_bytes(tokenizer: text.Tokenizer, token: int) -> bytes:
    """The bytes that a token stands for."""
    word = tokenizer._inner.id_to_token(token)
    if token in tokenizer._byte_ids:
        return bytes([int(word[3:5], 16)])
    letters = {letter: byte for byte, letter in byte_letters().items()}
    if "##aff" not in tokenizer.vocabulary and SPACE not in tokenizer.vocabulary and word not in ("<s>", "</s>"):
        return bytes(letters[letter] for letter in word)
    return word.replace(SPACE, " ").encode()


def byte_letters() -> dict[int, str]:
    """The letter of each byte in byte-level BPE (GPT-2)."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in shown]
    return {**{byte: chr(byte) for byte in shown}, **{byte: chr(256 + i) for i, byte in enumerate(others)}}
