"""Stop strings: where the text is cut into pieces never matters."""

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmstate.generation.stopping import StopScanner, as_stops

TEXTS = st.text(alphabet="abc", max_size=30)
STOPS = st.lists(st.text(alphabet="abc", min_size=1, max_size=6), max_size=4)


def oracle(text: str, stops: list[str], include: bool) -> str:
    """Up to the stop string that is complete first; of those that end together, the longest. With it if `include`."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            return text[: end if include else end - max(map(len, complete))]
    return text


@given(text=TEXTS, stops=STOPS, cuts=st.lists(st.integers(0, 30)), include=st.booleans())
def test_any_cut_into_pieces_gives_the_text_up_to_the_stop_string(
    text: str, stops: list[str], cuts: list[int], include: bool
) -> None:
    bounds = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    scanner = StopScanner(stops, include)
    out = ""
    for begin, end in pairwise(bounds):
        out += scanner.push(text[begin:end])
        expected = oracle(text, stops, include)
        assert expected.startswith(out)
        # Never holds back more than what may still become a stop string.
        held = text[len(out) : end]
        assert scanner.cut is not None or not held or any(stop.startswith(held) for stop in stops)
    out += scanner.flush()
    assert out == expected
    assert (scanner.cut is None) == (not any(stop in text for stop in stops))
    assert scanner.cut is None or scanner.cut == len(expected)


def test_text_that_turns_out_not_to_be_a_stop_string_is_not_lost() -> None:
    scanner = StopScanner(["###END"])
    assert scanner.push("a ##") == "a "
    assert scanner.push("#EN") == ""
    assert scanner.push("#") == "###EN"
    assert scanner.flush() == "#"


def test_nothing_passes_after_the_stop_string() -> None:
    scanner = StopScanner(["x"])
    assert scanner.push("abxcd") == "ab"
    assert scanner.push("efg") == "" == scanner.flush()


def test_a_bare_string_is_one_stop_string() -> None:
    assert as_stops("END") == ("END",)
    assert as_stops(["a", "b"]) == ("a", "b")


@pytest.mark.parametrize("stop", ["", ["a", ""], [3]])
def test_empty_and_foreign_stop_strings_are_refused(stop: object) -> None:
    with pytest.raises(ValueError, match="stop"):
        as_stops(stop)  # type: ignore[arg-type]


@given(text=TEXTS, stops=STOPS, least=st.integers(0, 30))
def test_stop_strings_that_are_complete_too_early_are_text(text: str, stops: list[str], least: int) -> None:
    scanner = StopScanner(stops)
    out = "".join(scanner.push(letter, may_end=at >= least) for at, letter in enumerate(text)) + scanner.flush()
    ends = [(end, stop) for end in range(least + 1, len(text) + 1) for stop in stops if text[:end].endswith(stop)]
    first = min(ends, key=lambda found: (found[0], -len(found[1])), default=(len(text), ""))
    assert out == text[: first[0] - len(first[1])]
