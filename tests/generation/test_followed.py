"""Several likeliest tokens in one go: the text, the state and the ends are those of one token after another."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

import lmstate
from lmstate.generation import Generation
from tests.engine.alone import alone
from tests.followed import follow_by_calls
from tests.generation.fake_model import FakeTokenizer
from tests.zoo import ours, pair, text

PROMPTS = [[5, 40, 33, 7], [61, 90], [12, 3, 8, 44, 2]]


def ended(model: lmstate.Model, prompts: list[list[int]] = PROMPTS, **options: Any) -> tuple[Any, lmstate.State]:
    """What an answer is, and the state behind it."""
    state = model.new_state(len(prompts))
    run = Generation(model, prompts, state, **options)
    for _ in run:
        pass
    return (run.texts, run.ids, run.report().finished), state


@pytest.mark.parametrize("case", ["llama", "mistral", "mamba2"])
@pytest.mark.parametrize(
    "options", [{"max_new_tokens": 13}, {"max_new_tokens": 30, "stop": True}], ids=["length", "stop"]
)
def test_answers_are_those_of_single_tokens(
    case: str, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = replace(pair(case)[1], _tokenizer=FakeTokenizer(), eos_ids=frozenset())  # type: ignore[arg-type]
    if options.get("stop"):
        texts = ended(model, max_new_tokens=30)[0][0]
        options = {**options, "stop": [texts[0][5:7], texts[1][10:11]]}
    longest = max(ended(model, **options)[0][1], key=len)
    model = replace(model, eos_ids=frozenset([longest[len(longest) // 2]]))
    expected, before = ended(model, draft=None, **options)
    asked = follow_by_calls(monkeypatch)
    for draft in (None, "text"):
        found, state = ended(model, draft=draft, **options)
        assert found == expected
        for row in range(state.rows):
            assert state.tokens(row) == before.tokens(row)
        again = [[1]] * state.rows
        assert torch.equal(model(again, state, commit=False), model(again, before, commit=False))
        state.discard(), before.discard()
    assert asked and max(asked) > 8


def test_a_stream_closed_early_keeps_what_was_given(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(pair("llama")[1], _tokenizer=FakeTokenizer(), eos_ids=frozenset())  # type: ignore[arg-type]
    whole = model.generate(PROMPTS[0], max_new_tokens=12)
    follow_by_calls(monkeypatch)
    state = model.new_state()
    pieces = model.stream(PROMPTS[0], state, max_new_tokens=12, draft=None)
    begin = next(pieces) + next(pieces) + next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert begin + model.generate([], state, max_new_tokens=9) == whole


@pytest.mark.parametrize("options", [{"temperature": 0.8, "seed": 3}, {"repetition_penalty": 1.2}, {"min_tokens": 12}])
def test_rows_that_choose_otherwise_go_token_by_token(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    asked = follow_by_calls(monkeypatch)
    ended(replace(ours("llama"), eos_ids=frozenset()), max_new_tokens=12, draft=None, **options)
    assert not asked


def test_answers_of_an_engine_are_those_that_each_gets_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    model, asked = ours("llama"), follow_by_calls(monkeypatch)
    prompts = [text(length, seed=length)[0].tolist() for length in (3, 40, 17, 90)]
    with lmstate.Engine(model, rows=3, draft=None) as engine:
        for sampled in (False, True):
            requests = [
                engine.submit(prompt, max_new_tokens=5 + 4 * i, ignore_eos=True, temperature=0.7 * (sampled and i == 3))
                for i, prompt in enumerate(prompts)
            ]
            for i, (prompt, request) in enumerate(zip(prompts, requests)):
                got = request.result(600)
                if not (sampled and i == 3):
                    assert got.tokens == [alone(model, prompt, 5 + 4 * i, ends=frozenset())[0]]
            assert asked, "no step was followed"


def test_a_processor_follows_nothing() -> None:
    model = ours("llama")
    state = model.new_state()
    assert model.follow([[1]], state, 8) is None
    assert state.lengths == [0] and not any(state.pending)
