"""`lmstate generate`: from a saved state and to one, as JSON, and from a file; on real states."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from lmstate.cli.chat.messages import messages_of
from tests.cli.test_cli_branches import Letters, talking


@pytest.fixture(params=["llama", "qwen3_next"])
def model(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> lmstate.Model:
    made = talking(request.param)
    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: made, raising=False)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return made


def generate(*arguments: object, input: str | None = None, code: int = 0) -> str:
    result = CliRunner().invoke(app, ["generate", "m", *map(str, arguments)], input=input)
    assert result.exit_code == code, result.stderr
    return result.stderr if code else result.stdout


def test_a_text_that_was_fed_before_goes_on_as_if_fed_now(model: lmstate.Model, tmp_path: Path) -> None:
    saved = tmp_path / "text.lmstate"
    whole = json.loads(generate("--raw", "Once upon a time", "-n", 8, "--json"))
    assert generate("--raw", "Once upon", "-n", 0, "--save-state", saved) == ""
    rest = json.loads(generate("--state", saved, " a time", "-n", 8, "--json"))
    assert (rest["text"], rest["ids"], rest["finished"]) == (whole["text"], whole["ids"], "length")
    assert Letters().decode(whole["ids"]) == whole["text"] and len(whole["ids"]) == 8
    assert whole["usage"] == {"prompt": 16, "reused": 0, "generated": 8}
    assert rest["usage"] == {"prompt": 16, "reused": 9, "generated": 8}


def test_without_a_prompt_a_saved_text_goes_on_where_it_ended(model: lmstate.Model, tmp_path: Path) -> None:
    saved = tmp_path / "text.lmstate"
    whole = generate("--raw", "Once upon", "-n", 8)
    first = generate("--raw", "Once upon", "-n", 3, "--save-state", saved)
    assert first[:-1] + generate("--state", saved, "-n", 5, input="") == whole


def test_a_conversation_goes_on_with_the_next_question(model: lmstate.Model, tmp_path: Path) -> None:
    saved, next_ = tmp_path / "one.lmstate", tmp_path / "two.lmstate"
    first = generate("Hello", "-n", 6, "--save-state", saved, "--system", "S")[:-1]
    second = json.loads(generate("--state", saved, "And?", "-n", 6, "--json", "--save-state", next_))
    messages = [
        {"role": "system", "content": "S"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": first},
        {"role": "user", "content": "And?"},
    ]
    alone = model.generate(Letters().chat(messages, True), max_new_tokens=6)
    assert second["text"] == alone
    assert second["usage"]["reused"] > 0
    assert messages_of(lmstate.Snapshot.load(next_)) == [*messages, {"role": "assistant", "content": alone}]


def test_a_state_is_not_written_over_unless_asked(model: lmstate.Model, tmp_path: Path) -> None:
    saved = tmp_path / "text.lmstate"
    saved.write_text("mine")
    assert "--force" in generate("--raw", "Once", "-n", 1, "--save-state", saved, code=1)
    assert saved.read_text() == "mine"
    generate("--raw", "Once", "-n", 1, "--save-state", saved, "--force")
    assert lmstate.Snapshot.load(saved).length == 5


def test_keys_and_values_in_few_bits_are_those_of_such_a_state(model: lmstate.Model, tmp_path: Path) -> None:
    saved, text = tmp_path / "text.lmstate", "Once upon a time"
    state = model.new_state(kv=lmstate.kv.Quantized(4))
    expected = model.generate(Letters().encode(text), state=state, max_new_tokens=8)
    assert generate("--raw", "--kv-bits", 4, text, "-n", 5, "--save-state", saved)[:-1] == expected[:5]
    assert generate("--kv-bits", 4, "--state", saved, "-n", 3, input="")[:-1] == expected[5:]
    assert "same kv=" in generate("--state", saved, "-n", 3, input="", code=1)
    assert "'8', '4', '3', '2'" in generate("x", "--kv-bits", 5, code=2)


def test_states_that_do_not_fit_are_refused(model: lmstate.Model, tmp_path: Path) -> None:
    other, text, damaged = tmp_path / "other", tmp_path / "text", tmp_path / "damaged"
    foreign = talking("gemma2")
    state = foreign.new_state()
    foreign([[5, 6]], state)
    state.snapshot(0).save(other)
    damaged.write_bytes(b"nothing of ours")
    generate("--raw", "Once", "-n", 1, "--save-state", text)
    assert "another model" in generate("--state", other, "x", code=1)
    assert "damaged" in generate("--state", damaged, "x", code=1)
    assert "nowhere" in generate("--state", tmp_path / "nowhere", "x", code=1)
    assert "not a conversation" in generate("--state", text, "x", "--chat", code=1)
    assert "--system" in generate("--state", text, "x", "--system", "S", code=2)


def test_the_ids_of_an_answer_that_a_stop_string_ended_hold_none_of_it(model: lmstate.Model) -> None:
    whole = json.loads(generate("--raw", "Once", "-n", 12, "--json"))
    stop = whole["text"][6:8]
    cut = json.loads(generate("--raw", "Once", "-n", 12, "--json", "--stop", stop))
    assert cut["finished"] == "stop" and cut["text"] == whole["text"].partition(stop)[0]
    assert Letters().decode(cut["ids"]) == cut["text"]


def test_a_prompt_comes_from_a_file(model: lmstate.Model, tmp_path: Path) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("Once upon\n")
    assert generate("--raw", "--prompt-file", file, "-n", 5) == generate("--raw", "Once upon", "-n", 5)
    file.write_bytes(b"Once \xff")
    assert "not UTF-8" in generate("--raw", "-f", file, code=1)
    assert "not both" in generate("x", "-f", file, code=2)
    assert "nowhere" in generate("-f", tmp_path / "nowhere", code=1)


@pytest.mark.parametrize(("arguments", "input"), [([], ""), (["-"], "\n"), ([""], None)])
def test_an_empty_prompt_is_wrong_usage(
    model: lmstate.Model, arguments: list[str], input: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: pytest.fail("loaded for nothing"))
    assert "empty" in generate(*arguments, input=input, code=2)


@pytest.mark.parametrize(("threads", "code"), [("1", 0), ("auto", 0), ("0", 2), ("many", 2)])
def test_threads_are_a_number_or_auto(model: lmstate.Model, threads: str, code: int) -> None:
    generate("x", "-n", 1, "--threads", threads, code=code)
