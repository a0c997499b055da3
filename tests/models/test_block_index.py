"""Layers that attend to chosen blocks (MiniMax-M3): what they keep and refuse, and configs of the older layout."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import lmstate
from lmstate import kv
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from lmstate.ops.types.block_table import BLOCK_TOKENS
from lmstate.state.layers import indexed_attention
from tests.zoo import CASES, auto, ours, randomize, text

CASE = "minimax_m3"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": kv.Quantized(4)}, "floats or 8 bits alone"),
        ({"kv": kv.Recent(40)}, "none can be forgotten"),
        ({"static": True, "capacity": 100}, "floats or 8 bits alone"),
    ],
)
def test_storages_that_such_a_layer_has_not_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(lmstate.UnsupportedError, match=message):
        ours(CASE).new_state(**options)


def test_keys_and_values_of_8_bits_are_near_those_of_floats(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where both attend to the same blocks: each choice is that of the floats, and cuts change no bit."""
    choices: list[torch.Tensor] = []
    choose = indexed_attention.choose_blocks

    def recording(*given: Any, **more: Any) -> torch.Tensor:
        choices.append(choose(*given, **more))
        return choices[-1]

    model, ids = ours("minimax_m3-groups"), text(90)[0].tolist()
    monkeypatch.setattr(indexed_attention, "choose_blocks", recording)
    exact = model([ids], model.new_state(), logits="all")
    monkeypatch.setattr(indexed_attention, "choose_blocks", lambda *_, **__: choices.pop(0))
    coded = model([ids], model.new_state(kv=kv.Quantized(8)), logits="all")
    assert not choices
    # Where a token's experts change, it is far off.
    assert 0 < (coded - exact).abs().quantile(0.8) < 0.05 * exact.std()


def test_a_layer_stores_a_key_of_each_position_beside_keys_and_values() -> None:
    model = ours(CASE)
    state = model.new_state()
    model(text(50), state, logits="none")
    positions = -(-50 // BLOCK_TOKENS) * BLOCK_TOKENS
    assert state.memory() == {
        "attention": positions * 2 * 2 * 16 * 4,  # key/value heads, keys and values, width, float32
        "indexed attention": 3 * positions * (2 * 2 * 16 + 16) * 4,
    }


def test_a_dropped_span_leaves_what_a_text_without_it_stores() -> None:
    """In the first layer, whose keys depend on their own token and its position alone."""
    model, ids = ours("minimax_m3-groups"), text(40)[0].tolist()
    state, short = model.new_state(), model.new_state()
    model([ids], state)
    state.drop(0, 4, 30)
    model([ids[:4] + ids[30:]], short)
    for name, held in state.layers[0].capture(0, 14).items():
        torch.testing.assert_close(held, short.layers[0].capture(0, 14)[name], atol=1e-5, rtol=1e-5)


def saved(folder: Path, **changes: Any) -> None:
    """A random model of the case; `changes`: of the config that its file has, without those that are None."""
    config = CASES[CASE]()
    theirs = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text()) | changes
    (folder / "config.json").write_text(json.dumps({name: each for name, each in written.items() if each is not None}))


def test_a_config_of_the_older_layout_is_the_same_model(tmp_path: Path) -> None:
    older = {
        "sparse_num_index_heads": 2, "sparse_index_dim": 16, "sparse_block_size": 8, "sparse_topk_blocks": 3,
        "sparse_local_block": 1, "sparse_attention_freq": [0, 1, 1, 1],
    }  # fmt: skip
    names = ("index_n_heads", "index_head_dim", "index_block_size", "index_topk_blocks", "index_local_blocks")
    left_out = dict.fromkeys((*names, "layer_types", "mlp_layer_types"))
    saved(tmp_path, sparse_attention_config=older, moe_layer_freq=[0, 1, 1, 1], **left_out)
    model = build(WeightLoader(open_source(tmp_path), "float32"))
    ids = text(90)
    theirs = auto(CASES[CASE]()).from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), theirs(ids).logits, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"swiglu_limit": 5.0}, "with 7.0 alone"),
        ({"index_n_heads": 4}, "an index of 4 heads"),
        ({"index_topk_blocks": 0}, "index_topk_blocks"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    saved(tmp_path, **changes)
    with pytest.raises(lmstate.ModelError, match=message):
        build(WeightLoader(open_source(tmp_path), "float32"))
