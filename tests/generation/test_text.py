"""The text of an answer, through real tokenizers: it goes on from the prompt as if both had been decoded together."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmstate.generation.row import AnswerText
from lmstate.text.tokenizer import Tokenizer, TokenizerFiles


def byte_level() -> Tokenizer:
    """GPT-2's way: a token is a string of bytes, the space in front belongs to the word."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models, pre_tokenizers

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġthe", "Ġri", "ver", "âĤ", "ðŁĺ"]
    inner = Inner(models.BPE({token: index for index, token in enumerate([*letters, *words])}, []))
    inner.decoder = decoders.ByteLevel()
    return Tokenizer(TokenizerFiles(inner.to_str(), {}))


def sentencepiece() -> Tokenizer:
    """Llama's way: bytes as tokens of their own, and the space at the beginning of a text is dropped."""
    from tokenizers import Tokenizer as Inner
    from tokenizers import decoders, models

    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁ri", "ver", "e", "€"]
    inner = Inner(models.BPE({token: index for index, token in enumerate(tokens)}, [], byte_fallback=True))
    inner.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(TokenizerFiles(json.dumps(json.loads(inner.to_str())), {}))


TOKENIZERS = {"byte-level": byte_level(), "sentencepiece": sentencepiece()}


@pytest.mark.parametrize("kind", TOKENIZERS)
@given(data=st.data())
def test_answer_goes_on_from_the_prompt(kind: str, data: st.DataObject) -> None:
    tokenizer = TOKENIZERS[kind]
    words = st.integers(max(0, tokenizer.vocab_size - 6), tokenizer.vocab_size - 1)
    tokens = st.lists(words | st.integers(1, tokenizer.vocab_size - 1), max_size=8)
    prompt, ids = data.draw(tokens.filter(bool)), data.draw(tokens)
    whole, before = tokenizer.decode(prompt + ids), tokenizer.decode(prompt)
    answer = AnswerText(tokenizer.stream(), (), before=prompt)
    pieces = [answer.take(token) for token in ids] + [answer.finish()]
    assert "".join(pieces) == answer.text
    if "\ufffd" not in before and "\ufffd" not in whole:
        assert before + answer.text == whole
    assert not any("\ufffd" in piece for piece in pieces) or "\ufffd" in whole


def test_a_space_after_the_prompt_is_not_lost() -> None:
    tokenizer = TOKENIZERS["sentencepiece"]
    the, river = tokenizer.id_of("▁the"), [tokenizer.id_of("▁ri"), tokenizer.id_of("ver")]
    answer = AnswerText(tokenizer.stream(), (), before=[the])
    assert "".join(answer.take(token) for token in river) == " river"
