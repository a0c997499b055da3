"""`lmstate bench` and `lmstate cache`, and completion for the shell."""

from __future__ import annotations

import json
import re
import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lmstate
from lmstate.checkpoints.hub import ALIASES, name_of
from lmstate.checkpoints.open import open_cached
from lmstate.cli.app import app
from lmstate.cli.bench import BenchResult, machine, report_lines
from tests.files import ggufs
from tests.zoo import ours


def test_bench_times_prompts_and_decodes_that_the_model_has_positions_for(monkeypatch: pytest.MonkeyPatch) -> None:
    model = replace(ours("llama"))
    fed: list[list[int]] = []
    call = lmstate.Model.__call__

    def counted(self, tokens, state, **options):  # type: ignore[no-untyped-def]
        fed.append([len(tokens[0]), state.lengths[0]])
        return call(self, tokens, state, **options)

    monkeypatch.setattr(lmstate.Model, "__call__", counted)
    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: model, raising=False)
    model.context_size = 250
    result = CliRunner().invoke(app, ["bench", "m", "-n", "4", "--rounds", "2", "--threads", "1"])
    assert result.exit_code == 0, result.stderr
    lines = result.stdout.splitlines()
    assert lines[0] == "m, weights auto, 1 thread"
    assert [line.split("  ")[0] for line in lines[2:]] == [
        "prefill 16", "prefill 48", "prefill 96", "prefill 200", "decode near 128",
    ]  # fmt: skip
    assert [line.split(":")[0] for line in result.stderr.splitlines()] == [
        "prefill 512 is left out", "decode near 512 is left out"
    ]  # fmt: skip
    for line in lines[2:]:
        each_second, milliseconds = (float(word.replace(",", "")) for word in line.split()[-3:-1])
        assert each_second > 0 and milliseconds > 0
    a_round = [[16, 0], [48, 0], [96, 0], [200, 0], [126, 0], *([1, 126 + i] for i in range(5))]
    assert fed == [[16, 0], *a_round, *a_round]


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch) -> dict[str, lmstate.Model]:
    """Two models by name, one of them with few positions."""
    models = {"m": replace(ours("llama")), "small": replace(ours("mamba2"))}
    models["small"].context_size = 40
    monkeypatch.setattr(lmstate, "load", lambda name, weights, **_: models[name], raising=False)
    return models


def bench(*options: str) -> tuple[str, str]:
    arguments = ["bench", "m", "small", "-n", "2", "--rounds", "2", "--prompts", "16,48", "--near", "32,64"]
    result = CliRunner().invoke(app, [*arguments, "--threads", "1", *options])
    assert result.exit_code == 0, result.stderr
    return result.stdout, result.stderr


def test_bench_as_json_has_every_round_and_the_size_of_each_model(two: dict[str, lmstate.Model]) -> None:
    told, notes = bench("--json")
    found = json.loads(told)
    assert found["lmstate"] == lmstate.__version__ and found["torch"] == torch.__version__
    assert [each["model"] for each in found["models"]] == list(two)
    for each, model in zip(found["models"], two.values(), strict=True):
        assert each["parameters"] == model.weight_totals.parameters and each["weights"] == model.weight_totals.nbytes
        state = model.new_state()
        model([[1] * each["state_tokens"]], state)
        assert each["state_nbytes"] == sum(state.memory().values())
        for timing in each["timings"]:
            assert len(timing["seconds"]) == 2 and min(timing["seconds"]) > 0
    shapes = [[(each["tokens"], each["near"]) for each in model["timings"]] for model in found["models"]]
    assert shapes == [[(16, None), (48, None), (2, 32), (2, 64)], [(16, None), (2, 32)]]
    assert "prefill 48 is left out: the model takes 40 tokens" in notes and "decode near 64 is left out" in notes


def test_bench_reports_a_table_of_markdown(two: dict[str, lmstate.Model]) -> None:
    told, _ = bench("--report")
    about, _, *lines = told.splitlines()
    assert lmstate.__version__ in about and torch.__version__ in about
    header, rule, *rows = [re.split(r"(?<!\\)\|", line.strip("|")) for line in lines]
    assert {len(row) for row in (header, rule, *rows)} == {11} and set("".join(rule)) == {"-"}
    assert [cell.strip() for cell in header[-4:]] == ["prefill 16", "prefill 48", "decode near 32", "decode near 64"]
    assert [row[0].strip() for row in rows] == ["m", "small"]
    assert [cell.strip() == "-" for cell in rows[0][-4:]] == [False] * 4
    assert [cell.strip() == "-" for cell in rows[1][-4:]] == [False, True, False, True]
    named = BenchResult("a|b", "llama", 1, {}, 16, 1, 1, "cpu", ())
    assert list(report_lines([named], machine()))[-1].startswith("| a\\|b | llama |")


