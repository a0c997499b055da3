"""Files of sessions through a front: the replica that has the state writes and reads them, in parts."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import lmstate
from lmstate.cluster import Cluster, parts
from lmstate.cluster.handle import ReplicaLost
from lmstate.cluster.serving import FrontFiles
from lmstate.engine import Engine, EngineError
from lmstate.errors import SnapshotError
from lmstate.serve import Settings
from tests.cluster.helpers import LocalChannel, fleet
from tests.engine.faults import fail_once, retry_at_once
from tests.serve.running import load_tiny, running
from tests.vision.test_encode import png, said, saved
from tests.waiting import wait_until

SHORT: dict[str, Any] = {"max_new_tokens": 5, "ignore_eos": True}
PART = 1000  # bytes, so that files have many


@dataclass
class Fleet:
    model: lmstate.Model
    cluster: Cluster
    channels: list[LocalChannel]
    store: str

    def home(self, name: str) -> LocalChannel:
        rank = self.cluster.front.session_rank(name)
        assert rank is not None
        return self.channels[rank]


@pytest.fixture
def replicas(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Fleet]:
    monkeypatch.setattr(parts, "PART", PART)
    (tmp_path / "store").mkdir()
    model, store = load_tiny(tmp_path / "model"), f"file://{tmp_path / 'store'}"
    engines = [Engine(model, store=store) for _ in "abc"]
    with fleet(*engines, store=store, files=FrontFiles(model.tokenizer)) as (cluster, channels):
        yield Fleet(model, cluster, channels, store)


def test_a_file_goes_from_a_front_to_an_engine_and_back(replicas: Fleet, tmp_path: Path) -> None:
    front, path = replicas.cluster.front, tmp_path / "file"
    session = front.session("one")
    session.send(list(range(200)), **SHORT).result(600)
    session.save(path)
    home = replicas.home("one")
    assert home.calls["part"] >= 1 and path.stat().st_size > 20 * PART
    with Engine(replicas.model) as engine:
        there = engine.load_session("there", path)
        assert there.tokens == session.tokens
        expected = there.send([9], **SHORT).result(600)
        assert expected.usage.prompt - expected.usage.reused <= 2, "the file has the state"
        there.save(path)
    loaded = front.load_session("loaded", path)
    assert loaded.tokens == there.tokens
    channel = replicas.home("loaded")
    assert channel.calls["load"] == 1 and channel.calls["part"] > 20
    before = channel.taken
    last = loaded.send([8], **SHORT).result(600)
    assert channel.taken == before + 1, "its turns go where the state is"
    assert last.usage.prompt - last.usage.reused <= 2
    assert session.send([9], **SHORT).result(600).tokens == expected.tokens


def test_a_replica_that_is_lost_is_not_needed_for_a_file(replicas: Fleet, tmp_path: Path) -> None:
    front, path = replicas.cluster.front, tmp_path / "file"
    session = front.session("one")
    session.send(list(range(200)), **SHORT).result(600)
    home = replicas.home("one")
    path.write_bytes(b"before")
    for channel in replicas.channels:
        channel.dead = True
    with pytest.raises(EngineError):
        session.save(path)
    assert path.read_bytes() == b"before" and [*tmp_path.glob(".file*")] == []
    for channel in replicas.channels:
        channel.dead = channel is home
    wait_until(lambda: sum(one.takes for one in replicas.cluster.status()) == 2)
    session.save(path)
    with Engine(replicas.model) as engine:
        assert engine.load_session("there", path).tokens == session.tokens


@pytest.mark.parametrize("done", [False, True])
def test_a_file_is_loaded_when_its_replica_is_lost_and_the_store_fails(
    done: bool, replicas: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether the replica had stored the session or not, it is there once, and its turns are those of the file."""
    retry_at_once(monkeypatch)
    front, path = replicas.cluster.front, tmp_path / "file"
    with Engine(replicas.model) as alone:
        alone.session("one").send(list(range(200)), **SHORT).result(600)
        alone.session("one").save(path)
        kept = alone.session("one").tokens
        expected = alone.session("one").send([9], **SHORT).result(600).tokens
    assert front._tier is not None
    unfailed = fail_once(front._tier, "read_session")
    for channel in replicas.channels:
        channel.dies_in = "load", done

    def load() -> list[int]:
        return front.load_session("one", path).tokens

    if done:
        assert load() == kept
        assert sum(channel.dead for channel in replicas.channels) == 1
    else:
        with pytest.raises(ReplicaLost):
            load()
        assert all(channel.dead for channel in replicas.channels) and front.find_session("one") is None
        for channel in replicas.channels:
            channel.dead, channel.dies_in = False, None
        replicas.channels[0].dies_in = "load", False
        wait_until(lambda: sum(one.takes for one in replicas.cluster.status()) == len(replicas.channels))
        assert load() == kept
    assert not unfailed
    session = front.session("one")
    assert session.generation == 1 and session.send([9], **SHORT).result(600).tokens == expected
    with pytest.raises(ValueError, match="there is a session 'one' already"):
        load()


