"""The suffix automaton against plain search, and what the text drafter makes of it."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate.speculation import TextDrafter
from lmstate.speculation.suffix_automaton import Cursor, SuffixAutomaton

TEXT = st.lists(st.integers(0, 3), max_size=60)


def longest_earlier_suffix(tokens: list[int]) -> int:
    """By search: the longest suffix that also ends somewhere before the end."""
    for length in range(len(tokens) - 1, 0, -1):
        suffix = tokens[len(tokens) - length :]
        if any(tokens[end - length : end] == suffix for end in range(length, len(tokens))):
            return length
    return 0


@settings(max_examples=200, deadline=None)
@given(tokens=TEXT)
def test_the_match_is_the_longest_suffix_that_occurred_before(tokens: list[int]) -> None:
    automaton = SuffixAutomaton()
    for at, token in enumerate(tokens):
        automaton.extend(token)
        text = tokens[: at + 1]
        assert automaton.match == longest_earlier_suffix(text)
        if automaton.match:
            suffix = text[len(text) - automaton.match :]
            assert automaton.source < len(text)
            assert text[automaton.source - automaton.match : automaton.source] == suffix


@settings(max_examples=200, deadline=None)
@given(corpus=TEXT, more=TEXT, tokens=TEXT)
def test_a_cursor_finds_the_longest_suffix_in_another_text(
    corpus: list[int], more: list[int], tokens: list[int]
) -> None:
    """Also in one that grows while it is followed: then a match may be shorter than the longest, never a wrong one."""
    automaton = SuffixAutomaton(corpus)
    cursor = Cursor(automaton)
    for at, token in enumerate(tokens):
        cursor.push(token)
        suffixes = (tokens[start : at + 1] for start in range(at + 1))
        found = next((s for s in suffixes if occurs(s, corpus)), [])
        assert cursor.match == len(found)
        if found:
            assert corpus[cursor.source - len(found) : cursor.source] == found
    for token in more:
        automaton.extend(token)
    for at, token in enumerate(tokens):
        cursor.push(token)
        held = (tokens + tokens[: at + 1])[len(tokens) + at + 1 - cursor.match :]
        assert held == (corpus + more)[cursor.source - cursor.match : cursor.source]


def occurs(part: list[int], whole: list[int]) -> bool:
    return any(whole[at : at + len(part)] == part for at in range(len(whole) - len(part) + 1))


def test_the_latest_occurrence_is_followed() -> None:
    drafter = TextDrafter()
    drafter.observe([0], [[1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3]])
    assert drafter.propose([0], 2)[0].tokens == (8, 1)


def test_a_text_in_a_circle_goes_on_in_it() -> None:
    drafter = TextDrafter()
    drafter.observe([0], [[4, 5, 6, 4, 5, 6, 4]])
    assert drafter.propose([0], 8)[0].tokens == (5, 6, 4, 5, 6, 4, 5, 6)


def test_rows_draft_from_their_own_texts_and_from_the_corpus() -> None:
    drafter = TextDrafter(corpus=[[9, 8, 7, 6], [5, 5]])
    drafter.observe([0, 1], [[1, 2, 1], [3, 9, 8]])
    first, second = drafter.propose([0, 1], 3)
    assert first.tokens[:1] == (2,)
    assert second.tokens == (7, 6)  # and nothing of the next text
    drafter.observe([1], [[7]])
    assert drafter.propose([1], 3)[0].tokens == (6,)


def test_confidence_rises_with_the_match() -> None:
    drafter = TextDrafter()
    drafter.observe([0, 1], [[1, 2, 3, 4, 9, 1, 2, 3, 4], [1, 2, 3, 4, 9, 7, 4]])
    long, short = drafter.propose([0, 1], 2)
    assert long.confidence is not None and short.confidence is not None
    assert long.confidence[0] > short.confidence[0] and long.confidence[1] > long.confidence[0]


def test_states_grow_with_the_text_alone() -> None:
    """At most two states a token, whatever the text."""
    for tokens in ([1] * 3000, [at % 7 for at in range(3000)], [(at * at) % 97 for at in range(3000)]):
        assert len(SuffixAutomaton(tokens)._length) <= 2 * len(tokens)
