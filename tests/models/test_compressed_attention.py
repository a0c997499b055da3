"""Layers that attend to a window and to compressed entries (DeepSeek-V4): what they keep, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lmstate
from lmstate import kv
from lmstate.ops.types.block_table import BLOCK_TOKENS
from lmstate.state import CompressedState
from lmstate.training import loss
from tests.training.small import ragged, trainable
from tests.zoo import ours, text

CASE = "deepseek_v4"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": kv.Quantized(8)}, "no policy shortens or quantizes"),
        ({"kv": kv.Recent(40)}, "no policy shortens or quantizes"),
        ({"static": True, "capacity": 100}, "has no static form"),
    ],
)
def test_storages_that_such_a_layer_has_not_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(lmstate.UnsupportedError, match=message):
        ours(CASE).new_state(**options)


def test_a_span_cannot_be_dropped() -> None:
    model = ours(CASE)
    state = model.new_state()
    model([text(40)[0].tolist()], state)
    assert not state.can_drop(0, 4, 12)
    with pytest.raises(lmstate.UnsupportedError, match="an entry of it stands for"):
        state.drop(0, 4, 12)
    assert state.lengths == [40]


def test_entries_grow_with_the_text_and_nothing_else_does() -> None:
    model = ours(CASE)
    state, short = model.new_state(rewind=0), model.new_state(rewind=0)
    model(text(5 * BLOCK_TOKENS + 5), state, logits="none")
    model(text(2 * BLOCK_TOKENS + 5), short, logits="none")
    entry = 4 * BLOCK_TOKENS  # bytes of a number of each position of a block
    # Of 325 tokens there are 81 entries of 4, in two blocks, and 20 of 16; of 133 there are 33 and 8.
    assert state.memory()["compressed"] == entry * (2 * 2 * (32 + 16) + 32)
    assert short.memory()["compressed"] == entry * (2 * 1 * (32 + 16) + 32)
    assert state.memory()["window"] == short.memory()["window"]
    assert state.memory()["compressor"] == short.memory()["compressor"]


def test_an_entry_is_there_once_its_last_token_is_and_goes_with_it() -> None:
    model, ids = ours(CASE), text(64)[0].tolist()
    state, whole = model.new_state(), model.new_state()
    model([ids], whole)
    layer, other = state.layers[2], whole.layers[2]  # of 16 tokens
    assert isinstance(layer, CompressedState) and isinstance(other, CompressedState)
    model([ids[:15]], state)
    assert not layer.entries.capture(0, 15 // 16)["entry"].numel()
    model([ids[15:40]], state, commit=False)
    state.commit(17)  # 32 tokens: two entries
    first = layer.entries.capture(0, 2)["entry"].clone()
    model([ids[32:50]], state)
    state.rewind(0, 35)
    assert torch.equal(layer.entries.capture(0, 2)["entry"], first)
    model([ids[35:]], state)
    torch.testing.assert_close(
        layer.entries.capture(0, 4)["entry"], other.entries.capture(0, 4)["entry"], atol=1e-5, rtol=1e-5
    )


def test_a_model_of_such_layers_is_not_trained_in_chunks() -> None:
    with pytest.raises(lmstate.UnsupportedError, match="cannot be trained in chunks"):
        loss(trainable(CASE), ragged(40), chunk=16)
