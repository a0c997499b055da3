"""Generation with drafts, on a scripted model: stop strings, ends of text and limits inside drafts, early closing."""

from __future__ import annotations

from itertools import islice

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate.generation import Generation, generate
from lmstate.generation.generate import stream
from lmstate.speculation import Draft, Speculator, TextDrafter
from tests.generation.fake_model import PIECES, VOCAB, FakeModel, FakeState, ids, saying
from tests.speculation.drafters import NoisyOracle, always

PROMPT = ids("Q:")
TOKEN = st.integers(0, len(PIECES) - 1)


def oracle(answer: list[int], right: float = 1.0, seed: int = 0, depth: int = 6) -> Speculator:
    """Drafts the answer, its end of text and what can never come after it."""
    wholes = [[*PROMPT, *answer, 0, *ids("never")]]
    return always(NoisyOracle(wholes, right, VOCAB, seed), VOCAB, depth=depth)


@settings(max_examples=200, deadline=None)
@given(
    answer=st.lists(st.integers(1, len(PIECES) - 1), max_size=14),
    stops=st.lists(st.text("EN D of the€😀hSTOP", min_size=1, max_size=4), max_size=3),
    limit=st.integers(1, 16),
    right=st.sampled_from([0.5, 0.9, 1.0]),
    seed=st.integers(0, 99),
)
def test_stop_strings_and_ends_inside_drafts_are_those_without(
    answer: list[int], stops: list[str], limit: int, right: float, seed: int
) -> None:
    plain, state = FakeState(1), FakeState(1)
    one = Generation(FakeModel(saying(PROMPT, answer)), [PROMPT], plain, max_new_tokens=limit, stop=stops, draft=None)
    drafted = oracle(answer, right, seed)
    two = Generation(
        FakeModel(saying(PROMPT, answer)), [PROMPT], state, max_new_tokens=limit, stop=stops, draft=drafted
    )
    assert [piece.text for piece in one] == [piece.text for piece in two]
    assert one.texts == two.texts and one.report().finished == two.report().finished
    assert (state.computed, state.queued) == (plain.computed, plain.queued) or bool(stops)
    assert state.tokens(0) == plain.tokens(0)


@settings(max_examples=60, deadline=None)
@given(answer=st.lists(st.integers(1, len(PIECES) - 1), min_size=1, max_size=14), after=st.integers(1, 14))
def test_closing_inside_a_step_takes_back_what_was_not_given_out(answer: list[int], after: int) -> None:
    state = FakeState(1)
    model = FakeModel(saying(PROMPT, answer))
    generation = Generation(model, [PROMPT], state, draft=oracle(answer))
    pieces = iter(generation)
    text = "".join(piece.text for piece in islice(pieces, after))
    pieces.close()  # type: ignore[attr-defined]
    assert generation.texts[0] == text
    held = state.tokens(0)
    assert held[: len(PROMPT)] == PROMPT and held[len(PROMPT) :] == answer[: len(held) - len(PROMPT)]
    whole = generate(FakeModel(saying(PROMPT, answer)), PROMPT, draft=None)
    assert "\ufffd" in whole or text + generate(model, [], state, draft=None) == whole


def test_a_draft_saves_calls_and_is_counted() -> None:
    answer = ids(*"abcdefghij")
    model = FakeModel(saying(PROMPT, answer))
    generation = Generation(model, [PROMPT], draft=always(NoisyOracle([PROMPT + answer], 1.0, VOCAB), VOCAB, depth=3))
    list(generation)
    report = generation.report()
    assert generation.texts == ["abcdefghij"] and report.generated == 10
    assert report.draft.accepted == report.draft.drafted > 0
    assert model.calls == 1 + 10 - report.draft.accepted


def test_drafts_fit_a_full_state() -> None:
    answer = ids(*"abcdefgh")
    state = FakeState(1, capacity=len(PROMPT) + 4)
    pieces = stream(FakeModel(saying(PROMPT, answer)), PROMPT, state, draft=oracle(answer))
    assert [next(pieces) for _ in range(5)] == list("abcde")
    pieces.close()  # type: ignore[attr-defined]
    assert state.tokens(0) == PROMPT + answer[:4]


class Odd:
    """A drafter of ids that are none, of too many tokens, or of nothing."""

    def observe(self, rows: list[int], accepted: list[list[int]]) -> None:
        pass

    def propose(self, rows: list[int], depth: int) -> list[list[int]]:
        return [[-1, 5], [VOCAB, 3], [1] * 99, []][: len(rows)]


def test_a_strange_draft_changes_nothing() -> None:
    prompts = [ids("a"), ids("b"), ids("c"), ids("d")]
    plain = generate(FakeModel(), prompts, max_new_tokens=9, draft=None)
    assert generate(FakeModel(), prompts, max_new_tokens=9, draft=always(Odd(), VOCAB, rows=4)) == plain


@pytest.mark.parametrize("draft", ["fast", 3, b"text", ["text"]])
def test_what_is_no_drafter_is_refused(draft: object) -> None:
    with pytest.raises(ValueError, match="draft"):
        generate(FakeModel(), PROMPT, draft=draft)  # type: ignore[arg-type]


def test_a_drafter_that_gives_too_few_drafts_is_named() -> None:
    with pytest.raises(ValueError, match="1 drafts for 2 rows"):
        drafter = Odd()
        drafter.propose = lambda rows, depth: [[]]  # type: ignore[method-assign]
        generate(FakeModel(), [ids("a"), ids("b")], draft=always(drafter, VOCAB, rows=2))


def test_confidence_must_be_one_a_token() -> None:
    with pytest.raises(ValueError, match="one for each"):
        Draft((1, 2), confidence=(0.5,))


def test_a_failing_step_leaves_the_tokens_computed_before_it() -> None:
    answer = ids(*"abcdefgh")
    model, state = FakeModel(saying(PROMPT, answer)), FakeState(1)
    model.fail_at = 3
    got: list[str] = []
    speculator = always(NoisyOracle([PROMPT + answer], 1.0, VOCAB), VOCAB, depth=3)
    with pytest.raises(RuntimeError, match="forward failed"):
        got.extend(stream(model, PROMPT, state, draft=speculator))
    held = state.tokens(0)[len(PROMPT) :]
    assert not any(state.pending) and held == answer[: len(got) - 1]


def test_a_text_that_repeats_itself_is_drafted_from_itself() -> None:
    answer = ids("one two three. " * 8)
    model = FakeModel(saying(PROMPT, answer))
    generation = Generation(model, [PROMPT], draft=always(TextDrafter(), VOCAB, depth=8))
    list(generation)
    assert generation.texts[0] == "one two three. " * 8
    assert model.calls < len(answer) / 3
