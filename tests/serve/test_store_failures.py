"""A store that is away, or that another server writes to, as clients are told of it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import pytest

import lmstate
from lmstate.engine import Engine
from lmstate.engine.tiers import Tier
from lmstate.engine.tiers.folder import FolderTier
from lmstate.serve import Settings, make_server
from tests.engine.faults import READS, WRITES, Fault, retry_at_once
from tests.serve.running import Running, events, running
from tests.waiting import patient, wait_until

TURN: dict[str, Any] = {"tokens": [5, 6], "max_tokens": 3, "temperature": 0, "ignore_eos": True}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)
    retry_at_once(monkeypatch)


@pytest.fixture
def store(tmp_path: Path) -> Tier:
    return FolderTier(tmp_path, "tiny", 10**9)


@pytest.fixture
def server(tiny_model: lmstate.Model, store: Tier, tmp_path: Path) -> Iterator[Running]:
    with (
        Engine(tiny_model, store=store) as engine,
        running(engine, Settings("tiny", port=0, folder=tmp_path)) as server,
    ):
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@pytest.fixture
def other(tiny_model: lmstate.Model, server: Running, tmp_path: Path) -> Iterator[Engine]:
    """An engine of another process, so to speak."""
    with Engine(tiny_model, store=FolderTier(tmp_path, "tiny", 10**9)) as engine:
        yield engine


def test_a_session_that_cannot_be_looked_up_is_503_and_is_not_made_anew(
    client: httpx.Client, store: Tier, other: Engine
) -> None:
    other.session("s").send([1, 2, 3], max_new_tokens=2, ignore_eos=True).result(600)
    with Fault(store, *READS):
        for method, path, body in (
            ("GET", "/s", None),
            ("GET", "", None),
            ("POST", "", {"name": "s"}),
            ("POST", "/s/send", TURN),
            ("POST", "/s/undo", None),
            ("DELETE", "/s", None),
        ):
            answer = client.request(method, f"/v1/sessions{path}", json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unreachable"), path
            assert int(answer.headers["retry-after"]) > 0
    assert client.post("/v1/sessions", json={"name": "s"}).status_code == 409
    assert client.get("/v1/sessions/s").json()["length"] == 5


@pytest.mark.parametrize("stream", [False, True])
def test_an_answer_that_is_not_stored_says_so_and_health_does_until_it_is(
    stream: bool, client: httpx.Client, store: Tier, server: Running
) -> None:
    def send() -> Any:
        answer = client.post("/v1/sessions/s/send", json={**TURN, "stream": stream})
        return events(answer.text)[-2][1] if stream else answer.json()

    assert client.post("/v1/sessions", json={"name": "s"}).json()["generation"] == 1
    told = send()
    assert (told["stored"], told["generation"], told["length"]) == (True, 2, 5)
    with Fault(store, *WRITES):
        told = send()
        assert (told["stored"], told["length"]) == (False, 10)
        health = client.get("/health")
        assert health.status_code == 200
        assert health.json() == {"status": "ok", "stored": False, "sessions_unstored": 1}
        refused = client.post("/v1/sessions/s/undo")
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "store_unreachable")
    wait_until(lambda: not server.engine.unstored)
    assert client.get("/health").json() == {"status": "ok"}
    assert send()["stored"] is True
    assert client.get("/v1/sessions/s").json()["length"] == 15


def test_a_change_of_a_session_that_moved_is_409_and_changes_nothing(
    client: httpx.Client, server: Running, other: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.post("/v1/sessions", json={"name": "s"})
    client.post("/v1/sessions/s/send", json=TURN)
    other.session("s").send([7], max_new_tokens=1, ignore_eos=True).result(600)
    with monkeypatch.context() as patch:
        patch.setattr(server.engine, "refresh", lambda _: None)  # as if the other came after it had looked
        for method, path, body in (("POST", "/send", TURN), ("POST", "/undo", None), ("DELETE", "", None)):
            answer = client.request(method, f"/v1/sessions/s{path}", json=body)
            error = answer.json()["error"]
            assert (answer.status_code, error["code"], error["generation"]) == (409, "session_moved", 3), path
        told = events(client.post("/v1/sessions/s/send", json={**TURN, "stream": True}).text)[-1][1]
        assert told["error"]["code"] == "session_moved"
        assert client.get("/v1/sessions/s").json()["length"] == 5
    session = client.get("/v1/sessions/s").json()
    assert (session["length"], session["generation"]) == (7, 3)
    assert client.delete("/v1/sessions/s").status_code == 200
    assert other.find_session("s") is None


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_that_is_repeated_with_its_key_adds_no_turn(stream: bool, client: httpx.Client) -> None:
    def send(key: str, **changes: Any) -> Any:
        body = {**TURN, "stream": stream, **changes}
        answer = client.post("/v1/sessions/s/send", json=body, headers={"Idempotency-Key": key})
        assert answer.status_code == 200, answer.text
        return events(answer.text)[-2][1] if stream else answer.json()

    client.post("/v1/sessions", json={"name": "s"})
    first, again, other, longer = send("a"), send("a"), send("b"), send("a", tokens=[9])
    shown = ("tokens", "text", "finish_reason", "length", "generation", "stored")
    assert [first[key] for key in shown] == [again[key] for key in shown]
    assert [one["length"] for one in (first, other, longer)] == [5, 10, 14]
    refused = client.post("/v1/sessions/s/send", json=TURN, headers={"Idempotency-Key": "x" * 300})
    assert refused.status_code == 400


def test_a_turn_with_a_key_goes_on_when_its_client_leaves(client: httpx.Client, server: Running) -> None:
    client.post("/v1/sessions", json={"name": "s"})
    body, headers = {**TURN, "max_tokens": 60, "stream": True}, {"Idempotency-Key": "a"}
    with client.stream("POST", "/v1/sessions/s/send", json=body, headers=headers) as answer:
        next(answer.iter_bytes())
    told = events(client.post("/v1/sessions/s/send", json=body, headers=headers).text)
    assert told[-2][1]["length"] == 62 and len(told[-2][1]["tokens"]) == 60
    assert client.get("/v1/sessions/s").json()["length"] == 62


@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_is_asked_for_again_with_its_key_is_the_same(stream: bool, client: httpx.Client) -> None:
    conversation = client.post("/v1/conversations", json={}).json()["id"]

    def ask(key: str, **changes: Any) -> dict[str, Any]:
        body = {"model": "tiny", "input": "Hello", "max_output_tokens": 3, "stream": stream, **changes}
        answer = client.post("/v1/responses", json=body, headers={"Idempotency-Key": key})
        assert answer.status_code == 200, answer.text
        return events(answer.text)[-1][1]["response"] if stream else answer.json()

    first = ask("a", conversation=conversation)
    assert ask("a", conversation=conversation) == first
    assert len(client.get(f"/v1/conversations/{conversation}/items").json()["data"]) == 2
    assert ask("b", conversation=conversation)["id"] != first["id"] != ask("a", input="Else")["id"]
    assert len(client.get(f"/v1/conversations/{conversation}/items").json()["data"]) == 4
    assert ask("c", store=False)["id"] != ask("c", store=False)["id"]


def test_what_a_stop_interrupts_is_told_and_no_turn_is_half_there(tiny_model: lmstate.Model, tmp_path: Path) -> None:
    long: dict[str, Any] = {"tokens": [7], "max_tokens": 1900, "ignore_eos": True, "stream": True}
    with Engine(tiny_model, store=tmp_path) as engine:
        server = make_server(engine, Settings("tiny", port=0, folder=tmp_path, drain=0.3), close_engine=True)
        thread = Thread(target=server.run, daemon=True)
        thread.start()
        wait_until(lambda: server.started)
        with httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=600) as client:
            client.post("/v1/sessions", json={"name": "s"})
            client.post("/v1/sessions/s/send", json=TURN)
            with client.stream("POST", "/v1/sessions/s/send", json=long) as answer:
                lines = answer.iter_lines()
                next(lines)
                server.should_exit = True
                told = [json.loads(line[6:]) for line in lines if line.startswith("data: {")]
        thread.join(600)
        ended = told[-1]["object"] == "session.answer" if "object" in told[-1] else False
        assert ended or told[-1]["error"]["code"] == "shutting_down"
    with Engine(tiny_model, store=tmp_path) as engine:
        assert len(engine.session("s").tokens) == (told[-1]["length"] if ended else 5)
