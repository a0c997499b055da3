"""What tests of the engine share."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from lmstate.engine.tiers import Tier
from lmstate.engine.tiers.blobs import ObjectBlobs, RedisBlobs
from lmstate.engine.tiers.folder import FolderTier
from lmstate.engine.tiers.shared import SharedTier
from tests.waiting import GUARD, patient, wait_until


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Engines wait for their tiers as long as that takes; tests of tiers that hang say otherwise."""
    patient(monkeypatch)
    monkeypatch.setattr(Tier.close, "__defaults__", (GUARD,))  # all is written, however slow the disk is


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

        def answers() -> bool:
            with suppress(redis.ConnectionError):
                return bool(client.ping())
            return False

        wait_until(answers)
        yield f"unix://{socket}"
    finally:
        server.terminate()
        server.wait(600)


@pytest.fixture(params=["folder", "redis", "objects in memory", "objects in a folder"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[], Tier]:
    """Make one more tier on the same store."""
    if request.param == "folder":
        return lambda: FolderTier(tmp_path, "one", 10**9)
    if request.param == "redis":
        url = request.getfixturevalue("redis_url")
        return lambda: SharedTier(RedisBlobs(url), "one")
    store = pytest.importorskip("obstore.store")
    made = store.MemoryStore() if request.param == "objects in memory" else store.LocalStore(tmp_path)
    return lambda: SharedTier(ObjectBlobs(made), "one")
