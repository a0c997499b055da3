"""`inspect`, `models` and `doctor`: tables that can be read by people and by `awk`."""

from __future__ import annotations

import sys

import pytest
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from lmstate.cli.inspect_model import state_rows
from lmstate.cli.output import size, table
from tests.zoo import pair


def test_inspect_counts_what_the_model_holds(runner: CliRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs, ours = pair("llama-tied-mha")
    monkeypatch.setattr(lmstate, "load", lambda name, weights: ours)
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


@pytest.mark.parametrize("name", ["mistral", "gemma3", "qwen3_5", "mamba2", "falcon_h1"])
def test_what_grows_and_what_does_not_is_what_a_state_holds(name: str) -> None:
    model = pair(name)[1]
    held = [sum(model.new_state(capacity=n, rewind=0).memory().values()) for n in (1, 2)]
    *_, growing, fixed = state_rows(model)[-1]
    assert (growing, fixed) == (size(held[1] - held[0]), size(2 * held[0] - held[1]))


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
