"""The pieces of a stream are the text of all ids decoded at once, for every kind of tokenizer and any ids."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.generation.tokenizer_kinds import KINDS, made


@pytest.mark.parametrize("skip", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150)
@given(numbers=st.lists(st.integers(0, 10**6), max_size=24), bytes_only=st.booleans())
def test_a_stream_gives_the_text_of_all_ids(kind: str, skip: bool, numbers: list[int], bytes_only: bool) -> None:
    tokenizer = made(kind)
    ids = [number % tokenizer.vocab_size for number in numbers]
    said = [tokenizer.id_of(f"<0x{byte:02X}>") for byte in "\U0001f680中é".encode()]
    if bytes_only and None not in said:  # whole characters among them, and a control token inside of one
        ids = [*ids[:3], *said[:2], 0, *said[2:], *ids[3:]]  # type: ignore[list-item]
    whole, stream, told = tokenizer.decode(ids, skip), tokenizer.stream(skip), ""
    for token in ids:
        told += stream.push(token)
        assert whole.startswith(told)
    assert told + stream.flush() == whole
