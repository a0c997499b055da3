"""Layers whose index has one key for several tokens (Qwen4-Exp, GLM-5.3): what they keep, choose and refuse."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import lmstate
from lmstate import kv
from lmstate.checkpoints.loader import WeightLoader
from lmstate.checkpoints.open import open_source
from lmstate.models.families import build
from lmstate.state import PooledIndexState, Step
from lmstate.training import loss
from tests.training.small import ragged, trainable
from tests.zoo import ours, pair, text

CASES = ("qwen4_exp", "glm5_next")
LAYER = 3


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": kv.Recent(40)}, "none can be forgotten"),
        ({"static": True, "capacity": 100}, "floats or 8 bits alone"),
    ],
)
def test_storages_that_such_a_layer_has_not_are_refused(case: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(lmstate.UnsupportedError, match=message):
        ours(case).new_state(**options)


def test_keys_and_values_have_8_bits_and_no_fewer() -> None:
    with pytest.raises(lmstate.UnsupportedError, match="floats or 8 bits alone"):
        ours("qwen4_exp").new_state(kv=kv.Quantized(4))


@pytest.mark.parametrize(("case", "bits"), [("glm5_next", 8), ("glm5_next", 4), ("qwen4_exp", 8)])
def test_what_is_chosen_may_be_quantized(case: str, bits: int) -> None:
    """The choice is of keys in floats. What is expanded follows it in short steps, and takes all in a prompt."""
    model, ids = ours(case), text(90)[0].tolist()
    exact = model([ids], model.new_state(), logits="all")
    state = model.new_state(kv=kv.Quantized(bits))
    whole = model([ids], state, logits="all")
    assert 0 < (whole - exact).abs().max() < 0.3 * exact.std()
    again = model.new_state(kv=kv.Quantized(bits))
    parts = [model([ids[start:stop]], again, logits="all") for start, stop in pairwise((0, 40, 41, 42, 45, 90))]
    assert torch.equal(torch.cat(parts, dim=1), whole)


@pytest.mark.parametrize("case", CASES)
def test_a_span_cannot_be_dropped_and_chunks_are_not_trained(case: str) -> None:
    model = ours(case)
    state = model.new_state()
    model([text(40)[0].tolist()], state)
    assert not state.can_drop(0, 4, 12)
    with pytest.raises(lmstate.UnsupportedError, match="cannot be trained in chunks"):
        loss(trainable(case), ragged(40), chunk=16)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("piece", [1, 7, 90])
def test_any_cut_chooses_the_best_blocks_and_the_last_tokens(case: str, piece: int) -> None:
    """Against scores of the stored keys, each query by itself."""
    model, ids, rate, count = ours(case), text(90)[0].tolist(), 4, 6
    state, found = model.new_state(), dict[int, tuple[torch.Tensor, torch.Tensor, list[int]]]()
    cache = state.layers[LAYER]
    assert isinstance(cache, PooledIndexState)
    choose = cache.choose

    def recording(q: torch.Tensor, weights: torch.Tensor, budget: int, step: Step) -> torch.Tensor:
        chosen = choose(q, weights, budget, step)
        blocks = cache.with_rest(chosen, step)[0].tolist()
        for place, query, weight, those in zip(step.positions[0].tolist(), q[0], weights[0], blocks):
            found[place] = query, weight, [at for at in those if at >= 0]
        return chosen

    setattr(cache, "choose", recording)  # noqa: B010
    for start in range(0, len(ids), piece):
        model([ids[start : start + piece]], state)
    keys = cache.entries.capture(0, len(ids) // rate)["index"][0]  # [S, Di]
    for own in range(40, 90):
        query, weight, blocks = found[own]
        whole = (own + 1) // rate
        scores = (weight @ (query @ keys[:whole].T).relu()).tolist()
        best = sorted(range(whole), key=lambda at: (-scores[at], -at))[:count]
        assert blocks == sorted(best) + ([whole] if (own + 1) % rate else [])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"index_topk": 22}, "a multiple of index_kpool"),
        ({"index_kpool_always_select_tail": False}, "without rope"),
        ({"indexer_types": ["full", "full", "full", "shared"]}, "none chooses"),
        ({"hc_mult": 0}, "hc_mult"),
    ],
)
def test_a_config_that_makes_no_sense_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    pair("glm5_next")[0].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"] |= changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(lmstate.ModelError, match=message):
        build(WeightLoader(open_source(tmp_path), "float32"))


def test_a_config_that_keeps_its_delta_rule_apart_is_the_same_model(tmp_path: Path) -> None:
    pair("glm5_next")[0].save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    inner = config["text_config"]
    names = {"head_dim": "linear_head_dim", "num_heads": "linear_num_heads"} | {
        "short_conv_kernel_size": "linear_conv_kernel_dim", "gate_lower_bound": "linear_lower_bound",
    }  # fmt: skip
    inner["linear_attn_config"] = {older: inner.pop(name) for older, name in names.items()}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert torch.equal(build(WeightLoader(open_source(tmp_path), "float32"))(text(30)), ours("glm5_next")(text(30)))
