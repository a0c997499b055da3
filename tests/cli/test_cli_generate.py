"""`lmstate generate`: the answer alone on stdout, exit codes, and where the prompt comes from."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from dataclasses import fields, replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from lmstate.cli.output import Interrupt
from lmstate.cli.progress import PromptProgress
from lmstate.generation import Sampler, SamplingParams
from lmstate.generation.row import AnswerRow
from lmstate.state.step import CHUNK
from tests.generation.fake_model import FakeModel
from tests.serve.byte_tokenizer import save_tokenizer
from tests.serve.running import save_tiny
from tests.zoo import ENCODERS, auto, ours, randomize


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
    begin = AnswerRow.__init__

    def init(self: AnswerRow, model: Any, params: SamplingParams, *rest: Any) -> None:
        taken.append(Sampler(**{field.name: getattr(params, field.name) for field in fields(Sampler)}))
        begin(self, model, params, *rest)

    monkeypatch.setattr(AnswerRow, "__init__", init)
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


def test_the_answer_fits_a_schema_a_pattern_or_a_grammar(runner: CliRunner, tmp_path: Path) -> None:
    save_tiny(tmp_path)
    file = tmp_path / "pattern.txt"
    file.write_text("ab{2}\n")
    schema = ["--json-schema", '{"const": "abb"}']
    for given in (["--regex", "ab{2}"], ["--regex", f"@{file}"], ["--grammar", 'root ::= "abb"']):
        assert runner.invoke(app, ["generate", str(tmp_path), "Hi", *given]).stdout == "abb\n"
    assert runner.invoke(app, ["generate", str(tmp_path), "Hi", *schema]).stdout == '"abb"\n'
    for wrong in (["--json-schema", "{"], ["--regex", "a", *schema]):
        assert runner.invoke(app, ["generate", "smollm2", "Hi", *wrong]).exit_code == 2


def test_options_of_the_engine_on_the_command_line(model: FakeModel, runner: CliRunner) -> None:
    command = ["generate", "m", "Hello", "--json", "-n", "6"]
    told = json.loads(runner.invoke(app, [*command, "--logit-bias", "70=1000", "--logprobs", "1"]).stdout)
    assert told["ids"] == [70] * 6 and [each["token"] for each in told["logprobs"]] == [70] * 6
    told = json.loads(runner.invoke(app, [*command, "--logit-bias", "70=1000", "--stop-token-id", "70"]).stdout)
    assert told["ids"] == [] and told["finished"] == "stop"
    apart = ["--logit-bias", "70=1000", "--logit-bias", "71=999", "--presence-penalty", "500"]
    told = json.loads(runner.invoke(app, [*command, *apart]).stdout)
    assert told["ids"][:2] == [70, 71]
    ended = json.loads(runner.invoke(app, [*command, "--logit-bias", "0=1000"]).stdout)
    assert ended["ids"] == []
    told = json.loads(runner.invoke(app, [*command, "--logit-bias", "0=1000", "--min-tokens", "3"]).stdout)
    assert len(told["ids"]) == 3
    told = json.loads(runner.invoke(app, [*command, "--logit-bias", "0=1000", "--ignore-eos"]).stdout)
    assert len(told["ids"]) == 6
    for wrong in (["--logit-bias", "x"], ["--min-tokens", "-1"], ["--presence-penalty", "nan"]):
        assert runner.invoke(app, [*command, *wrong]).exit_code == 2


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["generate", "missing", "x"], 1, "lmstate: no model is called missing; try smollm2\n"),
        (["generate", "m", "x", "--top-p", "7"], 2, "--top-p"),
        (["generate", "m", "x", "--min-p", "-1"], 2, "--min-p"),
        (["generate", "m", "x", "--repetition-penalty", "0"], 2, "repetition_penalty is 0.0"),
        (["chat", "m", "-t", "inf"], 2, "temperature is inf"),
        (["chat", "m", "-t", "nan"], 2, "--temperature"),
        (["generate", "m", "x", "--stop", ""], 2, "stop"),
        (["generate", "m", "\udcff bad"], 1, "the prompt is not UTF-8: invalid byte after 0 characters"),
        (["generate", "m", "x", "--system", "bad \udcff"], 1, "--system is not UTF-8: invalid byte after 4 characters"),
        (["chat", "m", "--system", "bad \udcff"], 1, "--system is not UTF-8: invalid byte after 4 characters"),
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
    result = runner.invoke(app, ["generate", "m", "Hello", "--draft", "none"])
    assert (result.exit_code, result.stdout) == (130, "You \n")
    assert signal.getsignal(signal.SIGINT) is before


def test_ctrl_c_while_loading_is_130(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    import lmstate

    def load(name: str, weights: str, **_: object) -> FakeModel:
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


@pytest.mark.parametrize("command", ["generate", "chat", "convert", "inspect", "models", "doctor", "demo", "bench"])
def test_every_command_has_help_with_an_example(runner: CliRunner, command: str) -> None:
    result = runner.invoke(app, [command, "--help"])
    assert result.exit_code == 0 and f"Examples:\n    lmstate {command}" in result.stdout


ROOT = Path(__file__).parents[2]
SCRIPT = (
    "import sys, lmstate\n"
    "from lmstate.checkpoints.hub import ALIASES; ALIASES['m'] = ALIASES['smollm2']\n"
    "if 'chat' in sys.argv: from tests.cli.scripted import scripted as make\n"
    "else: from tests.generation.fake_model import FakeModel as make\n"
    "model = make(lambda held: 66)\n"
    "model.tokenizer.chat = getattr(model.tokenizer, 'chat', lambda messages, **_: [1])\n"
    "model.tokenizer.has_chat_template = True\n"
    "lmstate.load = lambda name, weights, **_: model\n"
    "from lmstate.cli import main; main()"
)


def test_a_reader_that_leaves_is_no_error() -> None:
    command = [sys.executable, "-c", SCRIPT, "generate", "m", "x", "-n", "5000"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT)
    assert process.stdout is not None and process.stdout.read(3) == b"AAA"
    process.stdout.close()
    assert process.stderr is not None and process.stderr.read() == b""
    assert process.wait() == 0


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [["--help"], ["generate", "--help"], ["generate", "m", "x", "-n", "2"]])
def test_a_full_disk_is_told(arguments: list[str]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-c", SCRIPT, *arguments]
        done = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=full, stderr=subprocess.PIPE, cwd=ROOT)
    assert done.returncode == 1
    assert b"No space left on device" in done.stderr and b"Traceback" not in done.stderr


@pytest.mark.skipif(os.name != "posix", reason="closes descriptors of a child")
@pytest.mark.parametrize(
    ("arguments", "closed", "code", "out", "err"),
    [
        (["generate", "m", "x", "-n", "2"], 0, 0, "AA\n", ""),
        (["chat", "m"], 0, 0, "", ""),
        (["generate", "m", "x", "-n", "2"], 1, 1, "", "standard output is closed"),
        (["models"], 1, 1, "", "standard output is closed"),
        (["generate", "m", "x", "-n", "2", "--stats"], 2, 0, "AA\n", ""),
        (["generate", "m", "x", "--nonsense"], 2, 2, "", ""),
    ],
)
def test_closed_standard_streams(arguments: list[str], closed: int, code: int, out: str, err: str) -> None:
    command = [sys.executable, "-c", SCRIPT, *arguments]
    done = subprocess.run(
        command, input="", capture_output=True, text=True, cwd=ROOT, preexec_fn=lambda: os.close(closed)
    )
    assert (done.returncode, done.stdout) == (code, out)
    assert err in done.stderr and "Traceback" not in done.stderr and bool(done.stderr) == bool(err)


@pytest.mark.parametrize("locale", [{"PYTHONUTF8": "0", "LC_ALL": "C.UTF-8"}, {"PYTHONUTF8": "1"}])
def test_input_that_is_no_text_is_told_and_a_chat_goes_on(locale: dict[str, str]) -> None:
    def run(*arguments: str) -> subprocess.CompletedProcess[bytes]:
        command, environment = [sys.executable, "-c", SCRIPT, *arguments, "-n", "2"], os.environ | locale
        return subprocess.run(command, input=b"one\xff\ntwo\n", capture_output=True, cwd=ROOT, env=environment)

    done = run("generate", "m")
    assert done.returncode == 1 and b"the prompt is not UTF-8: invalid byte after 3 characters" in done.stderr
    done = run("chat", "m", "--no-stats")
    assert (done.returncode, done.stdout) == (1, b"AA\n")
    assert b"the question is not UTF-8: invalid byte after 3 characters" in done.stderr


def test_a_text_longer_than_the_model_was_made_for_is_told_once(model: FakeModel, runner: CliRunner) -> None:
    model.context_size = 60
    assert runner.invoke(app, ["generate", "m", "x"]).stderr == ""
    result = runner.invoke(app, ["generate", "m", "x" * 60])
    assert result.exit_code == 0 and result.stdout.startswith("You said xxx")
    length = len("[user][end]\n[assistant]") + 60
    assert f"the text has {length} tokens, and the model was made for 60" in result.stderr
    result = runner.invoke(app, ["chat", "m", "--no-stats"], input="one\ntwo\nthree\n")
    assert result.stderr.count("was made for 60") == 1


def read(told: str) -> list[int]:
    return [int(count.replace(",", "")) for count in re.findall(r"read ([\d,]+) of", told)]


def test_a_long_prompt_is_shown_on_a_terminal_and_computed_as_without(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, text = replace(ours("llama")), [[(7 * i) % 90 + 1 for i in range(1200)]]
    states = [model.new_state(), model.new_state()]
    expected = model(text, states[0])
    monkeypatch.setattr("lmstate.cli.progress.sys.stderr.isatty", lambda: True)
    model.on_part = PromptProgress()
    assert torch.equal(model(text, states[1]), expected)
    told = capsys.readouterr().err
    assert read(told) == [*range(CHUNK, 1200, CHUNK)] and told.endswith("\r\033[K")
    model([[5]], states[1])
    assert capsys.readouterr().err == ""
    states[1].rewind(0, 600)
    model([[5]], states[1])
    assert read(capsys.readouterr().err) in ([], [CHUNK])  # a token more is none to show, all again is


def test_ctrl_c_stops_a_long_prompt_between_two_parts_and_it_never_was(monkeypatch: pytest.MonkeyPatch) -> None:
    model, text = replace(ours("llama")), [[(7 * i) % 90 + 1 for i in range(1200)]]
    state, progress, seen = model.new_state(), PromptProgress(), list[int]()

    def on_part(done: int, total: int) -> None:
        seen.append(done)
        if done == CHUNK:
            os.kill(os.getpid(), signal.SIGINT)
        progress(done, total)

    model.on_part = on_part
    with Interrupt(), pytest.raises(KeyboardInterrupt):
        model(text, state)
    assert seen == [0, CHUNK] and state.lengths == [0]
    model.on_part = progress  # nobody asks any more
    assert torch.equal(model(text, state), model(text, model.new_state()))


def test_off_a_terminal_a_prompt_that_takes_long_tells_in_lines_how_far_it_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for seconds, expected in ((0.1, []), (6.0, [1000, 2000, 3000])):
        monkeypatch.setattr("lmstate.cli.progress.monotonic", partial(next, count(0.0, seconds)))
        progress = PromptProgress()
        for done in range(0, 5000, 1000):
            progress(done, 4000)
        told = capsys.readouterr().err
        assert read(told) == expected and told.count("\n") == len(expected) and "\r" not in told


def test_a_draft_that_is_none_is_told_with_those_that_are(model: FakeModel, runner: CliRunner) -> None:
    result = runner.invoke(app, ["generate", "m", "Hello", "--draft", "txt"])
    assert result.exit_code == 1 and "--draft is auto, text, heads, none or a model: no model" in result.stderr


def test_options_that_contradict_each_other_are_told_before_a_model_is_loaded(
    model: FakeModel, runner: CliRunner
) -> None:
    for arguments, told in (
        (["--min-tokens", "9", "-n", "8"], "min_tokens is 9, more than max_new_tokens, which is 8"),
        (["--regex", "a", "--grammar", "b"], "regex and grammar were given"),
    ):
        result = runner.invoke(app, ["generate", "m", "Hello", *arguments])
        assert result.exit_code == 2 and told in " ".join(result.stderr.split())
    assert model.asked == []


def test_generate_and_chat_load_an_adapter(runner: CliRunner, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked: list[object] = []

    def load(name: str, weights: str = "auto", adapter: object = None, **_: object) -> object:
        asked.append(adapter)
        raise lmstate.ModelError("enough")

    monkeypatch.setattr(lmstate, "load", load, raising=False)
    for arguments in (["generate", "m", "Hello"], ["chat", "m"]):
        result = runner.invoke(app, [*arguments, "--adapter", str(tmp_path)])
        assert result.exit_code == 1 and "enough" in result.stderr, result.stderr
    assert asked == [tmp_path] * 2


@pytest.mark.parametrize("command", [["generate", "m", "Hello"], ["chat", "m"], ["serve", "m"], ["bench", "m"]])
def test_a_device_that_torch_cannot_use_is_told(command: list[str], runner: CliRunner) -> None:
    result = runner.invoke(app, [*command, "--device", "nowhere"])
    assert result.exit_code == 1 and "load(device='nowhere') was asked for" in result.stderr


def test_a_drafter_is_loaded_on_the_first_device_of_its_model(
    runner: CliRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[str, str]] = []

    def load(name: str, weights: str = "auto", device: object = None, **_: object) -> object:
        asked.append((name, str(device)))
        if name == "small":
            raise lmstate.ModelError("enough")
        return FakeModel(lambda held: 66)

    monkeypatch.setattr(lmstate, "load", load, raising=False)
    result = runner.invoke(app, ["generate", "m", "Hello", "--raw", "--draft", "small", "--device", "cpu=3"])
    assert result.exit_code == 1 and "enough" in result.stderr, result.stderr
    assert asked == [("m", "cpu=3"), ("small", "cpu")]


def test_heads_are_loaded_where_they_draft(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []

    def load(name: str, weights: str = "auto", adapter: object = None, heads: bool = False, **_: object) -> object:
        asked.append(heads)
        raise lmstate.ModelError(f"{name} has no multi-token prediction heads")

    monkeypatch.setattr(lmstate, "load", load, raising=False)
    for command in ("generate", "chat"):
        result = runner.invoke(app, [command, "m", "--draft", "heads", *(["x"] if command == "generate" else [])])
        assert result.exit_code == 1 and "no multi-token prediction heads" in result.stderr
    assert asked == [True, True]


def test_a_source_is_answered_as_generate_answers_it(runner: CliRunner, tmp_path: Path) -> None:
    made = ENCODERS["bart"](vocab_size=300)
    torch.manual_seed(0)
    theirs = auto(made).from_config(made, dtype=torch.float32)
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    model = lmstate.load(tmp_path, weights="float32")
    asked = [
        "generate",
        str(tmp_path),
        "--weights",
        "float32",
        "-t",
        "2",
        "--seed",
        "3",
        "-n",
        "8",
        "--json",
        "--source",
    ]
    texts = set()
    for source, prompt in (("The cat sleeps.", None), ("The cat sleeps.", "Le"), ("A dog barks.", None)):
        result = runner.invoke(app, [*asked, source, *([] if prompt is None else [prompt])])
        assert result.exit_code == 0, result.stderr
        text = model.generate(prompt, source=source, temperature=2.0, seed=3, max_new_tokens=8)
        assert json.loads(result.stdout)["text"] == text
        texts.add(text)
    assert len(texts) == 3
    for refused in (["--state", str(tmp_path / "x")], ["--system", "x"], ["--chat"]):
        result = runner.invoke(app, [*asked, "x", *refused])
        assert result.exit_code == 2 and "--source begins an answer" in result.stderr


def test_beams_answer_a_source_as_generate_does(runner: CliRunner, tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = auto(made := ENCODERS["t5"](vocab_size=300)).from_config(made, dtype=torch.float32)
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    model = lmstate.load(tmp_path, weights="float32")
    asked = ["generate", str(tmp_path), "--weights", "float32", "-n", "8", "--source", "The cat sleeps."]
    given: dict[str, Any] = {"num_beams": 4, "length_penalty": 2.0, "early_stopping": True}
    beams = ["--num-beams", "4", "--length-penalty", "2", "--early-stopping"]
    text = model.generate(source="The cat sleeps.", max_new_tokens=8, **given)
    result = runner.invoke(app, [*asked, *beams, "--json"])
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["text"] == text != model.generate(source="The cat sleeps.", max_new_tokens=8)
    assert told["usage"]["generated"] == len(told["ids"]) and told["finished"] in ("eos", "length")
    assert runner.invoke(app, [*asked, *beams]).stdout == text + "\n"
    for refused in (["-t", "0.5"], ["--regex", "a"], ["--draft", "text"], ["--num-beams", "1"], ["-n", "0"]):
        result = runner.invoke(app, [*asked, *beams, *refused])
        assert result.exit_code == 2 and "beam search" in result.stderr, (refused, result.stderr)


def test_a_source_for_a_model_without_an_encoder_is_refused(model: FakeModel, runner: CliRunner) -> None:
    result = runner.invoke(app, ["generate", "m", "--source", "x"])
    assert result.exit_code == 1 and "has no encoder" in result.stderr
