"""`model.chat`: a whole conversation each time, of which only what is new is computed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

import lmstate
from tests.engine.chat import chatting

FAMILIES = ["llama", "mistral", "mamba2", "qwen3_next-dense"]
OPTIONS: dict[str, Any] = {"max_new_tokens": 12, "temperature": 1.0}
Message = Mapping[str, str]


def ask(text: str) -> Message:
    return {"role": "user", "content": text}


def answer(text: str) -> Message:
    return {"role": "assistant", "content": text}


def computed(model: lmstate.Model, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Numbers of the tokens that each call computes from here on."""
    counts: list[int] = []
    monkeypatch.setattr(model, "on_part", lambda done, all: counts.append(all) if done == 0 else None)
    return counts


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_goes_on_and_answers_come_back_as_they_were_sampled(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, state = chatting(family), chatting(family).new_state()
    messages = [ask("abcd 0123?")]
    for turn in range(4):
        counts = computed(model, monkeypatch)
        held = state.tokens(0)
        text = model.chat(messages, state, seed=turn, **OPTIONS)
        assert state.tokens(0)[: len(held)] == held, "nothing was taken back"
        assert turn == 0 or counts[0] <= 40
        messages += [answer(text), ask(f"and {turn}?")]


@pytest.mark.parametrize("family", FAMILIES)
def test_another_beginning_is_rewound_to_where_they_part(family: str) -> None:
    model, state = chatting(family), chatting(family).new_state()
    first = model.chat([ask("abcd"), answer("efgh"), ask("one")], state, seed=1, **OPTIONS)
    for messages in (
        [ask("abcd"), answer("efgh"), ask("two")],
        [ask("abcd"), answer("other"), ask("two")],
        [ask("abcd"), answer("efgh"), ask("one")],
        [ask("x")],
    ):
        fresh = model.new_state()
        expected = model.chat(messages, fresh, seed=1, **OPTIONS)
        assert model.chat(messages, state, seed=1, **OPTIONS) == expected
        assert state.tokens(0) == fresh.tokens(0)
    assert model.chat([ask("abcd"), answer("efgh"), ask("one")], seed=1, **OPTIONS) == first


def test_pieces_are_the_answer_and_one_may_stop_reading() -> None:
    model = chatting()
    messages = [ask("abcd 0123?")]
    whole = model.chat(messages, seed=3, **OPTIONS)
    assert "".join(model.chat(messages, stream=True, seed=3, **OPTIONS)) == whole
    state = model.new_state()
    pieces = model.chat(messages, state, stream=True, seed=3, **OPTIONS)
    begun = next(pieces) + next(pieces)
    pieces.close()  # type: ignore[attr-defined]
    assert whole.startswith(begun)
    held = state.tokens(0)
    model.chat([*messages, answer(begun), ask("go on")], state, seed=3, **OPTIONS)
    assert state.tokens(0)[: len(held)] == held


def test_what_is_refused_leaves_the_state_as_it_was() -> None:
    model, state = chatting(), chatting().new_state()
    model.chat([ask("abcd")], state, seed=1, **OPTIONS)
    held = state.tokens(0)
    picture = {"role": "user", "content": [{"type": "image", "image": b"PNG"}]}
    with pytest.raises(lmstate.UnsupportedError, match="pictures"):
        model.chat([picture], state)
    with pytest.raises(ValueError, match="temperature"):
        model.chat([ask("x")], state, temperature=-1.0)
    with pytest.raises(ValueError, match="messages"):
        model.chat("hello", state)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="one row"):
        model.chat([ask("x")], model.new_state(2))
    assert state.tokens(0) == held


def test_generate_takes_messages_for_a_fresh_state() -> None:
    model, messages = chatting(), [ask("abcd")]
    expected = model.generate(model.tokenizer.chat(messages), seed=2, **OPTIONS)
    assert model.generate(messages, seed=2, **OPTIONS) == expected
    assert "".join(model.stream(messages, seed=2, **OPTIONS)) == expected
    state = model.new_state()
    assert model.generate(messages, state, seed=2, **OPTIONS) == expected
    with pytest.raises(ValueError, match=r"model.chat\(messages, state\)"):
        model.generate(messages, state)
