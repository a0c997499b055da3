"""The whole path on the real default model, from the command's name to its answer. Skipped where it cannot be had."""

from __future__ import annotations

import re
import subprocess
import sys

import pytest
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from lmstate.cli.options import DEFAULT_MODEL
from tests import real_model


@pytest.fixture(scope="module")
def smollm2() -> lmstate.Model:
    real_model.smollm2()
    return lmstate.load(DEFAULT_MODEL)


@pytest.fixture
def cli(smollm2: lmstate.Model, monkeypatch: pytest.MonkeyPatch) -> CliRunner:
    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: smollm2)
    return CliRunner()


def test_the_command_answers(smollm2: lmstate.Model) -> None:
    command = [sys.executable, "-c", "from lmstate.cli import main; main()", "generate", DEFAULT_MODEL]
    done = subprocess.run([*command, "Name the capital of France."], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Paris" in done.stdout


def test_the_second_turn_reuses_the_first(cli: CliRunner) -> None:
    """The ids of the answer are those of its text in the template: nothing but the new turn is fed."""
    result = cli.invoke(app, ["demo"])
    assert result.exit_code == 0
    first, second = (
        [int(number) for number in re.findall(r"(\d+) (?:tokens fed|reused|generated)", line)]
        for line in result.stderr.splitlines()
    )
    assert first[1] == 0 and 0 < second[0] < 30
    assert second[1] >= first[0] + first[2] - 1  # the last token may have been queued


def test_streamed_text_is_the_generated_text_and_ends_before_a_stop_string(smollm2: lmstate.Model) -> None:
    options = {"max_new_tokens": 24, "temperature": 0.8, "top_p": 0.9, "seed": 11}
    whole = smollm2.generate("Café ☕ — naïve 日本語:", **options)
    assert "".join(smollm2.stream("Café ☕ — naïve 日本語:", **options)) == whole
    stop = whole[len(whole) // 2 :][:4]
    assert smollm2.generate("Café ☕ — naïve 日本語:", **options, stop=stop) == whole[: whole.index(stop)]


def test_inspect_describes_it(cli: CliRunner) -> None:
    result = cli.invoke(app, ["inspect", DEFAULT_MODEL])
    assert result.exit_code == 0
    assert "134,515,008" in result.stdout and re.search(r"30 +attention +22\.5 KiB", result.stdout)
