"""Answers as token ids, without a tokenizer, and in states that get full."""

from __future__ import annotations

import dataclasses

import pytest

import lmstate
from lmstate.errors import CapacityError
from lmstate.generation import Generation
from tests.zoo import VOCAB, ours


@pytest.fixture(scope="module")
def model() -> lmstate.Model:
    return dataclasses.replace(ours("llama"), _tokenizer=None, eos_ids=frozenset())


def test_ids_come_without_a_tokenizer_and_are_those_of_the_state(model: lmstate.Model) -> None:
    state = model.new_state()
    ids = model.generate([5, 6, 7], state, max_new_tokens=9, return_ids=True)
    assert len(ids) == 9 and all(0 <= token < VOCAB for token in ids)
    assert state.tokens(0) == [5, 6, 7, *ids]
    assert model.generate([[5, 6, 7], [8]], max_new_tokens=9, return_ids=True)[0] == ids


def test_text_without_a_tokenizer_is_refused(model: lmstate.Model) -> None:
    with pytest.raises(ValueError, match="return_ids=True"):
        model.generate([5, 6, 7])
    with pytest.raises(ValueError, match="give token ids"):
        model.generate("text", return_ids=True)
    with pytest.raises(ValueError, match="stop strings"):
        model.generate([5], stop="x", return_ids=True)


@pytest.mark.parametrize("draft", ["auto", None])
def test_a_full_state_ends_the_answer_with_what_there_is(model: lmstate.Model, draft: str | None) -> None:
    wanted = model.generate([5, 6, 7], max_new_tokens=20, return_ids=True, draft=None)
    state = model.new_state(capacity=10)
    generation = Generation(model, [[5, 6, 7]], state, max_new_tokens=20, draft=draft)
    assert list(generation) == [] and generation.report().finished == ("capacity",)
    assert generation.ids == [wanted[:8]]  # the last one is known, and has no room
    assert state.tokens(0) == [5, 6, 7, *wanted[:7]]


def test_a_full_row_does_not_end_the_others(model: lmstate.Model) -> None:
    state = model.new_state(rows=2, capacity=10)
    generation = Generation(model, [list(range(1, 9)), [3]], state, max_new_tokens=6)
    assert not list(generation) and generation.report().finished == ("capacity", "length")
    assert generation.ids[1] == model.generate([3], max_new_tokens=6, return_ids=True)


def test_messages_without_a_tokenizer_are_refused_with_what_to_do(model: lmstate.Model) -> None:
    with pytest.raises(ValueError, match="the model has no tokenizer: give token ids"):
        model.generate([{"role": "user", "content": "Hello"}], return_ids=True)


def test_a_prompt_that_does_not_fit_is_refused(model: lmstate.Model) -> None:
    state = model.new_state(capacity=3)
    with pytest.raises(CapacityError):
        model.generate([1, 2, 3, 4], state, return_ids=True)
    assert state.lengths == [0]
