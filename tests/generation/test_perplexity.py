"""The perplexity of a text is that of plain forwards over its windows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lmstate.cli.app import app
from lmstate.generation import perplexity
from lmstate.generation.perplexity import score_text
from tests.serve.running import load_tiny
from tests.zoo import ours

LENGTH = 23


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
@pytest.mark.parametrize("window", [2, 7, 11, LENGTH, 100])
@pytest.mark.parametrize("chunk", [3, 256])
def test_each_window_is_predicted_from_an_empty_state(
    kind: str, window: int, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(perplexity, "CHUNK", chunk)
    model = ours(kind)
    tokens = torch.randint(0, model.config.vocab_size, (LENGTH,), generator=torch.manual_seed(0)).tolist()
    nats, count = 0.0, 0
    for begin in range(0, LENGTH, window):
        part = tokens[begin : begin + window]
        loss = torch.nn.functional.cross_entropy(
            model([part])[0, :-1].double(), torch.tensor(part[1:], dtype=torch.long), reduction="sum"
        )
        nats, count = nats + float(loss), count + len(part) - 1
    score = score_text(model, tokens, window)
    assert score.predicted == count and math.isclose(score.nats, nats, rel_tol=1e-9)
    assert score.perplexity == math.exp(score.nats / count)


def test_a_text_without_a_token_to_predict_is_refused() -> None:
    for tokens, window in (([1], 8), ([], 8), ([1, 2, 3], 1)):
        with pytest.raises(ValueError, match="leaves no token to predict"):
            score_text(ours("llama"), tokens, window)


def test_the_command_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    model = load_tiny(tmp_path / "m")
    (tmp_path / "text").write_text("a river runs through it", encoding="utf-8")
    score = score_text(model, model.tokenizer.encode("a river runs through it"), 16)
    given = [str(tmp_path / "m"), str(tmp_path / "text"), "--weights", "float32"]
    result = CliRunner().invoke(app, ["perplexity", *given, "--window", "16", "--json"])
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert (told["perplexity"], told["tokens"], told["windows"]) == (score.perplexity, score.predicted, score.windows)
    result = CliRunner().invoke(app, ["perplexity", *given, "--window", "5000"])
    assert result.exit_code == 1 and "reads 2048 tokens at most" in result.stderr