@pytest.mark.parametrize("wrong", [["--prompts", "16,x"], ["--near", "0"], ["--prompts", ""], ["--json", "--report"]])
def test_bench_refuses_lengths_that_are_none(wrong: list[str]) -> None:
    result = CliRunner().invoke(app, ["bench", "smollm2", *wrong])
    assert result.exit_code == 2 and wrong[0] in result.stderr


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LMSTATE_CACHE", str(tmp_path))
    for name, nbytes in (
        (f"models/{'a' * 16}/small.gguf", 1024),
        (f"{'b1' * 16}/int4.safetensors", 2048),
        (f"{'b1' * 16}/memory.json", 10),
        (f"{'b2' * 16}/int8.safetensors", 512),
        ("mine/int4.safetensors", 7),
        ("models/letters.txt", 7),
    ):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"x" * nbytes)
    return tmp_path


def cache(*arguments: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["cache", *arguments])
    return result.exit_code, result.stdout, result.stderr


def test_the_cache_lists_what_is_its_own(folder: Path) -> None:
    code, told, _ = cache("list")
    lines = [line.split() for line in told.splitlines()[2:]]
    assert code == 0
    assert [line[:6] for line in lines[:-1]] == [
        ["a" * 12, "download", str(folder / "models" / ("a" * 16) / "small.gguf"), "small.gguf", "1", "KiB"],
        ["b1" * 6, "conversion", "unknown", "int4", "2.0", "KiB"],
        ["b2" * 6, "conversion", "unknown", "int8", "512", "B"],
    ]
    assert lines[-1] == ["all", "3.5", "KiB"]


@pytest.mark.parametrize(
    ("arguments", "left"),
    [
        (["b1"], ["a", "b2"]),
        (["b1b1", "b2b2", "b1"], ["a"]),
        (["conversion"], ["a"]),
        (["download"], ["b1", "b2"]),
        (["--all"], []),
    ],
)
def test_removing_takes_what_was_named_and_nothing_else(folder: Path, arguments: list[str], left: list[str]) -> None:
    code, told, _ = cache("remove", *arguments)
    assert code == 0 and "freed" in told
    there = {"a": folder / "models" / ("a" * 16), "b1": folder / ("b1" * 16), "b2": folder / ("b2" * 16)}
    assert [name for name, path in there.items() if path.exists()] == left
    assert (folder / "mine" / "int4.safetensors").exists() and (folder / "models" / "letters.txt").exists()


def test_conversions_are_listed_and_removed_by_the_model_that_they_are_of(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LMSTATE_CACHE", str(tmp_path / "cache"))
    first = ggufs.write(tmp_path / "one.gguf", tensors=ggufs.llama_tensors())
    second = ggufs.write(tmp_path / "two.gguf", tensors=ggufs.llama_tensors())
    opened = open_cached(second, tmp_path / "cache")  # parsed, and nothing converted
    assert opened.path == second
    for kind in ("int4", "int8"):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            lmstate.load(first, weights=kind)
    lines = [line.split() for line in cache("list")[1].splitlines()[2:-1]]
    assert {(line[1], line[2]) for line in lines} == {("conversion", str(first)), ("conversion", str(second))}
    code, told, _ = cache("remove", str(first))
    assert code == 0 and told.count("removed") == 1
    lines = [line.split() for line in cache("list")[1].splitlines()[2:-1]]
    assert [line[2] for line in lines] == [str(second)]
    assert cache("remove", "unknown")[0] == 1  # there is none


def test_a_path_is_named_as_load_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/someone")
    alias = ALIASES["smollm2"]
    for path, name in (
        (f"/c/models/{alias.sha256[:16]}/{Path(alias.member).name}", "smollm2"),
        ("/hub/models--organization--name/snapshots/0a1b", "organization/name"),
        ("/hub/models--organization--name/snapshots/0a1b/file.gguf", "organization/name/file.gguf"),
        ("/home/someone/models/mine", "~/models/mine"),
        ("/srv/models/mine", "/srv/models/mine"),
    ):
        assert name_of(path) == name


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["b"], 1, "2 names begin with 'b'"),
        (["b1", "zzz"], 1, "no name begins with 'zzz'"),
        (["mine"], 1, "no name begins"),
        ([""], 1, "no name begins"),
        (["../x"], 1, "no name begins"),
        ([], 2, "--all"),
        (["b1", "--all"], 2, "--all"),
    ],
)
def test_a_name_that_is_not_clear_removes_nothing(folder: Path, arguments: list[str], code: int, message: str) -> None:
    before = sorted(folder.rglob("*"))
    done, _, told = cache("remove", *arguments)
    assert done == code and message in told
    assert sorted(folder.rglob("*")) == before


def test_an_empty_cache_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMSTATE_CACHE", str(tmp_path / "nowhere"))
    assert cache("list")[0] == cache("remove", "--all")[0] == 0


def test_the_shell_completes_commands() -> None:
    environment = {"_LMSTATE_COMPLETE": "complete_bash", "COMP_WORDS": "lmstate gen", "COMP_CWORD": "1"}
    result = CliRunner().invoke(app, [], prog_name="lmstate", env=environment)
    assert result.stdout.split() == ["generate"]
