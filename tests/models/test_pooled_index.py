"""Layers whose index has one key for several tokens (Qwen4-Exp): what they keep, choose and refuse."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import lmstate
from lmstate import kv
from lmstate.models.layers.pooled_index import PooledIndexAttention
from lmstate.state import PooledIndexState, Step
from lmstate.training import loss
from tests.training.small import ragged, trainable
from tests.zoo import ours, text

CASE, LAYER = "qwen4_exp", 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": kv.Quantized(8)}, "in floats alone"),
        ({"kv": kv.Recent(40)}, "none can be forgotten"),
        ({"static": True, "capacity": 100}, "in floats alone"),
    ],
)
def test_storages_that_such_a_layer_has_not_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(lmstate.UnsupportedError, match=message):
        ours(CASE).new_state(**options)


def test_a_span_cannot_be_dropped_and_chunks_are_not_trained() -> None:
    model = ours(CASE)
    state = model.new_state()
    model([text(40)[0].tolist()], state)
    assert not state.can_drop(0, 4, 12)
    with pytest.raises(lmstate.UnsupportedError, match="cannot be trained in chunks"):
        loss(trainable(CASE), ragged(40), chunk=16)


@pytest.mark.parametrize("piece", [1, 7, 90])
def test_any_cut_chooses_the_best_blocks_and_the_last_tokens(piece: int) -> None:
    """Against scores of the stored keys, each query by itself."""
    model, ids = ours(CASE), text(90)[0].tolist()
    layer = model.blocks[LAYER].mixer
    assert isinstance(layer, PooledIndexAttention)
    index, state = layer.index, model.new_state()
    found: dict[int, tuple[torch.Tensor, list[int]]] = {}  # of each position, its query and its blocks
    cache = state.layers[LAYER]
    assert isinstance(cache, PooledIndexState)
    choose = cache.choose

    def recording(q: torch.Tensor, weights: torch.Tensor, budget: int, step: Step) -> torch.Tensor:
        chosen = choose(q, weights, budget, step)
        for place, query, blocks in zip(step.positions[0].tolist(), q[0], cache.with_rest(chosen, step)[0].tolist()):
            found[place] = query, [at for at in blocks if at >= 0]
        return chosen

    setattr(cache, "choose", recording)  # noqa: B010
    for start in range(0, len(ids), piece):
        model([ids[start : start + piece]], state)
    keys = cache.entries.capture(0, len(ids) // index.rate)["index"][0]  # [S, Di]
    for own in range(40, 90):
        query, blocks = found[own]
        whole = (own + 1) // index.rate
        scores = (query @ keys[:whole].T).relu().sum(0).tolist()
        best = sorted(range(whole), key=lambda at: (-scores[at], -at))[: index.budget]
        assert blocks == sorted(best) + ([whole] if (own + 1) % index.rate else [])
