"""Beam search: the answers and scores of transformers, the same bits in any batch, and a state that holds the best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

import lmstate
from lmstate.generation import BeamParams, BeamSearch
from tests.generation.fake_model import FakeTokenizer
from tests.zoo import ENCODERS, ours, pair, text

DECODERS = ["llama", "gemma3", "qwen3_5", "mamba2", "lfm2", "granitemoehybrid", "deepseek_v3", "jamba"]
READERS = ["t5", "bart", "marian", "t5gemma"]
ENDS = (3, 17, 40, 61, 90)
OPTIONS: list[dict[str, Any]] = [
    {"num_beams": 3},
    {"num_beams": 4, "num_return_sequences": 3, "length_penalty": 2.0},
    {"num_beams": 2, "length_penalty": 0.0, "early_stopping": "never"},
    {"num_beams": 4, "num_return_sequences": 4, "early_stopping": True},
    {"num_beams": 5, "length_penalty": -1.0, "num_return_sequences": 2},
    {"num_beams": 3, "length_penalty": 1.5, "early_stopping": "never", "num_return_sequences": 3},
]
PROMPTS = [text(9)[0].tolist(), text(23, seed=1)[0].tolist(), [7]]


def ending(model: lmstate.Model, ends: Sequence[int] = ENDS) -> lmstate.Model:
    return replace(model, eos_ids=frozenset(ends))


def theirs_of(model: Any, prompt: list[int], source: bool, new: int, **options: Any) -> tuple[list[list[int]], Any]:
    """Answers of transformers without what ended them, and their scores."""
    if model.config.model_type == "t5":  # its cache has a layer for each of the encoder's
        model.config.num_layers = model.config.num_decoder_layers
    model.generation_config.eos_token_id, model.generation_config.pad_token_id = list(ENDS), 0
    with torch.no_grad():
        found = model.generate(
            torch.tensor([prompt]), attention_mask=torch.ones(1, len(prompt), dtype=torch.long), do_sample=False,
            max_new_tokens=new, return_dict_in_generate=True, output_scores=True, **options,
        )  # fmt: skip
    begun = 1 if source else len(prompt)
    answers = []
    for row, beams in zip(found.sequences.tolist(), found.beam_indices.tolist()):
        count = sum(beam >= 0 for beam in beams)
        answer = row[begun : begun + count]
        answers.append(answer[:-1] if answer[-1] in ENDS else answer)
    return answers, found.sequences_scores


@pytest.mark.parametrize("case", [*DECODERS, *READERS])
def test_answers_and_scores_are_those_of_transformers(case: str) -> None:
    theirs, model = pair(case)
    model, source = ending(model), case in ENCODERS
    lengths = set()
    for prompt in PROMPTS:
        for options in OPTIONS:
            expected, scores = theirs_of(theirs, prompt, source, 12, **options)
            beams = BeamParams(**options)
            fed = prompt
            state = model.new_state()
            if source:
                state.condition(0, prompt)
                fed = [model.start_id]
            search = BeamSearch(model, [fed], state, beams=beams, max_new_tokens=12)
            for _ in search:
                pass
            assert search.answers == [expected], options
            torch.testing.assert_close(torch.tensor(search.scores[0]), scores, atol=1e-4, rtol=1e-4)
            lengths |= {len(answer) for answer in expected}
    assert len(lengths) > 1, "some answers end before the limit"


def test_penalty_bias_and_least_length_are_those_of_transformers() -> None:
    theirs, model = pair("llama")
    options = {"num_beams": 3, "num_return_sequences": 3}
    expected, scores = theirs_of(
        theirs, PROMPTS[0], False, 12, **options, repetition_penalty=1.3, min_new_tokens=6,
        sequence_bias=[[[8], 4.0], [[30], -3.0]],
    )  # fmt: skip
    search = BeamSearch(
        ending(model), [PROMPTS[0]], beams=BeamParams(**options), max_new_tokens=12, repetition_penalty=1.3,
        min_tokens=6, logit_bias={8: 4.0, 30: -3.0},
    )  # fmt: skip
    for _ in search:
        pass
    assert search.answers == [expected] and all(len(answer) >= 6 for answer in expected)
    torch.testing.assert_close(torch.tensor(search.scores[0]), scores, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "gemma3", "qwen3_5", "mamba2", "t5"])
@pytest.mark.parametrize("options", OPTIONS[:4], ids=str)
def test_a_batch_answers_as_each_alone_and_the_state_holds_the_best(case: str, options: dict[str, Any]) -> None:
    model = ending(ours(case))

    def searched(rows: Sequence[list[int]]) -> tuple[BeamSearch, lmstate.State]:
        state = model.new_state(rows=len(rows))
        for row, prompt in enumerate(rows):
            if case in ENCODERS:
                state.condition(row, prompt)
        fed = [[model.start_id] for _ in rows] if case in ENCODERS else rows
        search = BeamSearch(model, fed, state, beams=BeamParams(**options), max_new_tokens=9)
        for _ in search:
            pass
        return search, state

    together, state = searched(PROMPTS)
    for row, prompt in enumerate(PROMPTS):
        alone, own = searched([prompt])
        assert alone.answers[0] == together.answers[row]
        assert alone.scores[0] == together.scores[row], "to the bit"
        begun = [model.start_id] if case in ENCODERS else prompt
        assert state.tokens(row) == own.tokens(0) == [*begun, *together.answers[row][0]]
    fresh = model.new_state(rows=len(PROMPTS))
    for row, prompt in enumerate(PROMPTS):
        if case in ENCODERS:
            fresh.condition(row, prompt)
    expected = model([state.tokens(row) for row in range(state.rows)], fresh)
    assert torch.equal(model([[] for _ in PROMPTS], state), expected)
    state.rewind(1, 1)
    fresh.rewind(1, 1)
    assert torch.equal(model([[], [5], []], state), model([[], [5], []], fresh))


def test_a_search_goes_on_from_what_a_state_holds() -> None:
    model = ending(ours("qwen3_5"))
    state = model.new_state()
    model([PROMPTS[1][:10]], state)
    state.queue(0, PROMPTS[1][10:12])
    given = model.generate(PROMPTS[1][12:], state, num_beams=3, max_new_tokens=9, return_ids=True)
    assert given == model.generate(PROMPTS[1], num_beams=3, max_new_tokens=9, return_ids=True)


@pytest.mark.parametrize("case", ["gemma3", "mamba2"])
@pytest.mark.parametrize("fails", [False, True])
def test_a_search_that_ends_early_leaves_the_prompts(case: str, fails: bool) -> None:
    model = ending(ours(case), ())
    state = model.new_state(rows=2)
    search = BeamSearch(model, PROMPTS[:2], state, beams=BeamParams(num_beams=3), max_new_tokens=9)
    pieces = iter(search)
    next(pieces), next(pieces)
    assert state.rows > 2
    if fails:
        with pytest.raises(KeyError):
            pieces.throw(KeyError("a fault"))  # type: ignore[attr-defined]
    else:
        pieces.close()  # type: ignore[attr-defined]
    assert search.report().finished == (None, None)
    assert [state.tokens(row) for row in range(state.rows)] == PROMPTS[:2]
    assert torch.equal(model([[5], [5]], state), model([[*prompt, 5] for prompt in PROMPTS[:2]], model.new_state(2)))


def test_a_full_state_ends_the_answers() -> None:
    model = ending(ours("llama"), ())
    state = model.new_state(capacity=14)
    (answers,) = model.generate(
        [PROMPTS[0]], state, num_beams=3, num_return_sequences=3, max_new_tokens=9, return_ids=True
    )
    expected = model.generate(PROMPTS[0], num_beams=3, num_return_sequences=3, max_new_tokens=6, return_ids=True)
    assert answers == expected and {len(answer) for answer in answers} == {6}
    assert state.tokens(0) == [*PROMPTS[0], *answers[0][:5]]


def test_texts_of_prompts_and_of_sources() -> None:
    model = replace(ours("llama"), _tokenizer=FakeTokenizer(), eos_ids=frozenset(ENDS))  # type: ignore[arg-type]
    texts = model.generate(PROMPTS, num_beams=3, max_new_tokens=6)
    ids = model.generate(PROMPTS, num_beams=3, max_new_tokens=6, return_ids=True)
    assert texts == [model.tokenizer.decode(answer) for answer in ids]
    several = model.generate(PROMPTS[0], num_beams=3, num_return_sequences=2, max_new_tokens=6)
    assert several[0] == texts[0] and len(several) == 2
    reader = ending(ours("bart"))
    begun = reader.generate([5], source=PROMPTS[1], num_beams=3, max_new_tokens=6, return_ids=True)
    state = reader.new_state()
    state.condition(0, PROMPTS[1])
    search = BeamSearch(reader, [[reader.start_id, 5]], state, beams=BeamParams(num_beams=3), max_new_tokens=6)
    assert search.best(True) == [begun]


@pytest.mark.parametrize(
    "options, why",
    [
        ({"num_beams": 0}, "num_beams is 0; it must be 1 to"),
        ({"num_beams": 2, "num_return_sequences": 3}, "num_return_sequences is 3"),
        ({"num_beams": 2, "length_penalty": float("nan")}, "length_penalty is nan"),
        ({"num_beams": 2, "early_stopping": "always"}, "early_stopping is 'always'"),
        ({"length_penalty": 0.5}, "are of a beam search"),
        ({"num_beams": 2, "temperature": 0.5}, "does not follow temperature"),
        ({"num_beams": 2, "regex": "a", "logprobs": 2}, "does not follow logprobs and regex"),
        ({"num_beams": 2, "max_new_tokens": 0}, "max_new_tokens is 0"),
        ({"num_beams": 2, "draft": "text"}, "verifies no drafts"),
    ],
)
def test_what_a_search_cannot_do_is_refused(options: dict[str, Any], why: str) -> None:
    model = ours("llama")
    state = model.new_state()
    with pytest.raises(ValueError, match=why):
        model.generate(PROMPTS[0], state, return_ids=True, **options)
    assert state.lengths == [0]


def test_static_states_are_refused() -> None:
    model = ours("llama")
    with pytest.raises(lmstate.UnsupportedError, match="a beam search forks them"):
        model.generate([PROMPTS[0]], model.new_state(static=True, capacity=64), num_beams=2, return_ids=True)
