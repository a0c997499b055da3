"""Ropes that a config asks for and that cannot be."""

from __future__ import annotations

from typing import Any

import pytest

from lmstate.checkpoints.config import Config
from lmstate.errors import ModelError
from lmstate.models.layers.rope import make_rope


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