def test_files_that_are_no_sessions_are_refused(replicas: Fleet, tmp_path: Path) -> None:
    front, path = replicas.cluster.front, tmp_path / "file"
    session = front.session("one")
    session.send(list(range(50)), **SHORT).result(600)
    session.save(path)
    whole = path.read_bytes()
    for content in (b"", b"x" * 5000, whole[:-7], whole[:-1] + bytes([whole[-1] ^ 1])):
        path.write_bytes(content)
        with pytest.raises(SnapshotError, match="the file") as refused:
            front.load_session("broken", path)
        assert "/" not in str(refused.value), "no path of the replica's machine"
        assert front.find_session("broken") is None
    path.write_bytes(whole)
    with pytest.raises(ValueError, match="there is a session 'one' already"):
        front.load_session("one", path)
    with Engine(replicas.model) as engine:
        engine.session("other").send([1, 2], **SHORT).result(600)
    assert all(not channel.served._uploads._open for channel in replicas.channels)


def test_the_routes_of_the_server_give_what_they_give_over_one_engine(replicas: Fleet, tmp_path: Path) -> None:
    settings = Settings("tiny", port=0, folder=tmp_path / "kept", folder_lasts=True)

    def told(client: httpx.Client) -> list[Any]:
        client.post("/v1/sessions", json={"name": "one"}).raise_for_status()
        client.post("/v1/sessions/one/send", json={"text": "Hello", "max_tokens": 5}).raise_for_status()
        file = client.get("/v1/sessions/one/snapshot")
        put = client.put("/v1/sessions/two/snapshot", content=file.content)
        again = client.put("/v1/sessions/two/snapshot", content=file.content)
        broken = client.put("/v1/sessions/three/snapshot", content=file.content[:-9])
        kept = client.post("/v1/sessions/one/save").json()
        turns = [
            client.post(f"/v1/sessions/{name}/send", json={"text": "And", "max_tokens": 5}).json()["tokens"]
            for name in ("one", "two")
        ]
        assert turns[0] == turns[1]
        page = client.post("/page/upload", content=file.content)
        codes = [answer.status_code for answer in (put, again, broken, page)]
        assert kept["bytes"] == len(file.content)  # more through a front, which gives turns idempotency keys
        return [codes, re.sub("[0-9]+", "N", broken.json()["error"]["message"]), turns]

    with Engine(replicas.model) as engine, running(engine, settings) as server, server.client() as client:
        expected = told(client)
    with running(replicas.cluster.front, settings) as server, server.client() as client:
        assert told(client) == expected
    assert (tmp_path / "kept" / "saved" / "one.safetensors").exists()


def test_a_session_with_pictures_is_saved(tmp_path: Path) -> None:
    for folder in ("model", "store"):
        (tmp_path / folder).mkdir()
    saved(tmp_path / "model")
    model, store = lmstate.load(tmp_path / "model", weights="float32"), f"file://{tmp_path / 'store'}"
    engines = [Engine(model, store=store) for _ in "ab"]
    with fleet(*engines, store=store, files=FrontFiles.of(str(tmp_path / "model"))) as (cluster, _):
        session = cluster.front.session("one")
        session.send(said(png(20, 30), "what is this?"), **SHORT).result(600)
        session.save(tmp_path / "file")
        loaded = cluster.front.load_session("two", tmp_path / "file")
        assert loaded.record.prompt == session.record.prompt and loaded.record.media
        answers = [one.send(said("more"), **SHORT).result(600).tokens for one in (session, loaded)]
        assert answers[0] == answers[1]
        tokens, media = session.tokens, session.record.prompt.media
    others = [Engine(model, store=store) for _ in "ab"]  # whose memory is empty
    with fleet(*others, store=store, files=FrontFiles.of(str(tmp_path / "model"))) as (cluster, channels):
        front = cluster.front
        for _ in range(2):
            front.session("one").save(tmp_path / "again")
            assert sum(channel.calls["picture"] for channel in channels) == 1, "the replica keeps it"
        assert front.model.pictures().tower.runs == 1
        front.session("one").close()
        assert (again := front.load_session("three", tmp_path / "again")).tokens == tokens
        assert again.record.prompt.media == media
        assert again.send(said("and"), **SHORT).result(600).tokens == loaded_tokens(model, tmp_path / "file")


def loaded_tokens(model: lmstate.Model, path: Path) -> list[list[int]]:
    """The answers of a session of a file, alone."""
    with Engine(model) as engine:
        session = engine.load_session("alone", path)
        session.send(said("more"), **SHORT).result(600)
        return session.send(said("and"), **SHORT).result(600).tokens
