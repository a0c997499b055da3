"""Latents attended as they are, and keys and values expanded from them, are one attention; the cheaper one is taken."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

import lmstate
from lmstate import kv
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from lmstate.models.layers import mla
from lmstate.models.layers.mla import MultiHeadLatentAttention
from lmstate.ops import dispatch
from lmstate.ops.types.block_table import BLOCK_TOKENS
from tests.zoo import CASES, auto, latent, ours, randomize, text


@pytest.mark.parametrize("case", latent.CASES)
def test_absorbed_equals_expanded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = ours(case), text(70, rows=2)
    ragged = [ids[0].tolist(), ids[1, :33].tolist()]
    found = {}
    for expands in (False, True):
        monkeypatch.setattr(MultiHeadLatentAttention, "_expands", lambda self, width, end, answer=expands: answer)
        state = model.new_state(2)
        pieces = [model([row[a:b] for row in ragged], state, logits="all") for a, b in ((0, 20), (20, 21), (21, 70))]
        found[expands] = torch.cat([piece for piece in pieces if piece is not None], 1)
    torch.testing.assert_close(found[False], found[True], atol=1e-5, rtol=1e-5)


def test_heads_expanded_few_at_a_time_equal_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, ids = ours("deepseek_v3"), text(70, rows=2)
    monkeypatch.setattr(MultiHeadLatentAttention, "_expands", lambda self, width, end: True)
    whole = model(ids)
    monkeypatch.setattr(mla, "EXPANDED", 140 * 36 * 4)  # four of the six heads, then two
    torch.testing.assert_close(model(ids), whole, atol=1e-6, rtol=1e-6)


def test_decode_expands_nothing_and_a_prompt_only_where_no_native_body_runs() -> None:
    mixer = ours("deepseek_v3").blocks[0].mixer
    assert isinstance(mixer, MultiHeadLatentAttention)

    assert not mixer._expands(1, 4001) and not mixer._expands(3, 3)
    assert mixer._expands(512, 512) == (dispatch.choice().library is None)


def test_the_state_holds_latents_and_not_keys_and_values() -> None:
    model = ours("deepseek_v3")
    state = model.new_state(1, capacity=50)
    model(text(50), state, logits="none")
    positions = -(-50 // BLOCK_TOKENS) * BLOCK_TOKENS
    assert state.memory() == {"latent": 3 * positions * (20 + 8) * 4}  # layers, latent and rope key, float32


@pytest.mark.parametrize("case", ["deepseek_v3", "deepseek_v3-yarn"])
def test_dropped_span_leaves_what_a_text_without_it_stores(case: str) -> None:
    """In the first layer, whose latents and rope keys depend on their own token and its position alone."""
    model, ids = ours(case), text(40)[0].tolist()
    state, short = model.new_state(), model.new_state()
    model([ids], state)
    state.drop(0, 4, 30)
    model([ids[:4] + ids[30:]], short)
    for name, held in state.layers[0].capture(0, 14).items():
        torch.testing.assert_close(held, short.layers[0].capture(0, 14)[name], atol=1e-5, rtol=1e-5)


def test_layers_with_a_window_have_the_sizes_that_published_configs_give_them(tmp_path: Path) -> None:
    config = CASES["dots3_note"]()
    theirs = auto(config).from_config(config, dtype=torch.float32).eval()
    randomize(theirs)
    theirs.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    for name in ("per_layer_config", "rope_parameters", "head_dim"):
        written.pop(name)
    written |= {
        "swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 24,
        "swa_head_dim": 20, "swa_qk_nope_head_dim": 12, "swa_v_head_dim": 8, "swa_rope_theta": 30_000.0,
        "rope_theta": 5_000_000.0, "head_dim": 24, "sliding_window_size": 10,
        "layer_types": ["full_attention", "sliding_attention"] * 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(written))
    model, ids = build(WeightLoader(open_source(tmp_path), "float32")), text(90)
    published = auto(config).from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        torch.testing.assert_close(model(ids), published(ids).logits, atol=1e-4, rtol=1e-4)


def test_a_window_of_latents_is_kept_whole_under_a_policy_that_forgets() -> None:
    model, ids = ours("dots3_note-window"), text(70)
    state, plain = model.new_state(kv=kv.Recent(17)), model.new_state()
    for piece in ids.split(9, dim=1):
        torch.testing.assert_close(model(piece, state), model(piece, plain), atol=1e-5, rtol=1e-5)
    assert state.memory()["latent window"] == plain.memory()["latent window"]
    with pytest.raises(lmstate.UnsupportedError, match="a window of 17 positions"):
        model.new_state(kv=kv.Recent(16))
