"""Databases of the server that are full, or held by another process: what is refused has changed nothing."""

from __future__ import annotations

import asyncio
import json
import os
import sqlite3
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

import lmstate
from lmstate.engine import Engine
from lmstate.engine.tiers.folder import RECORDS
from lmstate.engine.tiers.sqlite_records import SqliteRecords
from lmstate.serve import Settings
from lmstate.serve.conversations import writing
from lmstate.serve.conversations.live import UNSAVED
from lmstate.serve.conversations.store import ConversationStore
from lmstate.serve.wire.owned_records import OwnedRecords
from tests.serve.running import Running, running
from tests.serve.test_page import ROOT, create, look, node, say
from tests.waiting import wait_until

ASKED: dict[str, Any] = {"model": "tiny", "input": "Hello", "max_output_tokens": 4, "temperature": 0}


@pytest.fixture
def server(tiny_model: lmstate.Model, tmp_path: Path) -> Iterator[Running]:
    with Engine(tiny_model) as engine, running(engine, Settings("tiny", port=0, folder=tmp_path)) as server:
        yield server


@pytest.fixture
def client(server: Running) -> Iterator[httpx.Client]:
    with server.client() as client:
        yield client


@contextmanager
def full(connection: sqlite3.Connection) -> Iterator[None]:
    """No page more than the database has."""
    (pages,) = connection.execute("pragma page_count").fetchone()
    connection.execute(f"pragma max_page_count = {pages}")
    for size in (1000, 100, 1):  # of records, which are packed, there is room for some in the pages that there are
        with suppress(sqlite3.OperationalError):
            while True:
                with connection:
                    row = (os.urandom(8).hex(), os.urandom(size))
                    connection.execute("insert into records values ('filler', ?, 1, ?, x'', 0, 0)", row)
    try:
        yield
    finally:
        connection.execute(f"pragma max_page_count = {2**30}")


@contextmanager
def held(connection: sqlite3.Connection) -> Iterator[None]:
    """Another process writes to the database, and does not end."""
    (_, _, file), *_ = connection.execute("pragma database_list").fetchall()
    connection.execute("pragma busy_timeout = 0")
    other = sqlite3.connect(file, isolation_level=None)
    other.execute("begin immediate")
    try:
        yield
    finally:
        other.close()
        connection.execute("pragma busy_timeout = 5000")


Trouble = Callable[[sqlite3.Connection], Any]
KINDS = pytest.mark.parametrize("trouble, status", [(full, 507), (held, 503)])
LONG = os.urandom(950).hex()  # more than what a page has left


def database(server: Running) -> sqlite3.Connection:
    """The connection of the server's records."""
    return server.server.config.app.state.records._records._connection  # type: ignore[union-attr]


# ---- the page


@KINDS
def test_what_the_page_cannot_store_is_refused_and_changes_nothing(
    trouble: Trouble, status: int, server: Running, client: httpx.Client
) -> None:
    id = create(client, max_tokens=4)
    first = say(client, id, "Hello")
    wait_until(lambda: len(client.get("/v1/sessions").json()["data"]) == 1)
    before = look(client, id)
    cases: list[tuple[str, str, Any]] = [
        ("POST", f"{ROOT}/{id}/say", {"text": LONG * 20, "parent": first["id"]}),
        ("POST", f"{ROOT}/{id}", {"title": "t" * 200, "settings": {"system": LONG * 20}}),
        ("POST", ROOT, {"settings": {"system": LONG * 20}}),
    ]
    if trouble is held:
        cases[0][2]["text"] = "More"
        cases += [
            ("POST", f"{ROOT}/{id}/{first['id']}/continue", None),
            ("POST", f"{ROOT}/{id}/{first['id']}/fork", {"at": 1, "token": 65}),
            ("DELETE", f"{ROOT}/{id}", None),
        ]
    else:
        cases[0][2]["text"] = LONG
    with trouble(database(server)):
        for method, path, body in cases:
            answer = client.request(method, path, json=body)
            assert answer.status_code == status, (path, answer.text)
            if status == 503:
                assert int(answer.headers["retry-after"]) > 0
        wait_until(lambda: not server.server.service.running)
        after = look(client, id)
        assert {**after, "version": 0} == {**before, "version": 0}
    assert [one["id"] for one in client.get(ROOT).json()["data"]] == [id]
    more = say(client, id, "More", first["id"])
    assert more["status"] == "length" and len(look(client, id)["nodes"]) == 4
    assert client.delete(f"{ROOT}/{id}").status_code == 200
    assert client.get("/v1/sessions").json()["data"] == []


