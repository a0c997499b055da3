"""The native libraries as such: the threads that they use, and several callers at once."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import lmstate.ops as ops


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="reads the process's maps")
def test_torch_s_thread_pool_is_the_only_one(variant: str) -> None:
    ops.linear(torch.randn(1, 64), ops.quantize(torch.randn(64, 64), "int4"))
    maps = Path("/proc/self/maps").read_text()
    pools = {line.split()[-1] for line in maps.splitlines() if "libgomp" in line or "libomp" in line}
    assert len(pools) == 1, pools


def test_callers_in_several_threads_do_not_disturb_each_other(variant: str) -> None:
    torch.manual_seed(0)
    weight, norm = ops.quantize(torch.randn(200, 256), "int4"), ops.Norm(torch.rand(256), 1e-5)
    xs = [torch.randn(m, 256) for m in range(1, 9)]
    k, v = torch.randn(1, 2, 700, 32), torch.randn(1, 2, 700, 32)
    starts, counts = torch.tensor([650]), torch.tensor([1])

    def work(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        q = x.view(1, -1, 8, 32)[:, :1]
        return ops.linear(x, weight, norm=norm), ops.attend(q, k, v, starts, counts, ops.AttentionParams(0.1))

    alone = [work(x) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(5):
            for got, want in zip(pool.map(work, xs), alone):
                assert torch.equal(got[0], want[0]) and torch.equal(got[1], want[1])


def test_empty_inputs_give_empty_outputs(variant: str) -> None:
    weight = ops.quantize(torch.randn(16, 32), "int4")
    assert ops.linear(torch.empty(0, 32), weight).shape == (0, 16)
    assert weight.rows(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 32)
    ring, none = torch.empty(0, 1, 4, 8), torch.empty(0, dtype=torch.int64)
    assert ops.attend(torch.empty(0, 3, 2, 8), ring, ring, none, none, ops.AttentionParams(1.0)).shape == (0, 3, 2, 8)
