"""Thousands of connections that never finish what they began: others are answered, and nothing stays of them."""

from __future__ import annotations

import asyncio
import gc
import os
import resource
import socket
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

import lmstate
from lmstate.engine import Engine
from lmstate.serve import Settings
from tests.serve.running import Running, running
from tests.waiting import GUARD, wait_until

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3, "ignore_eos": True}
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n"
BEGUN = (
    b"",  # half open: nothing ever comes
    HEAD,  # half a head
    HEAD + b"Content-Length: 100\r\n\r\n{",  # half a body
    HEAD + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",  # answered, and then kept open
)
SETTINGS = Settings("tiny", port=0, header_timeout=6.0, body_timeout=6.0, keep_alive=6, max_connections=20_000)


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def room() -> int:
    """Connections that this process may have both ends of, beside what it needs for itself."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        soft = hard
    ports = Path("/proc/sys/net/ipv4/ip_local_port_range")
    low, high = map(int, ports.read_text().split()) if ports.exists() else (32768, 60999)
    return min((soft - descriptors() - 200) // 2, high - low - 2000)


def tasks(server: Running) -> int:
    """Tasks of the server's loop."""
    loop = server.server.servers[0].get_loop()
    counted = asyncio.run_coroutine_threadsafe(_count(), loop)
    return counted.result(600)


async def _count() -> int:
    return len(asyncio.all_tasks())


def open_many(engine: Engine, count: int, settings: Settings) -> None:
    # On a connection of its own each time: one kept alive may be closed while it asks.
    alone = httpx.Limits(max_keepalive_connections=0)
    with running(engine, settings) as server, server.client(limits=alone) as client:
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        gc.collect()
        before, busy = descriptors(), tasks(server)
        with ExitStack() as stack:
            held = []
            for number in range(count):
                connection = stack.enter_context(
                    socket.create_connection(("127.0.0.1", server.server.port), timeout=300)
                )
                connection.sendall(BEGUN[number % len(BEGUN)])
                held.append(connection)
                if number % (count // 8) == 0:
                    assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
            for number, connection in enumerate(held):
                connection.settimeout(GUARD)
                answer = b""
                with suppress(ConnectionResetError):
                    while piece := connection.recv(4096):
                        answer += piece
                status = (b"", b"", b"HTTP/1.1 408", b"HTTP/1.1 408", b"HTTP/1.1 200")[number % len(BEGUN)]
                assert answer.startswith(status), (number, answer)
        wait_until(lambda: len(server.server.server_state.connections) <= 1)
        wait_until(lambda: descriptors() <= before + 2)
        wait_until(lambda: tasks(server) <= busy + 1)
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        wait_until(lambda: not server.server.service.running)


def connected(server: Running, stack: ExitStack, begun: bytes) -> socket.socket:
    connection = stack.enter_context(socket.create_connection(("127.0.0.1", server.server.port), timeout=300))
    connection.sendall(begun)
    connection.settimeout(GUARD)
    return connection


def test_past_the_limit_the_connection_that_waited_longest_makes_room(tiny_model: lmstate.Model) -> None:
    settings = replace(SETTINGS, header_timeout=GUARD, body_timeout=GUARD, max_connections=16)
    with Engine(tiny_model, rows=2) as engine, running(engine, settings) as server, ExitStack() as stack:
        held = [connected(server, stack, BEGUN[number % 2]) for number in range(24)]
        for connection in held[:8]:
            with suppress(ConnectionResetError):
                assert connection.recv(100) == b""
        with server.client() as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        wait_until(lambda: len(server.server.server_state.connections) <= 16)
        for connection in held[9:]:  # the client's took one more place
            connection.setblocking(False)
            with pytest.raises(BlockingIOError):
                connection.recv(1)


def test_a_connection_past_the_limit_is_refused_while_all_others_are_at_work(tiny_model: lmstate.Model) -> None:
    settings = replace(SETTINGS, header_timeout=GUARD, body_timeout=GUARD, max_connections=16)
    with Engine(tiny_model, rows=2) as engine, running(engine, settings) as server:
        with ExitStack() as stack:
            for _ in range(16):
                connected(server, stack, HEAD + b"Content-Length: 100\r\n\r\n{")
            wait_until(lambda: len(server.server.server_state.tasks) == 16)
            answer = connected(server, stack, b"").recv(4096)
            assert answer.startswith(b"HTTP/1.1 503")
            assert b"retry-after" in answer
            assert b'"too_many_connections"' in answer
        wait_until(lambda: not server.server.server_state.connections)
        with server.client() as client:
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_two_thousand_unfinished_connections_hold_up_nobody(tiny_model: lmstate.Model) -> None:
    with Engine(tiny_model, rows=2, queue=2) as engine:
        open_many(engine, min(2000, room()), SETTINGS)


@pytest.mark.soak
@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="counts descriptors in /proc")
def test_as_many_unfinished_connections_as_the_limits_allow_hold_up_nobody(tiny_model: lmstate.Model) -> None:
    with Engine(tiny_model, rows=2, queue=2) as engine:
        open_many(engine, min(10_000, room()), replace(SETTINGS, header_timeout=20.0, body_timeout=20.0))
