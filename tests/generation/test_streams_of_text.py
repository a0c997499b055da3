"""The pieces of a stream are the text of all ids decoded at once, for every kind of tokenizer and any ids."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

import lmstate.text.tokenizer as text

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


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, text.Tokenizer]:
    made = {}
    for kind, build in KINDS.items():
        inner = build()
        inner.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in ("<s>", "</s>")])
        path = Path(tmp_path_factory.mktemp(kind)) / "tokenizer.json"
        inner.save(str(path))
        made[kind] = text.Tokenizer(text.TokenizerFiles(path, {}))
    return made


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(numbers=st.lists(st.integers(0, 10**6), max_size=24), bytes_only=st.booleans())
def test_a_stream_gives_the_text_of_all_ids(
    tokenizers: dict[str, text.Tokenizer], kind: str, skip: bool, numbers: list[int], bytes_only: bool
) -> None:
    tokenizer = tokenizers[kind]
    ids = [number % tokenizer.vocab_size for number in numbers]
    said = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in "\U0001f680中é".encode()]
    if bytes_only and None not in said:  # whole characters among them, and a control token inside of one
        ids = [*ids[:3], *said[:2], 0, *said[2:], *ids[3:]]  # type: ignore[list-item]
    whole, stream, told = tokenizer.decode(ids, skip), tokenizer.stream(skip), ""
    for token in ids:
        told += stream.push(token)
        assert whole.startswith(told)
    assert told + stream.flush() == whole
