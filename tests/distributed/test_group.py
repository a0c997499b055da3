"""What ranks exchange, over the sockets of one process."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from time import monotonic

import pytest
import torch
from torch import Tensor

from lmstate.distributed.group import SocketGroup
from lmstate.errors import RanksError


def on_each(ranks: int, do: Callable[[SocketGroup], Tensor], timeout: float = 20.0) -> list[Tensor]:
    """The results of what each rank does, in threads."""
    pairs = [socket.socketpair() for _ in range(1, ranks)]
    groups = [SocketGroup(0, ranks, [ours for ours, _ in pairs], timeout)]
    groups += [SocketGroup(rank, ranks, [theirs], timeout) for rank, (_, theirs) in enumerate(pairs, 1)]
    found: list[Tensor] = [torch.empty(0)] * ranks

    def run(rank: int) -> None:
        found[rank] = do(groups[rank])

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for group in groups:
        group.close()
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.uint8])
@pytest.mark.parametrize("shape", [(6,), (2, 6), (6, 3, 5), (700, 6, 300)])
def test_parts_come_in_the_order_of_the_ranks(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """Of other widths each, none wide, and more than a socket holds."""
    whole = torch.randn(shape).mul(9).to(dtype)
    dim, widths = shape.index(6), (3, 0, 2, 1)
    parts = whole.split(widths, dim=dim)
    for found in on_each(4, lambda group: group.gather(parts[group.rank], widths, dim)):
        assert torch.equal(found, whole)


def test_all_get_what_rank_0_has() -> None:
    def do(group: SocketGroup) -> Tensor:
        tensor = torch.full((300, 900), float(group.rank) + 1)
        group.broadcast(tensor)
        return tensor

    assert all(bool((found == 1).all()) for found in on_each(3, do))


def test_a_rank_that_hangs_or_ended_is_an_error() -> None:
    ours, theirs = socket.socketpair()
    group = SocketGroup(0, 2, [ours], 0.1)
    with pytest.raises(RanksError, match="timed out"):
        group.gather(torch.ones(2), (2, 2))
    theirs.close()
    patient = SocketGroup(0, 2, [ours], 60)
    with pytest.raises(RanksError, match="ended"):
        patient.gather(torch.ones(2), (2, 2))
    group.close()


def test_a_rank_that_trickles_has_no_more_time_than_one_that_hangs() -> None:
    """The limit is of the whole collective, however many pieces of it come."""
    ours, theirs = socket.socketpair()
    group, over = SocketGroup(0, 2, [ours], 0.5), threading.Event()

    def trickle() -> None:
        while not over.wait(0.05):
            theirs.send(b"x")

    thread = threading.Thread(target=trickle)
    thread.start()
    begin = monotonic()
    with pytest.raises(RanksError, match="timed out"):
        group.gather(torch.ones(1000), (1000, 1000))
    assert monotonic() - begin < 20
    over.set()
    thread.join()
    group.close()
    theirs.close()
