"""Stores that machines share: a real Redis server, and obstore's stores in memory and in a folder."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmstate
from lmstate.engine.tiers.shared import Blobs, ObjectBlobs, RedisBlobs, SharedTier
from tests.engine.test_batching import prompt
from tests.engine.test_prefixes import ask, check
from tests.zoo import ours


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis server of its own, on a socket in the test's folder."""
    redis = pytest.importorskip("redis")
    if shutil.which("redis-server") is None:
        pytest.skip("redis-server is not installed")
    socket = tmp_path / "redis.sock"
    server = subprocess.Popen(
        ["redis-server", "--port", "0", "--unixsocket", str(socket), "--save", "", "--dir", str(tmp_path)],
        stdout=subprocess.DEVNULL,
    )
    try:
        client = redis.Redis(unix_socket_path=str(socket))
        for _ in range(200):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        yield f"unix://{socket}"
    finally:
        server.terminate()
        server.wait(10)


def goes_on_elsewhere(blobs: Blobs) -> None:
    """One engine computes, another one, which knows only the store, goes on; and damage is told from what is whole."""
    model = ours("qwen3_next-dense")
    ids = prompt(60, 1)
    with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
        ask(engine, ids)
        session = engine.session("name")
        session.send(prompt(20, 2), max_new_tokens=3, ignore_eos=True).result(60)
        tokens = session.tokens
    with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
        got = ask(engine, [*ids, 4, 5])
        check(model, [*ids, 4, 5], got)
        assert got.usage.reused == len(ids)
        assert got.usage.reuse.tier == "shared"
        assert engine.session("name").tokens == tokens
        engine.session("name").close()
    with lmstate.Engine(model, store=SharedTier(blobs, "two")) as engine:
        assert ask(engine, [*ids, 4, 5]).usage.reused == 0
    for name in list(blobs.names("")):
        data = blobs.get(name)
        assert data is not None
        if "/entries/" in name:
            blobs.put(name, data[:-1] + bytes([data[-1] ^ 1]))
    with lmstate.Engine(model, store=SharedTier(blobs, "one")) as engine:
        assert engine.sessions() == []
        got = ask(engine, [*ids, 6])
        check(model, [*ids, 6], got)
        assert got.usage.reused == 0


def test_redis_keeps_prefixes_and_sessions_for_others(redis_url: str) -> None:
    goes_on_elsewhere(RedisBlobs(redis_url))


def test_an_engine_opens_the_redis_server_that_a_url_names(redis_url: str) -> None:
    ids = prompt(50, 1)
    with lmstate.Engine(ours("llama"), store=redis_url) as engine:
        ask(engine, ids)
    with lmstate.Engine(ours("llama"), store=redis_url) as engine:
        assert ask(engine, [*ids, 3]).usage.reused == len(ids)


def test_object_stores_keep_prefixes_and_sessions_for_others(tmp_path: Path) -> None:
    store = pytest.importorskip("obstore.store")
    goes_on_elsewhere(ObjectBlobs(store.MemoryStore()))
    goes_on_elsewhere(ObjectBlobs(store.LocalStore(tmp_path)))


def test_a_store_that_is_not_there_is_as_good_as_none() -> None:
    pytest.importorskip("redis")
    model = ours("llama")
    with lmstate.Engine(model, store="redis://127.0.0.1:1/0") as engine:
        got = ask(engine, prompt(20, 1))
        check(model, prompt(20, 1), got)
        assert engine.stats()["shared_failed"] > 0
