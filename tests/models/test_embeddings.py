"""`model.embeddings`: transformers' hidden states, pooled; and the server's and the command line's numbers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import lmstate
from lmstate.cli.app import app
from lmstate.engine import Engine
from lmstate.models.embeddings import EMBED_CHUNK, POOLINGS, unit_vector
from tests.serve.running import load_tiny
from tests.zoo import pair

TEXTS = [[3, 4, 5, 6, 7], [9], list(range(1, 40))]


@pytest.mark.parametrize("case", ["llama", "gemma2", "mamba2"])
def test_embeddings_equal_the_pooled_hidden_states_of_transformers(case: str) -> None:
    theirs, ours = pair(case)
    for pooling in POOLINGS:
        got = ours.embeddings(TEXTS, pooling)
        for ids, vector in zip(TEXTS, got):
            with torch.no_grad():
                hidden = theirs(torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
            states = {"mean": hidden.mean(0), "last": hidden[-1], "cls": hidden[0]}[pooling]
            torch.testing.assert_close(vector, torch.nn.functional.normalize(states, dim=0), atol=1e-4, rtol=1e-4)
    assert torch.equal(ours.embeddings(TEXTS[0]), ours.embeddings(TEXTS)[0])


def test_embeddings_are_those_of_the_engine_and_of_the_command_line(tmp_path: Path) -> None:
    model = load_tiny(tmp_path)
    texts = ["a cat", "a kitten " * (EMBED_CHUNK // 8)]
    vectors = model.embeddings(texts)
    with Engine(model) as engine:
        for text, vector in zip(texts, vectors):
            assert torch.equal(unit_vector(engine.embed(model.tokenizer.encode(text)).result(60)), vector)
    command = ["embed", str(tmp_path), "--weights", "float32"]
    told = CliRunner().invoke(app, command, input="\n".join(texts)).stdout.splitlines()
    assert [json.loads(line) for line in told] == vectors.tolist()
    few = json.loads(CliRunner().invoke(app, [*command, "a cat", "--dimensions", "5", "--pooling", "last"]).stdout)
    assert few == model.embeddings("a cat", "last", dimensions=5).tolist()
    assert sum(number**2 for number in few) == pytest.approx(1)


def test_what_is_wrong_is_said(tmp_path: Path) -> None:
    model = load_tiny(tmp_path)
    for texts, changes, said in (
        ("a", {"pooling": "max"}, "unknown pooling='max'"),
        ("a", {"dimensions": 10**6}, "give 1 to 48"),
        (["a", ""], {}, "text 1 has no tokens"),
        ([], {}, "no tokens"),
    ):
        with pytest.raises(ValueError, match=said):
            model.embeddings(texts, **changes)  # type: ignore[arg-type]
    model.defaults = {**model.defaults, "pooling": "rank"}
    with pytest.raises(lmstate.UnsupportedError, match="pooling='rank'"):
        model.embeddings("a")
    assert CliRunner().invoke(app, ["embed", str(tmp_path)], input="").exit_code == 2
