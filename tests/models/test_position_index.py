"""Layers that attend to chosen positions: a choice is the same however the text is cut, also where scores are equal."""

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
from lmstate.models.layers.mla import MultiHeadLatentAttention
from lmstate.models.layers.position_index import PositionIndex
from lmstate.ops import dispatch
from lmstate.ops.types.block_table import BLOCK_TOKENS
from tests.zoo import CASES, auto, ours, randomize, text

CASE = "deepseek_v32"


def built(folder: Path, config: Any, **saved: Any) -> lmstate.Model:
    """A random model of a config; `saved`: what else its file says."""
    theirs = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    theirs.save_pretrained(folder)
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(written | saved))
    return build(WeightLoader(open_source(folder), "float32"))


def fed(model: lmstate.Model, ids: torch.Tensor, size: int, **how: Any) -> torch.Tensor:
    state = model.new_state(len(ids), **how)
    return torch.cat([model(piece, state, logits="all") for piece in ids.split(size, dim=1)], 1)


@pytest.mark.parametrize("case", [CASE, "glm_moe_dsa-shared"])
def test_equal_scores_are_chosen_alike_by_any_cut(case: str, tmp_path: Path) -> None:
    """With one head half of the scores are zero: transformers' own forward is then not causal."""
    model = built(tmp_path, CASES[case](index_n_heads=1))
    ids = text(140)
    whole = fed(model, ids, 140)
    for size in (1, 9, 64):
        cut = fed(model, ids, size)
        torch.testing.assert_close(cut, whole, atol=1e-4, rtol=1e-4)
        assert dispatch.choice().library is None or torch.equal(cut, whole), size


@pytest.mark.parametrize("how", [{"kv": kv.Quantized(8)}, {"kv": kv.Quantized(4)}, {"static": True, "capacity": 150}])
def test_storages_and_static_states_choose_alike_by_any_cut(how: dict[str, Any]) -> None:
    model, ids = ours(CASE), text(140, rows=2)
    torch.testing.assert_close(fed(model, ids, 7, **how), fed(model, ids, 140, **how), atol=1e-4, rtol=1e-4)


def test_a_policy_that_forgets_is_refused() -> None:
    with pytest.raises(lmstate.UnsupportedError, match="none can be forgotten"):
        ours("glm_moe_dsa-shared").new_state(kv=kv.Recent(40))


def test_rows_below_the_budget_choose_nothing_and_beside_longer_ones_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = ours(CASE), text(140)
    chosen: list[tuple[int, ...]] = []
    choose = PositionIndex.choose

    def noted(self: PositionIndex, *args: Any) -> torch.Tensor | None:
        found = choose(self, *args)
        chosen.append(() if found is None else tuple(found.shape))
        return found

    monkeypatch.setattr(PositionIndex, "choose", noted)
    short = model([ids[0, :12].tolist()], model.new_state(1), logits="all")
    assert chosen == [()] * 3
    both = model([ids[0].tolist(), ids[0, :12].tolist()], model.new_state(2), logits="all")
    assert chosen[3:] == [(2, 140, 12)] * 3
    torch.testing.assert_close(both[1, :12], short[0], atol=1e-5, rtol=1e-5)
    assert dispatch.choice().library is None or torch.equal(both[1, :12], short[0])


def test_a_layer_that_shares_a_choice_stores_no_index() -> None:
    model = ours("glm_moe_dsa-shared")
    state = model.new_state(1)
    model(text(50), state, logits="none")
    positions = -(-50 // BLOCK_TOKENS) * BLOCK_TOKENS
    assert state.memory() == {
        "indexed latent": 2 * positions * (20 + 8 + 16) * 4,  # layers, latent, rope key and index, float32
        "latent": 2 * positions * (20 + 8) * 4,
    }


@pytest.mark.parametrize("case", [CASE, "glm_moe_dsa"])
def test_a_dropped_span_leaves_what_a_text_without_it_stores(case: str) -> None:
    """In the first layer, whose latents, rope keys and index depend on their own token and its position alone."""
    model, ids = ours(case), text(40)[0].tolist()
    state, short = model.new_state(), model.new_state()
    model([ids], state)
    state.drop(0, 4, 30)
    model([ids[:4] + ids[30:]], short)
    for name, held in state.layers[0].capture(0, 14).items():
        torch.testing.assert_close(held, short.layers[0].capture(0, 14)[name], atol=1e-5, rtol=1e-5)


def test_a_choice_that_the_layers_share_is_of_the_pattern_that_older_configs_have(tmp_path: Path) -> None:
    config = CASES["glm_moe_dsa-shared"]()
    model = built(tmp_path, config, indexer_types=None, index_topk_pattern="FSFS")
    kinds = [
        type(block.mixer.index).__name__ for block in model.blocks if isinstance(block.mixer, MultiHeadLatentAttention)
    ]
    assert kinds == ["PositionIndex", "EarlierChoice"] * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"indexer_types": ["shared", "full", "full"]}, "first one is full"),
        ({"indexer_types": ["full", "half", "full"]}, "indexer_types"),
        ({"index_n_heads": 0}, "index_n_heads"),
        ({"index_topk": 0}, "index_topk"),
    ],
)
def test_an_index_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(lmstate.ModelError, match=message):
        built(tmp_path, CASES["glm_moe_dsa"](), **changes)
