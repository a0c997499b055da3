"""Whose memory is whose: a deep copy of a state shares none with it, and a dropped state holds none."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import pytest
import torch

from lmstate import kv
from lmstate.state import RecurrentState
from tests.zoo import ours, text

POLICIES = {
    "all": None,
    "8 bits": kv.Quantized(8),
    "4 bits": kv.Quantized(4),
    "h2o": kv.H2O(budget=12, recent=4, sinks=1),
    "snapkv": kv.SnapKV(budget=12, window=4, sinks=1),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["llama", "qwen3_next", "bamba"])
def test_a_copy_and_its_original_go_apart(case: str, policy: str) -> None:
    model, ids = ours(case), text(24)[0].tolist()
    wants = []
    for last in ([1, 2], [3, 4]):
        state = model.new_state(kv=POLICIES[policy])
        wants += [model([[token]], state) for token in [*ids, *last]][-2:]
    state = model.new_state(kv=POLICIES[policy])
    for token in ids:
        model([[token]], state)
    twin = copy.deepcopy(state)
    got = [model([[token]], which) for token, which in ((1, state), (3, twin), (2, state), (4, twin))]
    for i, want in enumerate(wants):
        assert torch.equal(got[(0, 2, 1, 3)[i]], want)


@pytest.mark.parametrize("case", ["mamba2", "qwen3_next", "falcon_h1", "lfm2"])
def test_a_copied_state_goes_on_with_the_same_weights(case: str) -> None:
    model, ids = ours(case), [[1, 2, 3]]
    state = model.new_state()
    model(ids, state)
    twin, (other, both) = copy.deepcopy(state), copy.deepcopy((model, state))
    for mixers, copied in ((model.blocks, twin), (other.blocks, both)):
        folds = [
            part.scan.__self__ for layer in copied.layers for part in layer.leaves() if isinstance(part, RecurrentState)
        ]
        known = {id(mixer) for block in mixers for mixer in (block.mixer, getattr(block.mixer, "other", None))}
        assert folds and {id(mixer) for mixer in folds} <= known
    for which, copied in ((model, twin), (other, both)):
        torch.testing.assert_close(which([[4]], copied), model([[1, 2, 3, 4]], logits="last"), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("case", ["llama", "qwen3_next", "bamba"])
def test_a_copied_model_reads_its_own_weights(case: str) -> None:
    model, ids = copy.deepcopy(ours(case)), [[1, 2, 3]]
    want = model(ids, model.new_state())
    twin = copy.deepcopy(model)
    for block in model.blocks:
        block.mixer.out.storage.zero_()
    assert torch.equal(twin(ids, twin.new_state()), want)
    assert not torch.equal(model(ids, model.new_state()), want)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3", "qwen3_next"])
def test_a_dropped_state_is_gone_at_once(case: str, policy: str) -> None:
    model, ids = ours(case), text(24)[0].tolist()
    gc.disable()  # what is part of a cycle would wait for it
    try:
        state = model.new_state(rows=2, kv=POLICIES[policy])
        for step in ([ids, ids[:3]], [[1], [2]], [[3], [4]]):
            model(step, state)
        model([[5, 6], [7, 8]], state, commit=False)
        state.commit([1, 0])
        held = [weakref.ref(layer) for layer in state.layers]
        del state
        assert [one() for one in held] == [None] * len(held)
    finally:
        gc.enable()


def test_a_state_is_not_pickled_and_says_what_is_and_its_snapshot_goes_through_a_pickle() -> None:
    model = ours("qwen3_next")
    state = model.new_state()
    model([[5, 6, 7]], state)
    with pytest.raises(TypeError, match=r"State belongs to its model.*snapshot\(row\)"):
        pickle.dumps(state)
    again = model.new_state()
    again.restore(0, pickle.loads(pickle.dumps(state.snapshot(0))))
    assert again.tokens(0) == [5, 6, 7]
    assert torch.equal(model([[8]], again), model([[8]], state))
