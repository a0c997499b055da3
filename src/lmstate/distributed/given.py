"""Ranks that the environment gives, as torchrun does: the same program runs in each of them, and rank 0 leads.

Rank 0 tells the others through the store of torchrun where it listens, or why it will not. Their sockets are in a
private folder where all ranks are on one machine. Those of several machines are TCP, for a private network alone:
nothing is encrypted, and a secret that the store holds admits a connection.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import secrets
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import torch
from torch.distributed import Store, rendezvous

from lmstate.distributed.channel import RankChannel
from lmstate.distributed.follower import followed
from lmstate.distributed.ranks import STARTING, TIMEOUT, Ranks, end, led, start
from lmstate.errors import ModelError, RanksError

MEETING = "lmstate"
"""Key of the message of rank 0 to the others, in the store that all ranks see."""
COMMANDS, TENSORS = 0, 1  # the purpose of a connection
SECRET = 32  # bytes that a connection begins with
LEAVING = 20.0  # seconds in which rank 0 finds the store as it ends
KEEPALIVE = {"TCP_KEEPIDLE": 30, "TCP_KEEPINTVL": 10, "TCP_KEEPCNT": 3}  # a machine that vanishes counts as lost
_told = False  # whether the others know what rank 0 does


@contextmanager
def ranks_of(parallel: int, timeout: float = TIMEOUT) -> Iterator[Callable[[], Ranks]]:
    """A function that gives the other ranks: those of the environment, which are here already, or processes to start.

    An error inside ends those of the environment, with its reason. In ranks that are not the first: `join`. Raises
    `RanksError` where one does not come in time, `ModelError` as `join` does.
    """
    join(parallel)
    if _given(parallel) is None:
        yield partial(start, parallel, timeout)
        return
    ranks = lead(parallel, timeout)
    try:
        yield lambda: ranks
    except BaseException as error:
        ranks.leave(f"rank 0 could not load the model: {error}")
        raise


def join(parallel: int) -> None:
    """In other ranks than the first: compute what it asks for until it ends, then raise `SystemExit`.

    Returns at once in rank 0, and where the environment gives no ranks. Raises `ModelError` where it gives another
    number of them.
    """
    rank = _given(parallel)
    if rank == 0:
        atexit.register(_leave)
    if not rank:
        return
    told = _heard(rank)
    if "ended" in told:
        raise SystemExit(f"lmstate: rank 0 ended before it led a model: {told['ended']}")
    made = []
    for purpose in (COMMANDS, TENSORS):
        made.append(_connected(told["at"]))
        made[-1].sendall(bytes.fromhex(told["secret"]) + bytes((rank, purpose)))
    raise SystemExit(followed(RankChannel(made[COMMANDS]), made[TENSORS]))


def lead(parallel: int, timeout: float = TIMEOUT) -> Ranks:
    """The ranks that the environment gives, once all have come.

    Raises `RanksError` where one does not come in time, `ModelError` where a model has or had them already.
    """
    global _told
    if _told:
        raise ModelError("the ranks that the environment gives are in use or have ended; start the program again")
    _told = True
    secret = secrets.token_bytes(SECRET)
    connections: dict[tuple[int, int], socket.socket] = {}
    with ExitStack() as stack:
        server = stack.enter_context(_listening(stack))
        at = server.getsockname()
        store = _store()  # which may end with this name
        store.set(MEETING, json.dumps({"at": at, "secret": secret.hex()}))
        until = monotonic() + STARTING
        try:
            while len(connections) < 2 * (parallel - 1):
                server.settimeout(max(until - monotonic(), 0.01))
                connection, _ = server.accept()
                connection.settimeout(timeout)
                said = _begun(connection)
                rank, purpose = said[SECRET:] if secrets.compare_digest(said[:SECRET], secret) else (0, 0)
                if 0 < rank < parallel and purpose in (COMMANDS, TENSORS):
                    connections[rank, purpose] = _kept(connection)
                else:
                    connection.close()
        except OSError as error:
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


def _leave() -> None:
    """Tell the others, as this process ends, that they wait for nothing."""
    global _told
    if not _told:
        _told = True
        with contextlib.suppress(Exception):  # they may have ended before
            store = _store(LEAVING)
            store.set(MEETING, json.dumps({"ended": "its own message says why"}))
            if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":  # the store ends with this process
                store.wait([f"{MEETING}/{rank}" for rank in range(1, int(os.environ["WORLD_SIZE"]))])


def _heard(rank: int) -> dict[str, Any]:
    """The message of rank 0 to the others. Raises `RanksError` where it ends or is silent."""
    try:
        store = _store()
        told: dict[str, Any] = json.loads(store.get(MEETING))
        store.set(f"{MEETING}/{rank}", "")
    except (RuntimeError, ValueError) as error:  # those of torch.distributed are RuntimeErrors
        raise RanksError(f"rank 0 did not say where it is; its own message may say why ({error})") from error
    return told


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
            "number to both, such as torchrun --nproc-per-node times --nnodes"
        )
    return int(os.environ["RANK"])


def _listening(stack: ExitStack) -> socket.socket:
    """The socket of rank 0: in a folder that only this user may enter, or for other machines."""
    world = int(os.environ["WORLD_SIZE"])
    if int(os.environ.get("LOCAL_WORLD_SIZE", world)) == world:
        folder = stack.enter_context(TemporaryDirectory(prefix="lmstate-ranks-"))
        server = socket.socket(socket.AF_UNIX)
        server.bind(str(Path(folder) / "socket"))
        server.listen(2 * world)
        return server
    host = os.environ.get("MASTER_ADDR", "")
    try:
        family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=2 * world)
    except OSError as error:
        raise RanksError(f"rank 0 cannot listen at MASTER_ADDR={host}: {error}; give an address of its own") from error


def _connected(at: str | list[Any]) -> socket.socket:
    """A socket to where rank 0 listens, the path of a socket or a host and a port."""
    if isinstance(at, str):
        made = socket.socket(socket.AF_UNIX)
        made.connect(at)
        return made
    made = socket.create_connection((at[0], at[1]), STARTING)
    made.settimeout(None)
    return _kept(made)


def _kept(connection: socket.socket) -> socket.socket:
    """The connection, made to send small messages at once and to notice a machine that vanishes."""
    if connection.family != socket.AF_UNIX:
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in KEEPALIVE.items():
            if (option := getattr(socket, name, None)) is not None:
                connection.setsockopt(socket.IPPROTO_TCP, option, value)
    return connection


def _begun(connection: socket.socket) -> bytes:
    """The secret, rank and purpose that a connection begins with; zeros where it ends or waits too long."""
    said = b""
    with contextlib.suppress(OSError):
        while len(said) < SECRET + 2 and (more := connection.recv(SECRET + 2 - len(said))):
            said += more
    return said if len(said) == SECRET + 2 else bytes(SECRET + 2)


def _store(timeout: float = STARTING) -> Store:
    """The store that all ranks see."""
    store, _, _ = next(iter(rendezvous("env://", timeout=timedelta(seconds=timeout))))
    assert isinstance(store, Store)
    return store
