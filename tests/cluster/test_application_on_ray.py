"""The one application of Ray Serve, on a real Ray of this machine, behind Serve's own proxy."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

import httpx
import pytest
from typer.testing import CliRunner

from lmstate.cli.app import app as commands
from lmstate.engine import Engine
from lmstate.files.private import private_file
from tests.distributed.test_processes import followers
from tests.serve.running import events, load_tiny, save_tiny
from tests.waiting import wait_until

MISSING = [name for name in ("ray", "ormsgpack") if find_spec(name) is None]
pytestmark = [pytest.mark.ray, pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: lmstate[ray]")]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as free:
        return int(free.getsockname()[1])


def test_the_application_answers_as_one_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replica runs over two processes, and is replaced as a whole when one of them is killed."""
    from lmstate.cluster import app
    from lmstate.cluster.ray_cluster import RayCluster

    monkeypatch.delenv("LMSTATE_API_KEY", raising=False)
    folder = save_tiny(tmp_path / "model")
    (tmp_path / "store").mkdir()
    options = {"model": str(folder), "store": f"file://{tmp_path / 'store'}", "weights": "float32", "rows": "4"}
    with pytest.raises(ValueError, match="no API key is set"):
        app({**options, "replicas": "1"})
    port = free_port()
    with Engine(load_tiny(tmp_path / "same"), rows=4) as alone:
        expected = alone.submit("Hello", max_new_tokens=12).result(60).texts[0]

    ray = RayCluster(cpus=3)
    try:
        from ray import serve
        from ray.serve.schema import ServeDeploySchema

        from lmstate.cluster.application import AppSpec
        from lmstate.cluster.manifest import serve_config

        several = AppSpec.of({**options, "max_replicas": 4})
        ServeDeploySchema.model_validate(serve_config(several))
        serve.start(proxy_location="HeadOnly", http_options={"host": "127.0.0.1", "port": port})
        options |= {"memory": "100MB", "parallel": "2"}
        serve.run(app({**options, "replicas": "1", "max_replicas": "2", "host": "127.0.0.1"}))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            body = {"prompt": "Hello", "max_tokens": 12}
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
            streamed = client.post("/v1/completions", json={**body, "stream": True}).text
            assert streamed.endswith("data: [DONE]\n\n")
            assert client.get("/v1/models", headers={"host": "elsewhere.example"}).status_code == 403
            (replica,) = client.get("/v1/replicas").json()["data"]
            assert replica["rank"] == 0 and replica["takes"], "rank 1 does not run, and is not started by a look"
            (other,) = followers(replica["pid"])
            os.kill(other, signal.SIGKILL)
            wait_until(lambda: not any(one["takes"] for one in client.get("/v1/replicas").json()["data"]))
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
            (newer,) = client.get("/v1/replicas").json()["data"]
            assert newer["rank"] == 0 and newer["pid"] != replica["pid"] and followers(newer["pid"])
        shown = CliRunner().invoke(commands, ["cluster", "status", "--url", f"http://127.0.0.1:{port}"])
        assert shown.exit_code == 0 and str(newer["pid"]) in shown.output
        serve.shutdown()
    finally:
        ray.close()


@contextmanager
def ray_head() -> Iterator[tuple[str, dict[str, str]]]:
    """A Ray of its own on this machine: (its address, the environment of those who may use it)."""
    from lmstate.cluster.ray_cluster import AUTH_MODE, SETTINGS, TOKEN_PATH, remove_folder

    with TemporaryDirectory(prefix="lmstate-head-") as folder:  # a short name: Ray has sockets below it
        token, port = private_file(Path(folder, "token")), free_port()
        token.write_text(secrets.token_hex(32), encoding="utf-8")
        environment = {**os.environ, **SETTINGS, AUTH_MODE: "token", TOKEN_PATH: str(token)}
        ray = ["start", "--head", "--block", "--node-ip-address=127.0.0.1", f"--port={port}", "--num-cpus=6"]
        ray += ["--include-dashboard=false", "--object-store-memory=100000000", f"--temp-dir={folder}/ray"]
        head = subprocess.Popen([sys.executable, "-m", "ray.scripts.scripts", *ray], env=environment)
        try:
            yield f"127.0.0.1:{port}", environment
        finally:
            head.terminate()
            head.wait(60)
            remove_folder(Path(folder, "ray"))


def test_an_application_is_scaled_and_updated_on_a_cluster_that_runs(tmp_path: Path) -> None:
    """Streams and turns of sessions go on meanwhile, to the bit: from 1 to 3 replicas of other options, and to 1."""
    folder, port = save_tiny(tmp_path / "model"), free_port()
    (tmp_path / "store").mkdir()
    long = {"prompt": "Hello", "max_tokens": 400, "temperature": 1.0, "seed": 3, "ignore_eos": True}
    with Engine(load_tiny(tmp_path / "same"), rows=4) as alone:
        given = {"max_new_tokens": 400, "temperature": 1.0, "seed": 3, "ignore_eos": True}
        expected = alone.submit("Hello", **given).result(120).texts[0]
    url, over, streamed, turns = f"http://127.0.0.1:{port}", Event(), list[str](), list[int]()

    def stream() -> None:
        while not over.is_set():
            told = events(httpx.post(f"{url}/v1/completions", json={**long, "stream": True}, timeout=300).text)
            streamed.append("".join(data["choices"][0]["text"] for _, data in told[:-1]))

    def turn() -> None:
        while not over.is_set():
            sent = {"tokens": [5, 6, 7], "max_tokens": 4}
            turns.append(httpx.post(f"{url}/v1/sessions/one/send", json=sent, timeout=300).status_code)
            over.wait(0.3)

    with ray_head() as (address, environment):

        def deploy(replicas: int, rows: int) -> None:
            options = [f"--cluster={address}", f"--store=file://{tmp_path / 'store'}", f"--replicas={replicas}"]
            options += [f"--port={port}", "--set=weights=float32", "--set=memory=100MB", f"--set=rows={rows}"]
            command = [sys.executable, "-m", "lmstate", "cluster", "deploy", str(folder), *options]
            subprocess.run(command, env=environment, check=True, timeout=300)

            def there() -> bool:
                found = httpx.get(f"{url}/v1/replicas", timeout=120).json()["data"]
                return [one["rank"] for one in found if one["takes"]] == list(range(replicas))

            wait_until(there)

        deploy(1, 4)
        httpx.post(f"{url}/v1/sessions", json={"name": "one"}, timeout=120).raise_for_status()
        clients = [Thread(target=stream), Thread(target=turn)]
        for client in clients:
            client.start()
        deploy(3, 5)
        deploy(1, 5)
        over.set()
        for client in clients:
            client.join(300)
        shown = httpx.get(f"{url}/v1/sessions/one", timeout=120).json()
    assert len(streamed) > 2 and set(streamed) == {expected}
    assert set(turns) == {200} and shown["length"] == 7 * len(turns)
