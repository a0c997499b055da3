"""Sounds on the command line: transcripts of a `--source`, `--audio` of a question, `/audio` in a chat."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from lmstate.cli.chat.conversation import ChatConversation
from lmstate.cli.chat.slash_commands import COMMANDS, complete, run_command
from tests.audio import hearing
from tests.audio.small import saved
from tests.audio.test_heard import said
from tests.audio.test_transcribe import noise
from tests.audio.test_wav import wav
from tests.vision.test_encode import png


@pytest.fixture
def asked(tmp_path: Path) -> list[str]:
    saved(tmp_path)
    (tmp_path / "speech.wav").write_bytes(wav(noise(2.5)))
    return ["generate", str(tmp_path), "--weights", "float32", "--source", str(tmp_path / "speech.wav")]


def test_a_sound_is_transcribed(asked: list[str], tmp_path: Path) -> None:
    runner = CliRunner()
    model, data = lmstate.load(tmp_path, weights="float32"), (tmp_path / "speech.wav").read_bytes()
    expected = model.transcribe(data, language="de", prompt="Hello")
    result = runner.invoke(app, [*asked, "--language", "german", "--json", "Hello"])
    assert result.exit_code == 0, result.stderr
    assert json.loads(result.stdout) == json.loads(json.dumps(asdict(expected)))
    result = runner.invoke(app, [*asked, "--language", "de", "--translate"])
    assert result.stdout.strip() == model.transcribe(data, language="de", task="translate").text


def test_options_that_a_sound_does_not_take_are_refused(asked: list[str], tmp_path: Path) -> None:
    runner = CliRunner()
    for more in (["--num-beams", "2"], ["--stop", "x"], ["-n", "5"], ["--save-state", str(tmp_path / "x")]):
        result = runner.invoke(app, [*asked, *more])
        assert result.exit_code == 2 and "leave other options out" in " ".join(result.stderr.split()), result.stderr
    result = runner.invoke(app, [*asked, "--language", "xx"])
    assert result.exit_code == 1 and "knows de, en, fr" in result.stderr
    result = runner.invoke(app, [*asked[:4], "--source", str(tmp_path / "none.wav")])
    assert result.exit_code == 1 and "none.wav" in result.stderr
    (tmp_path / "bad.wav").write_bytes(b"RIFF")
    result = runner.invoke(app, [*asked[:4], "--source", str(tmp_path / "bad.wav")])
    assert result.exit_code == 1 and "no WAV" in result.stderr
    result = runner.invoke(app, [*asked[:4], "--language", "de", "x"])
    assert result.exit_code == 2 and "about a --source" in " ".join(result.stderr.split())


def test_a_model_that_hears_in_conversations_transcribes(tmp_path: Path) -> None:
    hearing.saved("qwen3_asr", tmp_path)
    (tmp_path / "speech.wav").write_bytes(data := wav(noise(0.6)))
    asked = ["generate", str(tmp_path), "--weights", "float32", "--source", str(tmp_path / "speech.wav"), "--json"]
    result = CliRunner().invoke(app, [*asked, "--language", "german", "Oslo"])
    assert result.exit_code == 0, result.stderr
    expected = lmstate.load(tmp_path, weights="float32").transcribe(data, language="de", prompt="Oslo")
    assert json.loads(result.stdout) == json.loads(json.dumps(asdict(expected)))


def test_sounds_go_with_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model").mkdir()
    hearing.saved("glmasr", tmp_path / "model")
    model = lmstate.load(tmp_path / "model", weights="float32")
    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: model, raising=False)
    sounds, paths = [noise(0.6, 1), noise(0.9, 2)], [tmp_path / "a.wav", tmp_path / "b.wav"]
    for path, sound in zip(paths, sounds):
        path.write_bytes(wav(sound, width=4))
    (tmp_path / "bad.wav").write_bytes(b"RIFF")
    (tmp_path / "a.png").write_bytes(png(20, 30))

    def answer(messages: list[dict[str, Any]]) -> str:
        prompt = model.encode(messages)
        prompt.place(state := model.new_state())
        return model.generate(prompt.tokens, state=state, max_new_tokens=6, temperature=0.0)

    def generate(*more: object, code: int = 0) -> str:
        result = CliRunner().invoke(app, ["generate", "m", *map(str, more)], input="")
        assert result.exit_code == code, result.stderr
        return " ".join(result.stderr.split()) if code else result.stdout[:-1]

    one, two = paths
    begun = generate("what?", "--audio", one, "--audio", two, "-n", 6, "--save-state", tmp_path / "state")
    assert begun == answer(said(*sounds, "what?"))
    messages = [*said(*sounds, "what?"), {"role": "assistant", "content": begun}, *said(sounds[1], "and?")]
    assert generate("and?", "--state", tmp_path / "state", "--audio", two, "-n", 6) == answer(messages)
    for more, code, why in (
        ([tmp_path / "bad.wav"], 1, "bad.wav: a sound is damaged"),
        ([tmp_path / "none.wav"], 1, "no such file"),
        ([one, "--image", tmp_path / "a.png"], 1, "a picture was given, and glmasr models read sounds alone"),
        ([one, "--raw"], 2, "--audio goes with a question"),
    ):
        assert why in generate("what?", "--audio", *more, code=code)

    conversation = ChatConversation(model, max_new_tokens=6)
    assert run_command(f"/audio {one}", COMMANDS, conversation) == "1 sound will go with the next question"
    assert run_command(f"/audio {two}", COMMANDS, conversation) == "2 sounds will go with the next question"
    assert "".join(conversation.ask("what?")) == begun
    assert "> [sound] [sound] what?" in run_command("/history", COMMANDS, conversation)
    run_command(f"/save {tmp_path / 'talk'}", COMMANDS, conversation)
    later = ChatConversation(model, max_new_tokens=6)
    later.load(tmp_path / "talk")
    assert later.messages == conversation.messages and later.messages[0] == said(*sounds, "what?")[0]
    for line, why in ((f"/image {tmp_path / 'a.png'}", "sounds alone"), (f"/audio {tmp_path / 'bad.wav'}", "damaged")):
        with pytest.raises(lmstate.StateError, match=why):
            run_command(line, COMMANDS, conversation)
    assert not conversation.files
    assert complete(f"/audio {tmp_path}/a.", COMMANDS, conversation) == [
        f"/audio {tmp_path / 'a.png'}",
        f"/audio {one}",
    ]
