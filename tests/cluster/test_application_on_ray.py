"""The one application of Ray Serve, on a real Ray of this machine, behind Serve's own proxy."""

from __future__ import annotations

import socket
from importlib.util import find_spec
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from lmstate.cli.app import app as commands
from lmstate.engine import Engine
from tests.serve.running import load_tiny, save_tiny

MISSING = [name for name in ("ray", "ormsgpack") if find_spec(name) is None]
pytestmark = [pytest.mark.ray, pytest.mark.skipif(bool(MISSING), reason=f"needs {MISSING}: lmstate[ray]")]


def test_the_application_answers_as_one_engine_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lmstate.cluster import app
    from lmstate.cluster.ray_cluster import RayCluster

    monkeypatch.delenv("LMSTATE_API_KEY", raising=False)
    folder = save_tiny(tmp_path / "model")
    (tmp_path / "store").mkdir()
    options = {"model": str(folder), "store": f"file://{tmp_path / 'store'}", "weights": "float32", "rows": "4"}
    with pytest.raises(ValueError, match="no API key is set"):
        app({**options, "replicas": "1"})
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
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
        serve.run(app({**options, "memory": "100MB", "replicas": "1", "max_replicas": "2", "host": "127.0.0.1"}))
        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120) as client:
            body = {"prompt": "Hello", "max_tokens": 12}
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == expected
            streamed = client.post("/v1/completions", json={**body, "stream": True}).text
            assert streamed.endswith("data: [DONE]\n\n")
            assert client.get("/v1/models", headers={"host": "elsewhere.example"}).status_code == 403
            (replica,) = client.get("/v1/replicas").json()["data"]
            assert replica["rank"] == 0 and replica["takes"], "rank 1 does not run, and is not started by a look"
        shown = CliRunner().invoke(commands, ["cluster", "status", "--url", f"http://127.0.0.1:{port}"])
        assert shown.exit_code == 0 and str(replica["pid"]) in shown.output
        serve.shutdown()
    finally:
        ray.close()
