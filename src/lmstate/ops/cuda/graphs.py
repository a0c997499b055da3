"""Launches that are recorded once, as a CUDA graph, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


@lru_cache(maxsize=8)
def _pool(index: int) -> Any:
    """The memory that all graphs of a device share: one of them runs at a time."""
    return torch.cuda.graph_pool_handle()


def record(run: Callable[[], Result], device: torch.device) -> tuple[Callable[[], None], Result]:
    """The launches of `run`, to be replayed by the first part of the result, into what `run` gave, the second part.

    `run` was called before, so that its kernels are compiled. It may not wait for the device: that raises
    `RuntimeError`.
    """
    with torch.cuda.device(device):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=_pool(device.index or 0), capture_error_mode="thread_local"):
            result = run()
    return graph.replay, result
