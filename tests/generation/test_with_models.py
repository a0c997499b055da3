"""Generation on real states: afterwards a state is one that was fed exactly the tokens that it says it holds."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import lmstate
from lmstate.generation import Generation, generate, stream
from tests.generation.fake_model import FakeTokenizer
from tests.zoo import pair

NAMES = ["llama", "gemma3", "gemma3n", "qwen3_5", "mamba2", "lfm2"]
PROMPT = [5, 40, 33, 7, 61, 90, 12]


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest) -> lmstate.Model:
    return replace(pair(request.param)[1], _tokenizer=FakeTokenizer(), eos_ids=frozenset())  # type: ignore[arg-type]


def check(model: lmstate.Model, state: lmstate.State) -> None:
    """The state's next logits are those of a fresh state that was fed its tokens."""
    rows = range(state.rows)
    fresh = model([state.tokens(row) for row in rows], model.new_state(rows=state.rows))
    torch.testing.assert_close(model([[] for _ in rows], state), fresh, atol=1e-4, rtol=1e-4)


def test_greedy_equals_the_argmax_of_whole_forwards(model: lmstate.Model) -> None:
    state = model.new_state()
    generate(model, PROMPT, state, max_new_tokens=20)
    held = state.tokens(0)
    logits = model([held])[0]
    assert logits.argmax(-1).tolist()[len(PROMPT) - 1 : -1] == held[len(PROMPT) :]
    check(model, state)


@pytest.mark.parametrize("length", [1, 2, 5])
def test_stop_strings_are_rewound_exactly(model: lmstate.Model, length: int) -> None:
    whole = generate(model, PROMPT, max_new_tokens=30)
    stop = whole[8 : 8 + length]
    state = model.new_state()
    text = generate(model, PROMPT, state, max_new_tokens=30, stop=stop)
    assert text == whole[: whole.index(stop)]
    assert model.tokenizer.decode(state.tokens(0)[len(PROMPT) :]) == text  # a token is a character here
    check(model, state)


def test_a_stream_closed_early_can_be_continued(model: lmstate.Model) -> None:
    whole = generate(model, PROMPT, max_new_tokens=12)
    state = model.new_state()
    pieces = stream(model, PROMPT, state, max_new_tokens=12)
    begin = next(pieces) + next(pieces) + next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert begin + generate(model, [], state, max_new_tokens=9) == whole
    check(model, state)


def test_parts_equal_the_whole(model: lmstate.Model) -> None:
    whole, state = generate(model, PROMPT, max_new_tokens=15), model.new_state()
    parts = generate(model, PROMPT[:3], state, max_new_tokens=0)
    parts += generate(model, PROMPT[3:], state, max_new_tokens=6) + generate(model, [], state, max_new_tokens=9)
    assert parts == whole


@pytest.mark.parametrize("options", [{}, {"temperature": 1.0, "top_p": 0.9, "seed": 7}])
def test_a_ragged_batch_equals_each_row_alone(model: lmstate.Model, options: dict) -> None:
    prompts = [PROMPT, [9], PROMPT[2:] * 3]
    stop = generate(model, prompts[1], max_new_tokens=12, **options)[5:7]
    state = model.new_state(rows=3)
    texts = generate(model, prompts, state, max_new_tokens=12, stop=stop, **options)
    check(model, state)
    if not options:
        assert texts == [generate(model, prompt, max_new_tokens=12, stop=stop) for prompt in prompts]
    else:  # a row draws from the stream of its place: alone there, beside rows that differ
        for row, prompt in enumerate(prompts):
            others = [[3], [50, 50], [8]]
            others[row] = prompt
            assert generate(model, others, max_new_tokens=12, stop=stop, **options)[row] == texts[row]


def test_a_full_state_ends_the_answer_and_holds_what_was_computed(model: lmstate.Model) -> None:
    whole = generate(model, PROMPT, max_new_tokens=12)
    state = model.new_state(capacity=len(PROMPT) + 4)
    text = "".join(stream(model, PROMPT, state, max_new_tokens=12))
    assert text == whole[: len(text)] and len(text) >= 4
    assert state.lengths == [len(PROMPT) + 4]
    assert model.tokenizer.decode(state.tokens(0)[len(PROMPT) :]) == whole[:4]
    check(model, state)


def test_pending_tokens_are_refused(model: lmstate.Model) -> None:
    state = model.new_state()
    model([PROMPT], state, commit=False)
    with pytest.raises(lmstate.PendingError, match="commit or discard"):
        generate(model, PROMPT, state)
    state.discard()
    assert state.lengths == [0]


def test_the_repetition_penalty_reaches_back_into_the_state(model: lmstate.Model) -> None:
    options = {"max_new_tokens": 10, "repetition_penalty": 1.8}
    whole, state = generate(model, PROMPT, **options), model.new_state()
    generate(model, PROMPT[:4], state, max_new_tokens=0)
    assert generate(model, PROMPT[4:], state, **options) == whole
    assert whole != generate(model, PROMPT, max_new_tokens=10)


def test_a_report_tells_what_was_computed(model: lmstate.Model) -> None:
    state = model.new_state()
    generate(model, PROMPT, state, max_new_tokens=4)
    second = Generation(model, [[1, 2]], state, max_new_tokens=3)
    list(second)
    report = second.report()
    assert (report.fed, report.reused, report.generated) == (3, len(PROMPT) + 3, 3)  # one token was queued
