"""Collectives between the ranks of one model: gloo, over the loopback interface of one machine."""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed

from lmstate.errors import RanksError


class GlooGroup:
    """The ranks of one model. Every rank calls the same methods in the same order."""

    def __init__(self, folder: str, rank: int, ranks: int, timeout: float) -> None:
        """Meet the other ranks in `folder`, which is private to them. A collective may take `timeout` seconds."""
        self.rank, self.ranks = rank, ranks
        gloo: Any = distributed.ProcessGroupGloo  # of whose methods torch's stubs know few
        options = gloo._Options()
        options._devices = [gloo.create_device(hostname="127.0.0.1")]
        options._timeout = timedelta(seconds=timeout)
        store = distributed.FileStore(str(Path(folder) / "store"), ranks)
        store.set_timeout(timedelta(seconds=timeout))
        with reported("meet the other ranks"):
            self._gloo = gloo(store, rank, ranks, options)
        self._store = store

    def gather(self, own: Tensor, widths: Sequence[int], dim: int = -1) -> Tensor:
        """Tensors of all ranks, `widths[rank]` wide in one dimension, joined there in the order of the ranks."""
        shapes = [(*own.shape[:dim], width, *own.shape[dim:][1:]) for width in widths]
        sizes = list(map(math.prod, shapes))
        mine = own.new_empty(max(sizes))  # gloo takes tensors of one size
        mine[: own.numel()] = own.flatten()
        if not len(mine):
            return torch.cat([own.new_empty(shape) for shape in shapes], dim=dim)
        each = [torch.empty_like(mine) for _ in widths]
        with reported("gather"):
            # As bytes: they are moved, and nothing is computed with them.
            self._gloo.allgather([[part.view(torch.uint8) for part in each]], [mine.view(torch.uint8)]).wait()
        return torch.cat([part[:size].view(shape) for part, size, shape in zip(each, sizes, shapes)], dim=dim)

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor with that of rank 0, on all others."""
        if tensor.numel():
            with reported("broadcast"):
                self._gloo.broadcast(tensor.detach().view(-1).view(torch.uint8), 0).wait()


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Raise what gloo raises inside as a `RanksError`."""
    try:
        yield
    except RuntimeError as error:
        raise RanksError(f"a rank could not {what}: {str(error).splitlines()[0]}") from error


def meeting_place() -> tempfile.TemporaryDirectory[str]:
    """A folder of this user alone."""
    return tempfile.TemporaryDirectory(prefix="lmstate-ranks-")