def test_an_answer_that_cannot_be_saved_says_so_and_is_saved_later(
    server: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(writing, "FIRST_RETRY", 0.01)
    store = server.server.pool.models[0].attached.store  # type: ignore[union-attr]
    put, broken = store.put, [True]

    def failing(conversation: Any, *nodes: Any, **changes: Any) -> int:
        if broken[0] and any(one.role == "assistant" and one.status != "running" for one in nodes):
            raise sqlite3.OperationalError("database or disk is full")
        return put(conversation, *nodes, **changes)

    monkeypatch.setattr(store, "put", failing)
    id = create(client, max_tokens=4)
    told = say(client, id, "Hello")
    assert told["error"] == UNSAVED and told["status"] == "length" and told["text"]
    records = OwnedRecords(SqliteRecords(tmp_path / RECORDS, b""), shared=False)
    kept = ConversationStore(records, server.engine.model.fingerprint)
    assert kept.get(id).nodes[told["id"]].text == ""  # type: ignore[union-attr]
    broken[0] = False
    wait_until(lambda: node(client, id, told["id"])["error"] == "")
    assert kept.get(id).nodes[told["id"]].text == told["text"]  # type: ignore[union-attr]
    records.close()


def test_an_answer_that_could_not_be_saved_is_saved_at_the_end(
    tiny_model: lmstate.Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with Engine(tiny_model) as engine:
        with running(engine, Settings("tiny", port=0, folder=tmp_path)) as server, server.client() as client:
            store = server.server.pool.models[0].attached.store  # type: ignore[union-attr]
            put = store.put
            id = create(client, max_tokens=4)
            with monkeypatch.context() as patch:
                patch.setattr(store, "put", lambda *all, **more: put(*all, **more) if len(all) == 3 else full_disk())
                told = say(client, id, "Hello")
        with running(engine, Settings("tiny", port=0, folder=tmp_path)) as server, server.client() as client:
            assert node(client, id, told["id"])["text"] == told["text"]


def full_disk() -> None:
    raise sqlite3.OperationalError("database or disk is full")


def test_the_page_writes_beside_the_event_loop(
    server: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_the_loop: list[str] = []

    def watched(name: str) -> Any:
        real = getattr(ConversationStore, name)

        def run(*arguments: Any, **named: Any) -> Any:
            try:
                asyncio.get_running_loop()
                on_the_loop.append(name)
            except RuntimeError:
                pass
            return real(*arguments, **named)

        return run

    for name in ("list", "generation", "get", "put", "put_messages", "delete"):
        monkeypatch.setattr(ConversationStore, name, watched(name))
    monkeypatch.setattr(writing, "SAVED_EVERY", 0.0)
    id = create(client, max_tokens=4)
    answer = say(client, id, "Hello")
    client.post(f"{ROOT}/{id}", json={"title": "Title"})
    client.post(f"{ROOT}/{id}/{answer['id']}/fork", json={"at": 1, "token": 65})
    client.get(ROOT)
    client.delete(f"{ROOT}/{id}")
    assert on_the_loop == []


# ---- responses


@KINDS
@pytest.mark.parametrize("stream", [False, True])
def test_a_response_that_cannot_be_stored_says_so_and_others_are_read(
    stream: bool, trouble: Trouble, status: int, server: Running, client: httpx.Client
) -> None:
    def ask(**changes: Any) -> dict[str, Any]:
        answer = client.post("/v1/responses", json={**ASKED, "stream": stream, **changes})
        assert answer.status_code == 200, answer.text
        return last(answer.text) if stream else answer.json()

    first = ask()
    assert first["store"] is True
    with trouble(database(server)):
        told = ask(input=LONG)
        assert (told["store"], told["usage"]["output_tokens"]) == (False, 4)
        assert client.get(f"/v1/responses/{told['id']}").status_code == 404
        assert client.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
        assert ask(previous_response_id=first["id"], store=False)["usage"]["input_tokens"] > 0
        background = client.post("/v1/responses", json={**ASKED, "input": LONG, "background": True})
        assert background.status_code == status
    wait_until(lambda: not server.server.service.running)


@KINDS
@pytest.mark.parametrize("stream", [False, True])
def test_what_a_conversation_cannot_take_is_not_half_stored(
    stream: bool, trouble: Trouble, status: int, server: Running, client: httpx.Client
) -> None:
    id = client.post("/v1/conversations", json={"items": [{"role": "user", "content": "Hi"}]}).json()["id"]
    client.post("/v1/conversations", json={"items": [{"role": "user", "content": LONG} for _ in range(3)]})
    with trouble(database(server)):
        body = {**ASKED, "input": LONG, "conversation": id, "stream": stream}
        answer = client.post("/v1/responses", json=body)
        if stream:
            failed = last(answer.text)
            assert failed["status"] == "failed"
            assert client.get(f"/v1/responses/{failed['id']}").status_code == 404
        else:
            assert answer.status_code == status
        assert len(client.get(f"/v1/conversations/{id}/items").json()["data"]) == 1
    answer = client.post("/v1/responses", json={**ASKED, "conversation": id})
    assert answer.json()["store"] is True
    assert len(client.get(f"/v1/conversations/{id}/items").json()["data"]) == 3


def last(text: str) -> dict[str, Any]:
    """The response of the last event of a stream."""
    (data,) = [line[6:] for line in text.strip().splitlines() if line.startswith("data: {")][-1:]
    return json.loads(data)["response"]
