"""Ranks that the environment gives, as torchrun does: the same program runs in each of them, and rank 0 leads."""

from __future__ import annotations

import os
import socket
from contextlib import closing
from datetime import timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import torch
from torch.distributed import Store, rendezvous

from lmstate.distributed.channel import RankChannel
from lmstate.distributed.follower import followed
from lmstate.distributed.ranks import STARTING, TIMEOUT, Ranks, end, led, start
from lmstate.errors import ModelError, RanksError

SOCKET = "socket"
"""Name of the socket of rank 0, and the key of its path in the store that all ranks see."""
COMMANDS, TENSORS = 0, 1  # the purpose of a connection
_led = False  # whether a model has the ranks


def join(parallel: int) -> None:
    """In other ranks than the first: compute what it asks for until it ends, then raise `SystemExit`.

    Returns at once in rank 0, and where the environment gives no ranks. Raises `ModelError` where it gives another
    number of them, or some on other machines.
    """
    if not (rank := _given(parallel)):
        return
    path = _store().get(SOCKET).decode()
    made = []
    for purpose in (COMMANDS, TENSORS):
        made.append(socket.socket(socket.AF_UNIX))
        made[-1].connect(path)
        made[-1].sendall(bytes((rank, purpose)))
    raise SystemExit(followed(RankChannel(made[COMMANDS]), made[TENSORS]))


def lead(parallel: int, timeout: float = TIMEOUT) -> Ranks:
    """The other ranks: those that the environment gives, once they have come, or else processes that are started.

    Raises `RanksError` where one does not come in time, `ModelError` where a model has those of the environment
    already.
    """
    global _led
    if _given(parallel) is None:
        return start(parallel, timeout)
    if _led:
        raise ModelError("a model has the ranks that the environment gives: a program takes one such model")
    _led = True
    connections: dict[tuple[int, int], socket.socket] = {}
    # Only this user may enter the folder, and so connect.
    with TemporaryDirectory(prefix="lmstate-ranks-") as folder, closing(socket.socket(socket.AF_UNIX)) as server:
        path = str(Path(folder) / SOCKET)
        server.bind(path)
        server.listen(2 * parallel)
        store = _store()  # which may end with this name
        store.set(SOCKET, path)
        until = monotonic() + STARTING
        try:
            while len(connections) < 2 * (parallel - 1):
                server.settimeout(max(until - monotonic(), 0.01))
                connection, _ = server.accept()
                connection.settimeout(timeout)
                rank, purpose = connection.recv(2)
                connections[rank, purpose] = connection
        except (OSError, ValueError) as error:
            for connection in connections.values():
                connection.close()
            raise RanksError(f"{parallel} processes share the model, and not all of them came: {error}") from error
    channels = [RankChannel(connections[rank, COMMANDS]) for rank in range(1, parallel)]
    sockets = [connections[rank, TENSORS] for rank in range(1, parallel)]
    try:
        return led(channels, sockets, torch.get_num_threads(), timeout, lambda: end([], channels, sockets))
    except BaseException:  # such as a rank that ended meanwhile: the others end too
        end([], channels, sockets)
        raise


def given_ranks() -> int:
    """Return how many ranks the environment gives; 1 where it gives none."""
    return int(os.environ.get("WORLD_SIZE", "1")) if "RANK" in os.environ else 1


def _given(parallel: int) -> int | None:
    """The rank of this process, where the environment gives ranks."""
    ranks = given_ranks()
    if parallel < 2 or ranks < 2:
        return None
    if ranks != parallel:
        raise ModelError(
            f"parallel={parallel} was asked for, and the environment gives {ranks} ranks (WORLD_SIZE): give the same "
            "number to both, such as torchrun --nproc-per-node"
        )
    if int(os.environ.get("LOCAL_WORLD_SIZE", ranks)) != ranks:
        raise ModelError("the environment gives ranks on several machines; parallel takes those of one machine")
    return int(os.environ["RANK"])


def _store() -> Store:
    """The store that all ranks see."""
    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=STARTING))))
    assert isinstance(store, Store)
    return store
