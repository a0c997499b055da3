"""Collectives between the ranks of one model on one machine: rank 0 has a socket pair with each of the others.

A decode step exchanges some kilobytes a hundred times. Over a socket pair each takes two switches between processes,
several times less than an all-gather of gloo on the loopback interface, and no other program can connect to it.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from time import monotonic

import torch
from torch import Tensor

from lmstate.errors import RanksError

BUFFER = 1 << 20
"""Bytes that a socket takes before its other end reads them."""


class SocketGroup:
    """The ranks of one model. Every rank calls the same methods in the same order."""

    def __init__(self, rank: int, ranks: int, sockets: Sequence[socket.socket], timeout: float) -> None:
        """`sockets`: of rank 0 those to the others in their order; of another one that to rank 0.

        timeout: the seconds that a collective may take, after which the ranks count as lost.
        """
        self.rank, self.ranks, self._sockets, self._timeout = rank, ranks, list(sockets), timeout
        for each in self._sockets:
            each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)

    def gather(self, own: Tensor, widths: Sequence[int], dim: int = -1) -> Tensor:
        """Tensors of all ranks, `widths[rank]` wide in one dimension, joined there in the order of the ranks."""
        end = monotonic() + self._timeout
        shapes = [(*own.shape[:dim], width, *own.shape[dim:][1:]) for width in (*widths, sum(widths))]
        if self.rank:
            with reported("gather"):
                self._send(0, own.contiguous(), end)
                return self._received(0, own, shapes[-1], end)
        with reported("gather"):
            others = [self._received(at, own, shape, end) for at, shape in enumerate(shapes[1:-1])]
            joined = torch.cat([own, *others], dim=dim).contiguous()
            for at in range(len(self._sockets)):
                self._send(at, joined, end)
        return joined

    def sum(self, own: Tensor) -> Tensor:
        """Tensors of all ranks, of one shape, added in the order of the ranks."""
        end, own = monotonic() + self._timeout, own.contiguous()
        with reported("sum"):
            if self.rank:
                self._send(0, own, end)
                return self._received(0, own, own.shape, end)
            for at in range(len(self._sockets)):
                own = own + self._received(at, own, own.shape, end)
            for at in range(len(self._sockets)):
                self._send(at, own, end)
        return own

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite a contiguous tensor with that of rank 0, on all others."""
        end = monotonic() + self._timeout
        with reported("broadcast"):
            if self.rank:
                self._fill(0, tensor, end)
                return
            for at in range(len(self._sockets)):
                self._send(at, tensor, end)

    def close(self) -> None:
        for each in self._sockets:
            each.close()

    def _within(self, at: int, end: float) -> socket.socket:
        """A socket that waits until then at most. Raises `TimeoutError` past it."""
        if (left := end - monotonic()) <= 0:
            raise TimeoutError("timed out")
        self._sockets[at].settimeout(left)
        return self._sockets[at]

    def _send(self, at: int, tensor: Tensor, end: float) -> None:
        self._within(at, end).sendall(_bytes(tensor))

    def _received(self, at: int, like: Tensor, shape: tuple[int, ...], end: float) -> Tensor:
        tensor = like.new_empty(shape)
        self._fill(at, tensor, end)
        return tensor

    def _fill(self, at: int, tensor: Tensor, end: float) -> None:
        into, done = _bytes(tensor), 0
        while done < len(into):
            if not (count := self._within(at, end).recv_into(into[done:])):
                raise EOFError("it ended")
            done += count


def _bytes(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8).numpy().data


@contextmanager
def reported(what: str) -> Iterator[None]:
    """Raise what goes wrong with another rank inside as a `RanksError`."""
    try:
        yield
    except (OSError, EOFError) as error:
        raise RanksError(f"a rank could not {what} with another one: {error}") from error
