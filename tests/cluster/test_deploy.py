"""Options of replicas, and the cluster that they run on, are checked before anything is started."""

from __future__ import annotations

import re
import socket
import tempfile
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread
from time import monotonic
from typing import Any

import httpx
import msgspec
import pytest
from typer.testing import CliRunner

from lmstate.cli.app import app
from lmstate.cluster import Cluster, deploy
from lmstate.cluster.ray_cluster import AUTH_MODE, TOKEN_PATH, check_address, make_folder, remove_folder
from lmstate.cluster.replica import ReplicaSpec
from lmstate.cluster.serving import FrontFiles
from lmstate.errors import UnsupportedError
from tests.cluster.helpers import LocalChannel, fleet
from tests.serve.running import Running, events, load_tiny, running
from tests.zoo import ours


@pytest.mark.parametrize("address", ["10.0.0.7:6379", "ray://cluster.example:10001", "auto", "[fd00::1]:6379"])
def test_a_cluster_beyond_this_machine_needs_a_token(address: str) -> None:
    token = {AUTH_MODE: "token", TOKEN_PATH: "/run/secrets/token"}
    for less in ({}, {AUTH_MODE: "token"}, {TOKEN_PATH: "/run/secrets/token"}):
        with pytest.raises(ValueError, match="no token is set: Ray runs the code that it is sent"):
            check_address(address, less)
    check_address(address, token)
    for here in ("127.0.0.1:6379", "ray://localhost:10001", "[::1]:6379"):
        check_address(here, {})


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"store": "/tmp/folder"}, "a folder, which one process has"),
        ({"draft": "model"}, "unknown draft='model'"),
        ({"memory": "much"}, "not a size"),
    ],
)
def test_what_replicas_cannot_start_with_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        msgspec.convert({"model": "smollm2", **changes}, ReplicaSpec).check()


def test_unknown_options_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lmstate.cluster.on_ray.check_ray", lambda: None)
    with pytest.raises(ValueError, match="unknown field `rwos`"):
        deploy("smollm2", rwos=3)
    with pytest.raises(ValueError, match="give 1 or more"):
        deploy("smollm2", 0)


def test_processes_that_torchrun_started_start_no_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("on_ray", "ray_cluster"):
        monkeypatch.setattr(f"lmstate.cluster.{module}.check_ray", lambda: None)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="in each of 2 processes that torchrun started"):
        deploy("smollm2", 2)
    for command in (
        ["serve", "smollm2", "--replicas", "2", "--store", "none", "--port", "0"],
        ["cluster", "deploy", "smollm2", "--cluster", "127.0.0.1:1", "--store", "none"],
    ):
        result = CliRunner().invoke(app, command, env={"COLUMNS": "500"})
        assert result.exit_code == 2 and "run the command without torchrun" in result.output


