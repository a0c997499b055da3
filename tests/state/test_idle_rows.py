"""Rows whose layers go back in one call, each from what the one before it left."""

from __future__ import annotations

import pytest
import torch

from tests.invariants.mirror import Mirror
from tests.zoo import ours, text


@pytest.mark.parametrize("case", ["llama", "mistral", "deepseek_v3", "mamba2", "qwen3_next-dense", "lfm2", "rwkv"])
def test_several_idle_rows_read_their_last_token_again(case: str) -> None:
    mirror = Mirror(ours(case), rows=3, rewind=16)
    mirror.extend([text(5, seed=1)[0].tolist(), [], text(2, seed=2)[0].tolist()], "none")
    got = mirror.model([[], text(3, seed=3)[0].tolist(), []], mirror.state, commit=False)
    assert got is not None
    for row in (0, 2):
        torch.testing.assert_close(got[row], mirror.expected(mirror.rows[row])[-1], atol=1e-4, rtol=1e-4)
    mirror.state.discard()
    mirror.check()
