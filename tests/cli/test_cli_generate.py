"""`lmstate generate`: the answer alone on stdout, exit codes, and where the prompt comes from."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lmstate.cli.app import app
from lmstate.generation.sampling import Picker, Sampler
from tests.generation.fake_model import FakeModel


def test_a_prompt_is_a_question_in_the_chat_template(model: FakeModel, runner: CliRunner) -> None:
    result = runner.invoke(app, ["generate", "m", "Hello"])
    assert (result.exit_code, result.stdout, result.stderr) == (0, "You said Hello.\n", "")
    assert model.asked == [("m", "auto")]


def test_raw_goes_on_with_the_text(model: FakeModel, runner: CliRunner) -> None:
    assert runner.invoke(app, ["generate", "m", "--raw", "Hello:"]).stdout == " and so on\n"


def test_without_a_template_the_text_is_raw_and_chat_is_refused(model: FakeModel, runner: CliRunner) -> None:
    model.tokenizer.has_chat_template = False
    assert runner.invoke(app, ["generate", "m", "Hello:"]).stdout == " and so on\n"
    result = runner.invoke(app, ["generate", "m", "Hello:", "--system", "Be brief"])
    assert result.exit_code == 1 and "no chat template" in result.stderr


@pytest.mark.parametrize("arguments", [["generate", "m"], ["generate", "m", "-"]])
def test_a_prompt_is_read_from_a_pipe_without_its_last_newline(
    model: FakeModel, runner: CliRunner, arguments: list[str]
) -> None:
    assert runner.invoke(app, arguments, input="two\nlines\n").stdout == "You said two\nlines.\n"


def test_options_reach_the_generation(model: FakeModel, runner: CliRunner) -> None:
    command = ["generate", "m", "Hello", "--weights", "int8", "--stats"]
    result = runner.invoke(app, [*command, "-n", "8"])
    assert result.stdout == "You said\n" and "8 generated" in result.stderr and "--max-tokens" in result.stderr
    assert model.asked == [("m", "int8")]
    result = runner.invoke(app, [*command, "--stop", "zzz", "--stop", "id H"])
    assert result.stdout == "You sa\n"
    result = runner.invoke(app, [*command, "--system", "S", "--temp", "0.5", "--top-k", "3", "--seed", "1"])
    assert result.stdout == "You said Hello.\n"


SUGGESTED = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.95, "repetition_penalty": 1.1}


@pytest.mark.parametrize(
    ("arguments", "sampler"),
    [
        ([], Sampler(0.6, 20, 0.95, None, 1.1)),
        (["-t", "0", "--repetition-penalty", "1"], Sampler(0.0, 20, 0.95)),
        (["--top-k", "0", "--min-p", "0.2", "--seed", "5"], Sampler(0.6, None, 0.95, 0.2, 1.1, 5)),
        (["--top-p", "1", "--top-k", "3", "-t", "2"], Sampler(2.0, 3, 1.0, None, 1.1)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
@pytest.mark.parametrize("command", ["generate", "chat"])
def test_what_is_not_asked_for_is_as_the_model_suggests(
    model: FakeModel,
    runner: CliRunner,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    arguments: list[str],
    sampler: Sampler,
) -> None:
    taken: list[Sampler] = []
    pick = Picker.__init__

    def init(self: Picker, sampler: Sampler, rows: int) -> None:
        taken.append(sampler)
        pick(self, sampler, rows)

    monkeypatch.setattr(Picker, "__init__", init)
    for suggested, expected in ((SUGGESTED, sampler), ({}, None)):
        model.defaults = suggested
        taken.clear()
        words = ["generate", "m", "Hello"] if command == "generate" else ["chat", "m"]
        result = runner.invoke(app, [*words, *arguments], input="Hello\n")
        assert result.exit_code == 0
        if expected is not None:
            assert taken == [expected]
    asks_nothing = Sampler(seed=taken[0].seed)
    assert arguments or taken == [asks_nothing]


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "missing", "x"], 1, "lmstate: no model is called missing; try smollm2\n"),
        (["generate", "m", "x", "--top-p", "7"], 1, "top_p is 7.0"),
        (["generate", "m", "x", "--stop", ""], 1, "stop"),
        (["generate", "m", "x", "--raw", "--system", "S"], 2, "--system"),
        (["generate", "m", "x", "--top-k", "-1"], 2, "top-k"),
        (["generate", "m", "x", "--max-tokens", "-1"], 2, "max-tokens"),
        (["generate", "m", "x", "--weights", "int3"], 2, "int3"),
        (["generate"], 2, "MODEL"),
        (["nonsense"], 2, "nonsense"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_goes_wrong_is_said_on_stderr_and_in_the_exit_code(
    model: FakeModel, runner: CliRunner, arguments: list[str], code: int, message: str
) -> None:
    result = runner.invoke(app, arguments)
    assert result.exit_code == code
    assert message in result.stderr and result.stdout == "" and "Traceback" not in result.stderr


def test_a_failing_forward_is_one_line(model: FakeModel, runner: CliRunner) -> None:
    model.fail_at = 2
    result = runner.invoke(app, ["generate", "m", "x"])
    assert (result.exit_code, result.stdout, result.stderr) == (1, "Y\n", "lmstate: the forward failed\n")


def test_ctrl_c_stops_the_answer_with_130(model: FakeModel, runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    script = model.script

    def interrupt(held: list[int]) -> int | None:
        if model.calls == 4:
            os.kill(os.getpid(), signal.SIGINT)
        return script(held)

    model.script = interrupt
    before = signal.getsignal(signal.SIGINT)
    result = runner.invoke(app, ["generate", "m", "Hello"])
    assert (result.exit_code, result.stdout) == (130, "You \n")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_loading_is_130(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    import lmstate

    def load(name: str, weights: str) -> FakeModel:
        raise KeyboardInterrupt

    monkeypatch.setattr(lmstate, "load", load, raising=False)
    assert runner.invoke(app, ["generate", "m", "Hello"]).exit_code == 130


def test_help_and_version_need_no_torch_and_show_examples() -> None:
    tell = "atexit.register(lambda: print('torch' in sys.modules))"
    code = f"import atexit, sys; from lmstate.cli import main; {tell}; main()"
    for arguments, expected in ((["--help"], "lmstate chat smollm2"), (["--version"], "lmstate ")):
        done = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert expected in done.stdout
        assert done.stdout.endswith("False\n") and done.stderr == ""


@pytest.mark.parametrize("command", ["generate", "chat", "inspect", "models", "doctor", "demo"])
def test_every_command_has_help_with_an_example(runner: CliRunner, command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0 and f"Examples:\n    lmstate {command}" in result.stdout


def test_a_reader_that_leaves_is_no_error() -> None:
    script = (
        "import lmstate\n"
        "from tests.cli.conftest import ChatTokenizer, FakeModel\n"
        "model = FakeModel(lambda held: 66); model.tokenizer = ChatTokenizer()\n"
        "lmstate.load = lambda name, weights: model\n"
        "from lmstate.cli import main; main()"
    )
    command = [sys.executable, "-c", script, "generate", "m", "x", "-n", "5000"]
    root = Path(__file__).parents[2]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=root)
    assert process.stdout is not None and process.stdout.read(3) == b"AAA"
    process.stdout.close()
    assert process.stderr is not None and process.stderr.read() == b""
    assert process.wait() == 0