@pytest.mark.parametrize(("name", "inside"), [("short", True), ("as-long-as-those-of-a-mac-in-var-folders", False)])
def test_the_folder_of_a_ray_has_a_short_name(name: str, inside: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with TemporaryDirectory(prefix="a", dir="/tmp") as above:
        (place := Path(above, name)).mkdir()
        monkeypatch.setattr(tempfile, "tempdir", str(place))
        made = make_folder()
        assert (made.parent == place) == inside and len(str(made)) <= 42 and made.stat().st_mode & 0o077 == 0
        made.rmdir()


def test_a_folder_goes_that_ending_processes_still_write_to(tmp_path: Path) -> None:
    folder, until = tmp_path / "ray", monotonic() + 0.3
    folder.mkdir()

    def write() -> None:
        with suppress(FileNotFoundError):  # it is gone
            while monotonic() < until:
                (folder / f"{monotonic()}").touch()

    writer = Thread(target=write)
    writer.start()
    remove_folder(folder)
    writer.join()
    assert not folder.exists()
    folder.mkdir()
    remove_folder(folder, 0.0)
    assert folder.exists(), "it waits for no longer than it is told"


def test_several_replicas_need_a_store() -> None:
    result = CliRunner().invoke(app, ["serve", "smollm2", "--replicas", "2", "--port", "0"])
    assert result.exit_code == 2
    assert "--store none for no sessions" in " ".join(re.sub(r"[│╭╮╰╯─]", "", result.output).split())


def test_the_server_speaks_through_a_front(tmp_path: Path) -> None:
    """HTTP over two replicas gives what HTTP over one engine does: text, structured answers, streams and sessions."""
    from lmstate.engine import Engine
    from lmstate.serve import Settings

    model, store = load_tiny(tmp_path / "model"), f"file://{tmp_path / 'store'}"
    (tmp_path / "store").mkdir()
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    format = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    chat = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 12, "seed": 5, "temperature": 1.0}

    def told(server: Running) -> list[Any]:
        with server.client() as client:
            plain = client.post("/v1/chat/completions", json={**chat, "n": 2, "logprobs": True}).json()["choices"]
            fitting = client.post("/v1/chat/completions", json={**chat, "response_format": format}).json()["choices"]
            stream = events(client.post("/v1/chat/completions", json={**chat, "stream": True}).text)
            client.post("/v1/sessions", json={"name": "one"}).raise_for_status()
            turns = [client.post("/v1/sessions/one/send", json={"text": "Hi", "max_tokens": 5}).json() for _ in "ab"]
            shown = client.get("/v1/sessions/one").json()
            assert client.get("/health").json() == {"status": "ok"}
            assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
            assert client.get("/metrics").status_code == client.get("/slots").status_code == 200
            embedded = [
                client.post("/v1/embeddings", json={"input": "text", "pooling": pooling}).json()["data"]
                for pooling in ("mean", "last", "cls")
            ]
            shown_by_ollama = client.post("/api/show", json={"model": "tiny"}).json()
            del shown_by_ollama["modified_at"]
        text = "".join(data["choices"][0]["delta"].get("content") or "" for _, data in stream[:-1] if data["choices"])
        return [plain, fitting, text, [turn["tokens"] for turn in turns], shown["tokens"], embedded, shown_by_ollama]

    settings = Settings("tiny", port=0)
    with Engine(model, rows=4) as engine, running(engine, settings) as server:
        expected = told(server)
    engines = [Engine(model, rows=4, store=store) for _ in "ab"]
    with (
        fleet(*engines, store=store, files=FrontFiles(model.tokenizer)) as (one, _),
        running(one.front, settings) as server,
    ):
        got = told(server)
    assert got == expected


def test_replicas_that_do_not_come_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    from lmstate.engine import Engine

    monkeypatch.setattr("lmstate.cluster.cluster.START", 0.2)
    with Engine(ours("llama")) as engine:
        dead = LocalChannel(engine, 1)
        dead.dead = True
        with pytest.raises(TimeoutError, match="1 of 2 replicas answered"):
            Cluster([LocalChannel(engine, 0), dead], FrontFiles(), None)


def test_a_cluster_serves_at_its_url_until_it_is_closed(tmp_path: Path) -> None:
    from lmstate.engine import Engine
    from lmstate.serve import Settings

    model = load_tiny(tmp_path / "model")
    with fleet(Engine(model), files=FrontFiles(model.tokenizer)) as (cluster, _):
        assert cluster.url is None
        with pytest.raises(ValueError, match="no API key is set"):
            cluster.serve(Settings("tiny", "0.0.0.0", 0))
        url = cluster.serve(Settings("tiny", port=0))
        assert url == cluster.url and httpx.get(f"{url}/v1/models").json()["data"][0]["id"] == "tiny"
        answer = httpx.post(f"{url}/v1/completions", json={"prompt": "a", "max_tokens": 3}).json()
        assert answer["usage"]["completion_tokens"] == 3
        with pytest.raises(RuntimeError, match="serves HTTP at"):
            cluster.serve(Settings("tiny", port=0))
        cluster.close()
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{url}/health")

        with (
            socket.create_server(("127.0.0.1", 0)) as taken,
            fleet(Engine(model), files=FrontFiles(model.tokenizer)) as (other, _),
            pytest.raises(OSError, match=f"cannot serve on 127.0.0.1:{taken.getsockname()[1]}"),
        ):
            other.serve(Settings("tiny", port=taken.getsockname()[1]))


def test_without_a_store_there_are_no_sessions() -> None:
    from lmstate.engine import Engine

    with fleet(Engine(ours("llama"))) as (cluster, _):
        assert cluster.front.sessions() == [] and cluster.front.find_session("one") is None
        with pytest.raises(UnsupportedError, match="start the server with --store URL"):
            cluster.front.submit([1], session="one")
