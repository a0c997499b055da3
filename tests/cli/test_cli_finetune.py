"""`lmstate finetune`, and `lmstate generate --adapter` with what it saves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import tokenizers
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from lmstate.training.finetune import locked
from tests.training.small import saved, theirs

WORDS = (
    "the", "keeper", "of", "varn", "counts", "seventeen", "gulls", "every", "morning", "and", "writes", "their",
    "number", "in", "green", "ink",
)  # fmt: skip


@pytest.fixture
def folder() -> Iterator[Path]:
    """A small model that knows a few words."""
    model = theirs("llama")
    model.lm_head.weight.data *= 5  # so that it can be sure of a word: the adapter leaves the head as it is
    with saved(model) as path:
        vocab = {word: index for index, word in enumerate(["<unk>", "<s>", "</s>", *WORDS])}
        words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "<unk>"))
        words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
        words.save(str(path / "tokenizer.json"))
        (path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>"}))
        yield path


def test_a_text_is_learned_stopped_resumed_and_told(folder: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text(json.dumps({"text": " ".join(WORDS)}) + "\n")
    command = ["finetune", str(folder), str(data), "-o", str(out), "--weights", "float32", "--lr", "0.02",
               "--warmup", "0", "--chunk", "5", "--steps", "40", "--save-every", "10"]  # fmt: skip
    ran = CliRunner().invoke(app, command)
    assert ran.exit_code == 0, ran.output
    losses = [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert len(losses) == 40 and losses[-1] < 0.1 < losses[0]
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 1 and "resume" in again.output
    resumed = CliRunner().invoke(app, [*command, "--resume"])
    assert resumed.exit_code == 0 and "no checkpoint" not in resumed.stderr
    elsewhere = [*command[:4], str(tmp_path / "other"), *command[5:-4], "--steps", "1"]
    assert "other holds no checkpoint" in CliRunner().invoke(app, [*elsewhere, "--resume"]).stderr.replace("\n", "")
    told = CliRunner().invoke(
        app, ["generate", str(folder), "--raw", "the keeper of", "--adapter", str(out), "-n", "4", "-t", "0"]
    )
    assert told.exit_code == 0, told.output
    assert told.stdout.split() == list(WORDS[3:7])


@pytest.mark.parametrize(
    ("kind", "more", "said"),
    [
        ("lora", ["--rank", "3", "--dora"], {"peft_type": "LORA", "r": 3, "use_dora": True}),
        ("loha", ["--rank", "2", "--alpha", "4"], {"peft_type": "LOHA", "r": 2, "alpha": 4.0}),
        ("lokr", ["--targets", "q_proj, down_proj"], {"peft_type": "LOKR", "target_modules": ["down_proj", "q_proj"]}),
        ("ia3", [], {"peft_type": "IA3", "feedforward_modules": ["down_proj"]}),
        ("prompt", ["--positions", "4"], {"peft_type": "PROMPT_TUNING", "num_virtual_tokens": 4}),
        ("prefix", [], {"peft_type": "PREFIX_TUNING", "num_virtual_tokens": 20}),
        ("adaption-prompt", ["--positions", "3", "--layers", "2"], {"peft_type": "ADAPTION_PROMPT", "adapter_len": 3}),
    ],
)
def test_an_adapter_of_each_kind_is_trained_resumed_and_told(
    kind: str, more: list[str], said: dict[str, object], folder: Path, tmp_path: Path
) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text(json.dumps({"text": " ".join(WORDS)}) + "\n")
    command = ["finetune", str(folder), str(data), "-o", str(out), "--weights", "float32", "--lr", "0.05",
               "--warmup", "0", "--adapter", kind, *more, "--steps"]  # fmt: skip
    ran = CliRunner().invoke(app, [*command, "4"])
    assert ran.exit_code == 0, ran.output
    losses = [json.loads(line)["loss"] for line in (out / "log.jsonl").read_text().splitlines()]
    assert losses[-1] < losses[0]
    config = json.loads((out / "adapter_config.json").read_text())
    assert {name: config[name] for name in said} == said
    resumed = CliRunner().invoke(app, [*command, "4", "--resume"])
    assert resumed.exit_code == 0 and "no checkpoint" not in resumed.stderr, resumed.output
    told = CliRunner().invoke(
        app, ["generate", str(folder), "--raw", "the keeper", "--adapter", str(out), "-n", "2", "-t", "0"]
    )
    assert told.exit_code == 0, told.output


def test_a_folder_is_written_by_one_training_at_a_time(folder: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "a.txt", tmp_path / "out"
    data.write_text(" ".join(WORDS))
    command = ["finetune", str(folder), str(data), "-o", str(out), "--steps", "1"]
    with locked(out):
        refused = CliRunner().invoke(app, command)
        assert refused.exit_code == 1 and "another training writes to" in refused.output.replace("\n", " ")
        assert not list(out.iterdir())
    assert CliRunner().invoke(app, command).exit_code == 0
    assert (out / "adapter_config.json").exists()


def test_every_weight_may_be_trained_and_a_share_kept_to_evaluate(folder: Path, tmp_path: Path) -> None:
    data, out = tmp_path / "data.jsonl", tmp_path / "out"
    data.write_text("".join(json.dumps({"text": " ".join(WORDS[n:])}) + "\n" for n in range(8)))
    ran = CliRunner().invoke(
        app, ["finetune", str(folder), str(data), "-o", str(out), "--full", "--eval-split", "0.25", "--steps", "3"]
    )
    assert ran.exit_code == 0, ran.output
    last = json.loads((out / "log.jsonl").read_text().splitlines()[-1])
    assert last["evaluated"] > 0
    assert CliRunner().invoke(app, ["generate", str(out), "--raw", "the", "-n", "1"]).exit_code == 0


def test_as_many_threads_are_set_as_were_asked_for(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data, asked = tmp_path / "data.jsonl", []
    data.write_text(json.dumps({"text": " ".join(WORDS)}) + "\n")
    monkeypatch.setattr(lmstate, "set_threads", asked.append)
    for given in ([], ["--threads", "2"], ["--threads", "auto"]):
        out = str(tmp_path / f"out{len(asked)}{len(given)}")
        ran = CliRunner().invoke(app, ["finetune", str(folder), str(data), "-o", out, "--steps", "1", *given])
        assert ran.exit_code == 0, ran.output
    assert asked == [2, "auto"]


def test_bad_data_is_one_line(folder: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"text": "the keeper"}\n{"prompt": "the"}\n')
    ran = CliRunner().invoke(app, ["finetune", str(folder), str(data), "-o", str(tmp_path / "out")])
    assert ran.exit_code == 1 and "line 2" in ran.output


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        (["--epochs", "0"], "--epochs 0"),
        (["--epochs", "nan"], "--epochs nan"),
        (["--epochs", "inf"], "--epochs inf"),
        (["-o", "data.jsonl"], "data.jsonl"),
        (["--threads", "many"], "--threads many"),
        (["--threads", "0"], "at least 1 thread"),
        (["--adapter", "prompt", "--rank", "4", "--dora"], "--rank, --dora are not of --adapter prompt"),
        (["--positions", "4"], "--positions is not of --adapter lora"),
        (["--full", "--adapter", "ia3"], "--adapter is of an adapter"),
    ],
)
def test_usage_is_refused_before_a_model_is_loaded(
    changed: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("data.jsonl").write_text('{"text": "the keeper"}\n')
    ran = CliRunner().invoke(app, ["finetune", "no-model", "data.jsonl", "-o", "out", *changed])
    assert ran.exit_code == 2 and said in ran.output, ran.output
    assert not Path("out").exists()


def test_data_and_folder_are_looked_at_before_a_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for line in ("{", "[1]", '{"messages": 3}', '{"text": 3}', '{"instruction": "the"}'):
        Path("data.jsonl").write_text(f'{{"text": "the keeper"}}\n{line}\n')
        ran = CliRunner().invoke(app, ["finetune", "no-model", "data.jsonl", "-o", "out"])
        assert ran.exit_code == 1 and "data.jsonl, line 2" in ran.output, ran.output
    Path("data.jsonl").write_text('{"text": "the keeper"}\n')
    Path("out/checkpoint").mkdir(parents=True)
    ran = CliRunner().invoke(app, ["finetune", "no-model", "data.jsonl", "-o", "out"])
    assert ran.exit_code == 1 and "out holds a training already" in ran.output
    Path("used").mkdir()
    Path("used/notes.txt").write_text("mine")
    for more, refused in (([], True), (["--force"], False), (["--resume"], False)):
        ran = CliRunner().invoke(app, ["finetune", "./", "data.jsonl", "-o", "used", *more])  # which is no checkpoint
        assert ran.exit_code == 1 and ("used is not empty" in ran.output) == refused, ran.output
