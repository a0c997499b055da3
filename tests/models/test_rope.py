"""Ropes that a config asks for: tables of many positions, and what cannot be."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.models.layers.rope import TABLED, Rope, make_rope
from lmstate.state import Step


@pytest.mark.parametrize(
    "changes",
    [
        {"rope_theta": 1},  # its logarithm is divided by
        {"mscale": 1.0, "mscale_all_dim": -10.0 / 1.3862943611198906},  # a temperature of 0
        {"beta_fast": 1e-320},
    ],
)
def test_a_yarn_of_impossible_numbers_is_refused(changes: dict[str, Any]) -> None:
    yarn = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 64}
    make_rope(Config({"rope_parameters": yarn}), 16)
    with pytest.raises(ModelError, match="no yarn"):
        make_rope(Config({"rope_parameters": {**yarn, **changes}}), 16)


def step_of(starts: tuple[int, ...], counts: tuple[int, ...]) -> Step:
    return Step(starts, counts, torch.device("cpu"), starts)


@pytest.mark.parametrize("scale", [1.0, 0.7])
def test_tables_of_all_positions_have_the_bits_of_those_of_a_step(scale: float) -> None:
    rope = Rope(1.0 / 1e4 ** (torch.arange(24) / 24), scale)
    steps = [
        ((0,), (1,)),
        ((5,), (1,)),
        ((1000,), (100,)),
        ((7, 3000), (3, 3)),
        ((9000,), (2500,)),
        ((TABLED - 5,), (5,)),
    ]
    for starts, counts in steps:
        step = step_of(starts, counts)
        whole, own = rope.fused_rotation(step), rope.rotation(step)
        for row, (start, count) in enumerate(zip(starts, counts)):
            for table, part in zip(whole[:2], own[:2]):
                assert torch.equal(table[start : start + count], part[row])


def test_positions_too_far_for_a_table_have_their_own() -> None:
    rope, step = Rope(torch.rand(8)), step_of((TABLED,), (1,))
    assert rope.fused_rotation(step) is rope.rotation(step)


def test_a_copy_has_frequencies_of_its_own_and_tables_of_its_own() -> None:
    rope, step = Rope(torch.rand(8)), step_of((0,), (5,))
    want = rope.fused_rotation(step)
    one, another = copy.deepcopy((rope, rope))
    assert one is another, "layers that share one still do"
    one.frequencies.requires_grad_()
    assert not rope.frequencies.requires_grad
    with torch.no_grad():
        one.frequencies.zero_()
        assert one.fused_rotation(step_of((0,), (5,))).sin.any().item() is False
    assert rope.fused_rotation(step_of((1,), (5,))).sin is want.sin and want.sin.any()
