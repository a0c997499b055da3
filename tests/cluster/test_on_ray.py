"""Replicas on a real Ray of this machine: answers outlive a process that is killed, and one that is drained."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from typing import Any

import httpx
import pytest

from lmstate.cluster.moving import MovingRequest
from lmstate.cluster.ray_cluster import AUTH_MODE, TOKEN, TOKEN_PATH, processes_of
from lmstate.engine import Engine
from lmstate.engine.results import ReplicaStatus
from lmstate.vision.reader import PicturePrompt
from tests.cluster.test_front import check
from tests.serve.running import load_tiny, save_tiny
from tests.waiting import wait_until

MISSING = [name for name in ("ray", "ormsgpack") if find_spec(name) is None]  # Ray reads its token when imported
pytestmark = [pytest.mark.ray, pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: lmstate[ray]")]

LONG: dict[str, Any] = {"max_new_tokens": 1500, "ignore_eos": True, "temperature": 1.0, "seed": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    from lmstate.cluster import deploy

    store = f"file://{tmp_path_factory.mktemp('store')}"
    with deploy(str(folder), 2, store, weights="float32", rows=4, memory="100MB", port=0) as deployed:
        yield deployed


@pytest.fixture(scope="module")
def alone(folder: Path) -> Iterator[Engine]:
    with Engine(load_tiny(folder), rows=4) as engine:
        yield engine


def whole(cluster: Any) -> bool:
    return sum(one.takes for one in cluster.status()) == 2


def home(cluster: Any) -> ReplicaStatus:
    """The replica that answers."""

    def found() -> list[ReplicaStatus]:
        return [one for one in cluster.status() if one.load.answering]

    wait_until(lambda: bool(found()))
    return found()[0]


@pytest.mark.parametrize("moment", ["lmstate-token-*/token", "lmstate-ray-*/session_*/logs/raylet.out"])
def test_nothing_is_left_of_a_server_that_is_stopped_while_ray_starts(
    folder: Path, tmp_path: Path, moment: str
) -> None:
    (tmp_path / "store").mkdir()
    serve = ["serve", str(folder), "--replicas", "2", "--store", f"file://{tmp_path / 'store'}", "--port", "0"]
    given = (AUTH_MODE, TOKEN, TOKEN_PATH)  # by a Ray that this process had before
    environment = {name: value for name, value in os.environ.items() if name not in given}
    with TemporaryDirectory() as temporary:  # a short name: Ray has sockets below it
        process = subprocess.Popen([sys.executable, "-m", "lmstate", *serve], env={**environment, "TMPDIR": temporary})
        try:
            wait_until(lambda: any(Path(temporary).glob(moment)) or process.poll() is not None)
            assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(60) > 0
        finally:
            process.kill()
            process.wait()
        assert not os.listdir(temporary)
        assert not processes_of(Path(temporary))


def test_a_session_stays_at_its_replica(cluster: Any) -> None:
    session = cluster.front.session("one")
    for turn in range(3):
        completion = session.send([5, 6, 7 + turn], max_new_tokens=40, ignore_eos=True).result(120)
        assert completion.stored and completion.usage.reused == (43 * turn and 43 * turn - 1)
    assert session.generation == 3 and len(session.tokens) == 129
    assert httpx.get(f"{cluster.url}/v1/sessions/one").json()["tokens"] == session.tokens
    counts = sorted(replica.stats()["requests"] for replica in cluster.front.remote())
    assert counts == [0, 3]


def test_long_messages_arrive(cluster: Any) -> None:
    wait_until(lambda: whole(cluster))
    tokens = list(range(1, 250)) * 20_000  # 5 million, in about as many bytes
    for replica in cluster.front.remote():
        assert replica.look("prefixes", list[Any], PicturePrompt(tokens)) is not None
        assert not replica.lost


def test_files_of_sessions_go_through_the_front(cluster: Any, alone: Engine, tmp_path: Path) -> None:
    session = cluster.front.session("long")
    session.send(list(range(1, 250)) * 8, max_new_tokens=4, ignore_eos=True).result(120)
    with httpx.Client(base_url=cluster.url, timeout=120) as client:
        file = client.get("/v1/sessions/long/snapshot").content
        assert client.put("/v1/sessions/copy/snapshot", content=file).status_code == 201
        more = {"tokens": [5], "max_tokens": 3}
        turns = [client.post(f"/v1/sessions/{name}/send", json=more).json() for name in ("long", "copy")]
    (tmp_path / "file").write_bytes(file)
    expected = alone.load_session("here", tmp_path / "file").send([5], max_new_tokens=3).result(120).tokens[0]
    assert [turn["tokens"] for turn in turns] == [expected, expected]
    assert all(turn["usage"]["computed_tokens"] <= 2 for turn in turns)


def test_an_answer_outlives_a_process_that_is_killed(cluster: Any, alone: Engine) -> None:
    wait_until(lambda: whole(cluster))
    answer = cluster.front.submit(list(range(1, 60)), **LONG)
    pieces = iter(answer)
    for _ in range(20):
        next(pieces)
    killed = home(cluster)
    os.kill(killed.pid, signal.SIGKILL)
    check(answer, alone.submit(list(range(1, 60)), **LONG))
    assert isinstance(answer, MovingRequest) and answer.moves == 1
    wait_until(lambda: whole(cluster))
    assert killed.id not in [one.id for one in cluster.status()]


def test_a_session_goes_on_before_its_replica_is_replaced(cluster: Any) -> None:
    wait_until(lambda: whole(cluster))
    session = cluster.front.session("one")
    assert session.send([9], max_new_tokens=4, ignore_eos=True).result(120).stored
    idle = next(one for one in cluster.status() if one.rank == cluster.front.session_rank("one"))
    os.kill(idle.pid, signal.SIGKILL)
    assert session.send([9], max_new_tokens=4, ignore_eos=True).result(120).stored
    assert [one.rank for one in cluster.status()] == [1 - idle.rank], "Ray has not replaced it yet"


def test_an_answer_outlives_a_replica_that_is_drained(cluster: Any, alone: Engine) -> None:
    wait_until(lambda: whole(cluster))
    answer = cluster.front.submit(list(range(100, 160)), **LONG)
    next(iter(answer))
    drained = home(cluster)
    draining = Thread(target=cluster.drain, args=(drained.rank,))
    draining.start()
    check(answer, alone.submit(list(range(100, 160)), **LONG))
    assert answer.moves == 1
    draining.join(120)
    wait_until(lambda: whole(cluster) and drained.id not in [one.id for one in cluster.status()])
