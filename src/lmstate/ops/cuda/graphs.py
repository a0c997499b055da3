"""Launches that are recorded once, as a CUDA graph, and replayed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from lmstate.ops.cuda.device import on_real_gpu

Result = TypeVar("Result")


class GraphPool:
    """Memory that graphs share: one of them runs at a time, and its results are copied before the next one runs."""

    def __init__(self) -> None:
        self._handle: Any = None
        """None while no graph uses it: torch refuses a pool whose graphs are all gone."""
        self._stream: torch.cuda.Stream | None = None

    def record(self, run: Callable[[], Result], device: torch.device) -> tuple[Callable[[], None], Result]:
        """The launches of `run`, to be replayed by the first part of the result, into what `run` gave, the second part.

        `run` was called before, so that its kernels are compiled. It may not wait for the device: that raises
        `RuntimeError`.
        """
        with torch.cuda.device(device):
            handle = torch.cuda.graph_pool_handle() if self._handle is None else self._handle
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, pool=handle, capture_error_mode="thread_local"):
                result = run()
            self._handle = handle
        return graph.replay, result

    def enter(self, device: torch.device) -> None:
        """Let the current stream wait for the one on which graphs ran last."""
        if on_real_gpu(device):
            stream = torch.cuda.current_stream(device)
            if self._stream is not None and self._stream != stream:
                stream.wait_stream(self._stream)
            self._stream = stream
