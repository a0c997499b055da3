"""Latents attended as they are, and keys and values expanded from them, are one attention; the cheaper one is taken."""

from __future__ import annotations

import pytest
import torch

from lmstate.models.layers import mla
from lmstate.models.layers.mla import MultiHeadLatentAttention
from lmstate.ops import dispatch
from lmstate.ops.types.block_table import BLOCK_TOKENS
from tests.zoo import latent, ours, text


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
