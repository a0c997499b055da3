"""A deep copy of a state shares no memory with it, also where a step's arguments are kept from step to step."""

from __future__ import annotations

import copy

import pytest
import torch

from lmstate import kv
from tests.zoo import ours, text

POLICIES = {
    "all": None,
    "8 bits": kv.Quantized(8),
    "4 bits": kv.Quantized(4),
    "h2o": kv.H2O(budget=12, recent=4, sinks=1),
    "snapkv": kv.SnapKV(budget=12, window=4, sinks=1),
}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_and_its_original_go_apart(policy: str) -> None:
    model, ids = ours("llama"), text(24)[0].tolist()
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
