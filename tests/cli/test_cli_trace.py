"""`lmstate trace` names the first sublayer where two models differ."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from lmstate.cli.app import app
from lmstate.models.divergence import divergences
from tests.serve.running import load_tiny
from tests.zoo import ours

TOKENS = [3, 1, 4, 1, 5]


@pytest.mark.parametrize("kind", ["llama", "qwen3_5", "gemma2"])
@pytest.mark.parametrize("block", [0, 1])
def test_the_first_that_differs_is_the_one_that_was_changed(kind: str, block: int) -> None:
    model = ours(kind)
    other = copy.deepcopy(model)
    assert all(each.relative == 0 for each in divergences(model, other, TOKENS))
    other.blocks[block].mlp.down.storage.mul_(1.01)
    found = divergences(model, other, TOKENS)
    assert found[0].name == "embed"
    assert next(each.name for each in found if each.relative) == f"blocks.{block}.mlp"


def test_a_stream_of_no_numbers_differs() -> None:
    model = ours("llama")
    other = copy.deepcopy(model)
    other.blocks[1].mlp.down.storage.fill_(torch.nan)
    first = next(each for each in divergences(model, other, TOKENS) if not each.relative <= 1.0)
    assert first.name == "blocks.1.mlp"


def test_models_of_other_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="differ in size: embed gives"):
        divergences(ours("llama"), ours("gemma3n"), TOKENS)


def test_the_command_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    load_tiny(tmp_path / "m")
    name = str(tmp_path / "m")
    same = CliRunner().invoke(app, ["trace", name, name, "--weights", "float32"])
    assert same.exit_code == 0 and "no sublayer differs" in same.stdout, same.stderr
    given = ["trace", name, name, "--weights", "float32", "--other-weights", "int4", "--json"]
    result = CliRunner().invoke(app, given)
    assert result.exit_code == 0, result.stderr
    told = json.loads(result.stdout)
    assert told["first"] in ("embed", "blocks.0.mixer") and told["sublayers"]["head"] > 0
    assert CliRunner().invoke(app, ["trace", name, name, "--prompt", ""]).exit_code == 1
