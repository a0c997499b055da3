"""The generation loop: what it returns, what it streams, and what the state holds afterwards."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate.errors import StateError
from lmstate.generation.generate import Generation, generate, stream
from lmstate.generation.params import SamplingParams
from lmstate.generation.sampling import Sampler
from tests.generation.fake_model import EOS, PIECES, FakeModel, FakeState, FakeTokenizer, ids, saying

PROMPT = ids("Q:")
TOKEN = st.integers(1, len(PIECES) - 1)


def texts_of(tokens: list[int]) -> str:
    return FakeTokenizer().decode(tokens)


def test_greedy_text_is_the_argmax_chain() -> None:
    model, state = FakeModel(), FakeState(1)
    text = generate(model, PROMPT, state, max_new_tokens=12)
    chain = list(PROMPT)
    check = FakeModel()
    for _ in range(12):
        chain.append(int(check._logits(chain).argmax()))
    assert state.tokens(0) == chain
    assert text == texts_of(chain[len(PROMPT) :])


def test_the_last_token_is_queued_and_costs_no_forward() -> None:
    model, state = FakeModel(), FakeState(1)
    generate(model, PROMPT, state, max_new_tokens=5)
    assert model.calls == 5
    assert len(state.queued[0]) == 1 and state.lengths == [len(PROMPT) + 5]


@settings(max_examples=60, deadline=None)
@given(cuts=st.lists(st.integers(0, 6), min_size=1, max_size=4), seed=st.none() | st.integers(0, 9))
def test_generating_in_parts_equals_generating_at_once(cuts: list[int], seed: int | None) -> None:
    """Continuing a state with an empty prompt goes on exactly where the last call stopped (greedy)."""
    whole, parts = FakeState(1), FakeState(1)
    expected = generate(FakeModel(), PROMPT, whole, max_new_tokens=sum(cuts))
    model = FakeModel()
    generation_texts = [generate(model, PROMPT, parts, max_new_tokens=cuts[0])]
    generation_texts += [generate(model, [], parts, max_new_tokens=cut) for cut in cuts[1:]]
    assert parts.tokens(0) == whole.tokens(0)
    assert "\ufffd" in expected or "".join(generation_texts) == expected  # a cut may fall inside a character


@settings(max_examples=150, deadline=None)
@given(
    answer=st.lists(TOKEN, max_size=14),
    stops=st.lists(st.text("EN D of the€😀hSTOP", min_size=1, max_size=4), max_size=3),
    limit=st.integers(1, 16),
)
def test_stream_equals_generate_and_the_state_holds_the_tokens_of_the_text(
    answer: list[int], stops: list[str], limit: int
) -> None:
    model, state, streamed = FakeModel(saying(PROMPT, answer)), FakeState(1), FakeState(1)
    text = generate(model, PROMPT, state, max_new_tokens=limit, stop=stops)
    pieces = list(stream(model, PROMPT, streamed, max_new_tokens=limit, stop=stops))
    assert "".join(pieces) == text and all(pieces)
    assert state.tokens(0) == streamed.tokens(0)
    full = texts_of(answer[:limit])
    assert full.startswith(text)
    assert not any(stop in text for stop in stops)
    held = state.tokens(0)[len(PROMPT) :]
    assert held == answer[: len(held)]
    if not any(stop in full for stop in stops):
        assert text == full
        assert held == answer[:limit]
    else:
        assert any(full.startswith(text + stop) for stop in stops)
        # Wholly before the stop string, and the next token is not (or it has no text of its own).
        assert text.startswith(texts_of(held).rstrip("\ufffd"))
        following = texts_of(answer[: len(held) + 1])
        assert len(following) > len(text) or following == texts_of(held) or following.endswith("\ufffd")


def test_a_stop_string_across_tokens_is_rewound_out_of_the_state() -> None:
    answer = ids(b"hello", b" the", b" END", b"D of", "never")
    model, state = FakeModel(saying(PROMPT, answer)), FakeState(1)
    assert list(stream(model, PROMPT, state, stop="theEND")) == ["hello", " ", "the END", "D of", *"never"]
    state = FakeState(1)
    pieces = list(stream(model, PROMPT, state, stop=["the END"]))
    assert pieces == ["hello", " "]
    assert state.tokens(0) == PROMPT + ids(b"hello")
    state = FakeState(1)
    assert generate(model, PROMPT, state, stop=["DD ofn"]) == "hello the EN"
    assert state.tokens(0) == PROMPT + ids(b"hello", b" the")


def test_pieces_never_end_inside_a_character() -> None:
    answer = ids(b"hello", b" \xf0\x9f", b"\x98\x80", b"\xe2\x82", b"\xac!")
    assert list(stream(FakeModel(saying(PROMPT, answer)), PROMPT)) == ["hello", " ", "😀", "€!"]


def test_half_a_character_before_the_stop_string_leaves_the_state_too() -> None:
    answer = ids(b"hello", b"\xe2\x82", b"\xac!")
    state = FakeState(1)
    assert generate(FakeModel(saying(PROMPT, answer)), PROMPT, state, stop="€") == "hello"
    assert state.tokens(0) == PROMPT + ids(b"hello")


def test_end_of_sequence_is_neither_in_the_text_nor_in_the_state() -> None:
    model, state = FakeModel(saying(PROMPT, ids(b"hello"))), FakeState(1)
    assert generate(model, PROMPT, state) == "hello"
    assert state.tokens(0) == PROMPT + ids(b"hello") and EOS not in state.tokens(0)
    assert generate(model, [], state) == ""


def test_no_new_tokens_only_feeds_the_prompt() -> None:
    model, state = FakeModel(), FakeState(1)
    assert generate(model, PROMPT, state, max_new_tokens=0) == ""
    assert state.computed[0] == PROMPT and model.calls == 1


@pytest.mark.parametrize("sampler", [Sampler(), Sampler(temperature=1.0, top_k=9, seed=4, repetition_penalty=1.2)])
def test_a_ragged_batch_equals_each_row_alone(sampler: Sampler) -> None:
    answers = {0: ids(b"hello"), 2: ids(b" the", b" END", b"ST")}
    prompts = [ids("a"), ids("longer one"), ids("bc")]

    def script(held: list[int]) -> int | None:
        return next((n for row, a in answers.items() if (n := saying(prompts[row], a)(held)) is not None), None)

    together = FakeState(3)
    batch = Generation(FakeModel(script), prompts, together, params=sampler, max_new_tokens=9, stop="NDS")
    pieces = list(batch)
    for row in range(3):
        assert "".join(piece.text for piece in pieces if piece.row == row) == batch.texts[row]
        # Alone, at its own place in the batch: the other rows hold something else and end at once.
        others = [prompts[row] if place == row else ids("zz") for place in range(row + 1)]
        state = FakeState(row + 1)
        model = FakeModel(lambda held: EOS if held == ids("zz") else script(held))
        alone = Generation(model, others, state, params=sampler, max_new_tokens=9, stop="NDS")
        list(alone)
        assert alone.texts[row] == batch.texts[row]
        assert state.tokens(row) == together.tokens(row)
    assert batch.report().finished == ("eos", "length", "stop")


def test_a_list_of_prompts_gives_a_list_of_texts() -> None:
    model = FakeModel(saying(ids("x"), ids(b"hello")))
    assert generate(model, ["x", ids("x")]) == ["hello", "hello"]
    assert generate(model, ["x"]) == ["hello"]
    assert generate(model, "x") == generate(model, ids("x")) == "hello"


def test_only_the_beginning_of_a_row_gets_the_begin_token() -> None:
    model, state = FakeModel(), FakeState(2)
    model.tokenizer.begin = (7,)
    generate(model, ["a", ids("b")], state, max_new_tokens=0)
    generate(model, ["c", "d"], state, max_new_tokens=0)
    assert state.computed == [[7, *ids("ac")], ids("bd")]


def test_a_character_that_the_prompt_begins_is_completed() -> None:
    prompt = ids("a", b"\xe2\x82")
    assert generate(FakeModel(saying(prompt, ids(b"\xac!"))), prompt) == "€!"


def test_several_prompts_cannot_be_streamed_as_one() -> None:
    with pytest.raises(ValueError, match="one prompt"):
        stream(FakeModel(), ["a", "b"])


def test_closing_the_stream_keeps_the_tokens_that_were_given_out() -> None:
    answer = ids(*"abcdef")
    model, state = FakeModel(saying(PROMPT, answer)), FakeState(1)
    pieces = stream(model, PROMPT, state)
    assert [next(pieces), next(pieces)] == ["a", "b"]
    pieces.close()  # type: ignore[attr-defined]
    assert state.tokens(0) == PROMPT + answer[:2]
    assert generate(model, [], state) == "cdef"


def test_a_failing_step_leaves_the_tokens_computed_before_it() -> None:
    answer = ids(*"abcdef")
    model, state = FakeModel(saying(PROMPT, answer)), FakeState(1)
    model.fail_at = 3
    got = []
    with pytest.raises(RuntimeError, match="forward failed"):
        got.extend(stream(model, PROMPT, state))
    assert got == ["a", "b"]
    assert state.computed[0] == PROMPT + answer[:1]


def test_the_report_counts_tokens_fed_reused_and_generated() -> None:
    model, state = FakeModel(saying(PROMPT, ids(*"abc"))), FakeState(1)
    first = Generation(model, [PROMPT], state)
    list(first)
    report = first.report()
    assert (report.fed, report.reused, report.generated, report.decoded) == (2, 0, 3, 2)
    assert report.finished == ("eos",) and report.tokens_per_second > 0 and report.fed_per_second > 0
    second = Generation(model, [ids("more")], state, max_new_tokens=1)
    list(second)
    assert (second.report().fed, second.report().reused, second.report().generated) == (4, 5, 1)
    assert second.report().tokens_per_second == 0.0
    third = Generation(model, [ids("x")], state, max_new_tokens=1)  # one token was queued by the second
    assert (third.report().fed, third.report().reused) == (2, 9)


def test_closing_at_the_very_end_of_a_full_state_is_quiet() -> None:
    state = FakeState(1, capacity=len(PROMPT))
    pieces = stream(FakeModel(saying(PROMPT, ids(*"abc"))), PROMPT, state)
    assert next(pieces) == "a"
    pieces.close()  # type: ignore[attr-defined]
    assert state.tokens(0) == PROMPT


@pytest.mark.parametrize(
    ("prompt", "rows", "options", "message"),
    [
        ([], 1, {}, "nothing to continue"),
        (["a", "b"], 1, {}, "2 prompt"),
        ("a", 2, {}, "1 prompt"),
        ("a", 1, {"max_new_tokens": -1}, "max_new_tokens"),
        ("a", 1, {"max_new_tokens": 1.5}, "max_new_tokens must be a whole number"),
        ("a", 1, {"max_new_tokens": True}, "max_new_tokens must be a whole number"),
        ("a", 1, {"temperature": 1.0, "top_k": 1.5}, "top_k must be a whole number"),
        ([True], 1, {}, "whole number"),
        ("a", 1, {"top_p": 3.0}, "top_p"),
        ("a", 1, {"stop": [""]}, "stop"),
        ([1.5], 1, {}, "token ids"),
        (["a", None], 2, {}, "token ids"),
    ],
)
def test_what_cannot_be_generated_is_refused_before_anything_is_fed(
    prompt: object, rows: int, options: dict, message: str
) -> None:
    model, state = FakeModel(), FakeState(rows)
    with pytest.raises(ValueError, match=message):
        generate(model, prompt, state, **options)
    with pytest.raises(ValueError):
        stream(model, prompt, state, **options)
    assert model.calls == 0 and state.lengths == [0] * rows


def test_what_is_no_state_is_refused() -> None:
    with pytest.raises(StateError, match="state is 5; give what"):
        generate(FakeModel(), "a", 5)  # type: ignore[arg-type]
    with pytest.raises(StateError, match="state is 5; give what"):
        stream(FakeModel(), "a", 5)  # type: ignore[arg-type]


def test_parameters_are_one_value_or_given_by_name() -> None:
    named = {"max_new_tokens": 40, "temperature": 1.0, "top_k": 50, "top_p": 0.9, "stop": ("e",), "seed": 3}
    whole = generate(FakeModel(), "a", **named)
    assert generate(FakeModel(), "a", None, SamplingParams(**named)) == whole
    assert generate(FakeModel(), "a", params=SamplingParams(**named | {"seed": 5}), seed=3) == whole
    with pytest.raises(TypeError, match="max_tokens"):
        generate(FakeModel(), "a", max_tokens=3)
    with pytest.raises(ValueError, match="params is 3"):
        generate(FakeModel(), "a", None, 3)
    with pytest.raises(ValueError, match=r"options of Engine\.submit"):
        generate(FakeModel(), "a", n=2)


def test_options_that_only_the_engine_had() -> None:
    free = generate(FakeModel(), "a", max_new_tokens=12, ignore_eos=True, return_ids=True)
    assert len(free) == 12
    stopped = generate(FakeModel(), "a", max_new_tokens=12, stop_token_ids=[free[3]], ignore_eos=True, return_ids=True)
    assert stopped == free[: free.index(free[3])]
    late = generate(
        FakeModel(), "a", max_new_tokens=12, min_tokens=6, stop_token_ids=[free[3]], ignore_eos=True, return_ids=True
    )
    assert len(late) >= 6 and free[3] not in late[:6]
    biased = generate(FakeModel(), "a", max_new_tokens=5, logit_bias={70: 1000.0}, return_ids=True)
    assert biased == [70] * 5
    parted = generate(
        FakeModel(), "a", max_new_tokens=5, logit_bias={70: 1000.0}, frequency_penalty=2000.0, return_ids=True
    )
    assert parted[0] == 70 and parted[1] != 70
    ids, logprobs = generate(FakeModel(), "a", max_new_tokens=4, logprobs=2, return_ids=True)
    assert [each.token for each in logprobs] == ids
    assert all(each.top[0][1] >= each.logprob and len(each.top) == 2 for each in logprobs)
