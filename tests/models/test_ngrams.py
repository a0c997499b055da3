"""Tables of n-grams (Qwen4-Exp): which rows a token reads, from where, and configs that make no sense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import lmstate
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build, qwen4_exp
from lmstate.models.layers.ngrams import NgramBlock, NgramTable, multipliers, primes
from tests.zoo import CASES, auto, ours, pair, randomize, text

CASE = "qwen4_exp"


def table_of(model: lmstate.Model) -> NgramTable:
    block = model.blocks[0]
    assert isinstance(block, NgramBlock)
    return block.ngrams.table


def saved(folder: Path, **changes: Any) -> None:
    """A random model of the case; `changes`: of the config that its file has."""
    config = CASES[CASE]()
    theirs = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps(written))


def test_multipliers_and_sizes_are_those_of_transformers() -> None:
    theirs = pair(CASE)[0].model.layers[2].ple.ple_embedding
    model = ours(CASE)
    block = model.blocks[2]
    assert isinstance(block, NgramBlock)
    table = block.ngrams.table
    assert list(table.multipliers) == theirs.layer_multipliers.tolist()
    assert torch.equal(table.sizes, theirs.ngram_heads_vocab_sizes)
    assert primes(20_000_000, 3) == [20_000_003, 20_000_023, 20_000_033]
    assert all(each % 2 and each * 248_319 < 2**63 for each in multipliers(248_320, 3, 5, 1234))


def test_a_separator_hides_what_lies_before_it() -> None:
    table = table_of(ours(CASE))
    tokens = torch.tensor([[7]])

    def rows(*before: int) -> list[int]:
        return table.hashes(tokens, torch.tensor([[before]])).flatten().tolist()

    end = table.end
    assert rows(5, 9) != rows(5, 8)
    assert rows(5, end) == rows(5, -1)
    assert rows(end, 9) == rows(end, 8) == rows(-1, -1)
    assert rows(5, 9)[:2] == rows(5, 8)[:2]  # of bigrams


def test_shards_are_read_where_they_lie_as_one_table(tmp_path: Path) -> None:
    saved(tmp_path, split_ngram_parts=4)
    model = build(WeightLoader(open_source(tmp_path), "float32"))
    table = table_of(model)
    assert len(table.parts) == 4
    numbers = torch.arange(sum(map(len, table.parts)))
    assert torch.equal(table._rows(numbers.flip(0)), torch.cat(table.parts).flip(0))

    file = tmp_path / "model.safetensors"
    shards = {name: tensor for name, tensor in load_file(file).items() if name.endswith("shard_0.weight")}
    (first,) = (tensor.numpy().tobytes() for name, tensor in shards.items() if ".0." in name)
    before, start = model(text(20)), file.read_bytes().index(first)
    with file.open("r+b") as at:  # in the file itself: a table that was copied would not know
        at.seek(start)
        at.write(bytes(len(first)))
    assert not table.parts[0].any()
    assert not torch.equal(model(text(20)), before)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"eos_token_id": None}, "eos_token_id None"),
        ({"heads_per_ngram": 3}, "a multiple of the heads"),
        ({"ngram_vocab_size_base": 60}, "its heads need"),
        ({"ngram_vocab_size_base": 5000}, "its heads need"),
        ({"split_ngram_parts": 5}, "lacks the tensor"),
        ({"indexer_budget": 22}, "the budget must be whole blocks"),
        ({"indexer_head_dim": 4}, "the keys wide enough"),
        ({"ple_layer_ids": [9]}, "ple_layer_ids"),
        ({"hc_count": 1}, "hc_count"),
        ({"output_gate_type": "relu"}, "output_gate_type"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path, **changes)
    with pytest.raises(lmstate.ModelError, match=message):
        build(WeightLoader(open_source(tmp_path), "float32"))


def test_a_config_that_asks_for_far_too_many_rows_is_refused_without_looking_for_primes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(tmp_path, ngram_vocab_size_base=2**31 - 1, heads_per_ngram=1024, ngram_size=64, ple_embed_dim=8 * 1024 * 63)
    monkeypatch.setattr(qwen4_exp, "primes", lambda low, count: pytest.fail(f"{count} primes from {low} on"))
    with pytest.raises(lmstate.ModelError, match="its heads need"):
        build(WeightLoader(open_source(tmp_path), "float32"))


def test_a_table_in_bfloat16_is_not_converted(tmp_path: Path) -> None:
    saved(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = {
        name: tensor.bfloat16() if "ngram_embedding" in name else tensor for name, tensor in load_file(file).items()
    }
    save_file(tensors, file, metadata={"format": "pt"})
    model = build(WeightLoader(open_source(tmp_path), "float32"))
    assert all(part.dtype == torch.bfloat16 for part in table_of(model).parts)
    assert model(text(20)).isfinite().all()
