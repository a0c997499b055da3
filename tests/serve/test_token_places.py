"""The offset of a token, and its name, agree with the text, for every kind of tokenizer."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate.serve.openai.token_places import TokenPlaces
from tests.generation.tokenizer_kinds import made, raw_bytes

KINDS = ("byte-level", "sentencepiece", "sentencepiece-unigram", "sentencepiece-no-strip", "metaspace-never", "none")


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(numbers=st.lists(st.integers(0, 10**6), max_size=16), at=st.integers(0, 16))
def test_the_name_of_a_token_stands_at_its_offset(kind: str, numbers: list[int], at: int) -> None:
    tokenizer = made(kind)
    said = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in "\U0001f680\né".encode()]
    ids = [number % tokenizer.vocab_size for number in numbers]
    if None not in said:  # whole characters of bytes
        ids = [*ids[:at], *said, *ids[at:]]  # type: ignore[list-item]
    text, places = tokenizer.decode(ids), TokenPlaces(tokenizer)
    placed = [places.place(token, raw_bytes(tokenizer, token)) for token in ids]
    assert [place.offset for place in placed] == sorted(place.offset for place in placed)
    if "\ufffd" in text:
        return  # bytes that are no characters have no place of their own
    for token, place in zip(ids, placed):
        if token in tokenizer.special_ids or place.name.startswith("bytes:"):
            continue
        assert text.startswith(place.name, place.offset), (text, place)


def test_an_answer_begins_behind_its_prompt() -> None:
    tokenizer = made("sentencepiece")
    go = tokenizer.id_of("\u2581Go")
    assert go is not None
    places = TokenPlaces(tokenizer, [go], start=2)
    assert places.place(go, b" Go") == (" Go", 2)
    assert TokenPlaces(tokenizer).place(go, b" Go") == ("Go", 0)
