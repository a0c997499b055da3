"""Sounds on the command line: `lmstate generate --source FILE.wav`."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from tests.audio import hearing
from tests.audio.small import saved
from tests.audio.test_transcribe import noise
from tests.audio.test_wav import wav


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
