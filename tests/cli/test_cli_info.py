"""`inspect`, `models` and `doctor`: tables that can be read by people and by `awk`."""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import pytest
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from lmstate.cli.inspect_model import state_rows, weight_rows
from lmstate.cli.output import size, table
from lmstate.models.describe import stored_weights
from lmstate.ops.types.block_table import BLOCK_TOKENS
from tests.zoo import pair


def test_inspect_counts_what_the_model_holds(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair("llama-tied-mha")
    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: ours)
    result = runner.invoke(app, ["inspect", "tiny"])
    assert result.exit_code == 0
    about_model, _, about_state = result.stdout.partition("\n\n")
    facts = dict(line.split("  ", 1) for line in about_model.splitlines()[1:])
    facts = {name: value.strip() for name, value in facts.items()}
    assert facts["parameters"] == f"{theirs.num_parameters():,}"
    assert facts["family"] == "llama" and facts["layers"] == "3"
    per_token = 3 * 2 * 6 * 8 * 4  # layers, keys and values, heads, head dim, float32
    assert state_rows(ours) == [("3", "attention", size(per_token), "0 B")]
    assert "attention" in about_state


def test_inspect_shows_what_processes_would_hold(runner: CliRunner, tmp_path: Path) -> None:
    pair("llama")[0].save_pretrained(tmp_path)
    result = runner.invoke(app, ["inspect", str(tmp_path), "--parallel", "2"])
    assert result.exit_code == 0, result.stderr
    held = result.stdout.partition("held by each of 2 processes\n")[2].splitlines()
    assert [line.split("  ")[0] for line in held[1:4]] == ["0", "1", "one alone"]
    assert held[-1].split() == ["3", "attention", "split"]
    for given, why in ((["--device", "cpu"], "processes are on the CPU"), (["--mmproj", "tower"], "read no pictures")):
        refused = runner.invoke(app, ["inspect", str(tmp_path), "--parallel", "2", *given])
        assert refused.exit_code == 2 and why in refused.stderr


@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen3_5", "mamba2", "falcon_h1"])
def test_what_grows_and_what_does_not_is_what_a_state_holds(name: str) -> None:
    model = pair(name)[1]
    held = []
    for tokens in (BLOCK_TOKENS, 2 * BLOCK_TOKENS):
        state = model.new_state(rewind=0)
        state.plan([[0] * tokens])
        held.append(sum(state.memory().values()))
    *_, growing, fixed = state_rows(model)[-1]
    assert (growing, fixed) == (size((held[1] - held[0]) // BLOCK_TOKENS), size(2 * held[0] - held[1]))


@pytest.mark.parametrize("command", ["models", "doctor"])
def test_tables_name_what_is_there(runner: CliRunner, command: str) -> None:
    result = runner.invoke(app, [command])
    assert result.exit_code == 0 and result.stderr == ""
    expected = {"models": ["smollm2", "llama", "Cache"], "doctor": ["torch", "lmstate", "linear"]}
    assert all(word in result.stdout for word in expected[command])


def test_a_piped_table_is_plain_and_a_terminal_gets_a_drawn_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [("a", "1"), ("long", "[bold]")]
    table("T", ("name", "value"), rows)
    assert capsys.readouterr().out == "T\nname  value\na     1\nlong  [bold]\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    table("T", ("name", "value"), rows)
    drawn = capsys.readouterr().out
    assert "[bold]" in drawn and "name  value" not in drawn


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (1023, "1023 B"), (1024, "1 KiB"), (1536, "1.5 KiB"), (5 * 2**30, "5 GiB")]
)
def test_sizes(count: int, text: str) -> None:
    assert size(count) == text


@pytest.mark.parametrize("name", ["llama-tied-mha", "qwen3_moe", "gemma3", "falcon_h1", "bart"])
def test_every_weight_stands_in_one_row_of_the_table(name: str) -> None:
    model = pair(name)[1]
    rows = weight_rows(model)
    weights = stored_weights(model.network)
    assert sum(int(row[5]) for row in rows) == len(weights)
    assert all(row[1:3] == ("float32", "32.0") for row in rows)
    assert len({row[:5] for row in rows}) == len(rows) < 30
    if name == "llama-tied-mha":
        assert (
            rows[0][:6] == ("embed, head", "float32", "32.0", "floats", "99 x 48", "1")
            and rows[1][0] == "blocks 0-2: mixer.qkv"
        )


def test_a_warning_is_a_line_on_stderr(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(name: str, weights: str, **_: object) -> lmstate.Model:
        warnings.warn("4 bits are few", UserWarning, stacklevel=1)
        return pair("llama-tied-mha")[1]

    monkeypatch.setattr(lmstate, "load", load)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        result = runner.invoke(app, ["inspect", "tiny"])
    assert result.exit_code == 0 and result.stderr == "lmstate: 4 bits are few\n"


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["inspect", "missing.lmstate"], ["missing.lmstate: no such file or directory"]),
        (["inspect", "smolm2"], ["no model called 'smolm2'", "did you mean 'smollm2'?"]),
        (["generate", "smollm2", "hi", "--prompt-file", "x"], ["not both"]),
        (["generate", "smollm2", "--prompt-file", "missing.txt"], ["missing.txt: no such file or directory"]),
        (["generate", "smollm2", "hi", "--save-state", "nowhere/x.lmstate"], ["there is no folder nowhere", "make it"]),
        (["generate", "smollm2", "hi", "--save-state", ".", "--force"], [". is a directory", "name a file in it"]),
        (["generate", "smollm2", "hi", "--state", "no.lmstate"], ["no.lmstate: no such file or directory"]),
    ],
)
def test_an_error_names_the_file_and_the_cause(
    runner: CliRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], parts: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    result = runner.invoke(app, arguments)
    assert result.exit_code in (1, 2) and all(part in result.stderr for part in parts), result.stderr
    assert "Errno" not in result.stderr and not result.stdout
