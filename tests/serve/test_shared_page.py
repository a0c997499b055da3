"""Two servers on one store: the page's conversations of one are those of the other, and neither loses a turn."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from lmstate.serve.conversations import keeper, store, writing
from lmstate.serve.conversations.tree import MessageNode
from tests.engine.conftest import redis_url, tier  # noqa: F401 - fixtures
from tests.engine.faults import Fault
from tests.serve.running import Running, standing_still
from tests.serve.test_page import ROOT, create, look, node, say, tokens
from tests.serve.test_shared_store import clients, quick, servers  # noqa: F401 - fixtures
from tests.waiting import wait_until

Clients = tuple[httpx.Client, httpx.Client]
Servers = tuple[Running, Running]


def told(client: httpx.Client, id: str) -> list[dict[str, Any]]:
    """The messages of a conversation, in their order."""
    names = ("id", "parent", "role", "status", "text", "reasoning", "tokens", "usage", "blocks")
    return [{name: one.get(name) for name in names} for one in look(client, id)["nodes"]]


def test_a_conversation_of_one_server_is_gone_on_with_by_the_other(clients: Clients) -> None:  # noqa: F811
    here, there = clients
    id = create(here, system="Be brief.", max_tokens=6)
    first = say(here, id, "Name a river.")
    assert told(there, id) == told(here, id)
    assert tokens(there, id, first["id"]) == tokens(here, id, first["id"])
    assert [one["id"] for one in there.get(ROOT).json()["data"]] == [id]
    assert [one["id"] for one in there.get(ROOT, params={"search": "RIVER name"}).json()["data"]] == [id]
    assert there.get(ROOT, params={"search": "mountain"}).json()["data"] == []
    second = say(there, id, "And another.", first["id"])
    assert told(there, id) == told(here, id) and look(here, id)["adopted"] > 0
    same = say(here, id, "And another.", first["id"])  # of the very tokens that the other server read
    assert (same["text"], same["usage"]["prompt"]) == (second["text"], second["usage"]["prompt"])
    assert there.post(f"{ROOT}/{id}", json={"title": "Rivers", "settings": {"max_tokens": 3}}).status_code == 200
    assert look(here, id)["title"] == "Rivers" and look(here, id)["settings"] == {"max_tokens": 3}
    assert here.get(ROOT).json()["data"][0]["title"] == "Rivers"
    stopped = f"{ROOT}/{id}/{same['id']}/continue"
    assert there.post(stopped).json()["answer"] == same["id"]
    wait_until(lambda: node(there, id, same["id"])["status"] != "running")
    assert told(there, id) == told(here, id)
    assert there.delete(f"{ROOT}/{id}").status_code == 200
    assert [client.get(f"{ROOT}/{id}/events").status_code for client in clients] == [404, 404]
    assert here.post(f"{ROOT}/{id}/say", json={"text": "x"}).status_code == 404
    assert here.get(ROOT).json()["data"] == here.get("/v1/sessions").json()["data"] == []


def test_turns_at_once_are_all_there(clients: Clients) -> None:  # noqa: F811
    here, there = clients
    id = create(here, max_tokens=2)
    first = say(here, id, "Hello")

    def turn(number: int) -> str:
        body = {"text": f"turn {number}", "parent": first["id"]}
        answer = clients[number % 2].post(f"{ROOT}/{id}/say", json=body)
        assert answer.status_code == 201, answer.text
        return answer.json()["answer"]

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(turn, range(12)))
    for client in clients:
        wait_until(lambda client=client: all(one["status"] == "length" for one in told(client, id)[1::2]))  # type: ignore[misc]
    nodes = told(here, id)
    assert nodes == told(there, id)
    said = sorted(one["text"] for one in nodes if one["role"] == "user")
    assert said == sorted(["Hello", *(f"turn {number}" for number in range(12))])
    assert {one["id"] for one in nodes if one["role"] == "assistant"} == {first["id"], *answers}


def test_an_answer_is_written_by_one_server_and_seen_on_the_other(
    servers: Servers,  # noqa: F811
    clients: Clients,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(writing, "SAVED_EVERY", 0.01)
    monkeypatch.setattr(keeper, "LOOK_SECONDS", 0.01)
    here, there = clients
    id = create(here, max_tokens=3)
    first = say(here, id, "Hello")
    here.post(f"{ROOT}/{id}", json={"settings": {"max_tokens": 400}})
    again = f"{ROOT}/{id}/{first['id']}/continue"
    with standing_still(servers[0].engine, 5):
        assert here.post(again).status_code == 200
        assert there.post(again).status_code == 409
        assert there.post(f"{ROOT}/{id}/{first['id']}/stop").status_code == 409
        wait_until(lambda: node(there, id, first["id"])["blocks"] != first["blocks"])
        assert node(there, id, first["id"])["status"] == "running"
        monkeypatch.setattr(store, "ALIVE_SECONDS", 0.0)  # as if the first server were gone
        assert node(there, id, first["id"])["status"] == "stopped"
        there.post(f"{ROOT}/{id}", json={"settings": {"max_tokens": 2}})
        assert there.post(again).status_code == 200
        wait_until(lambda: node(there, id, first["id"])["status"] == "length")
        monkeypatch.undo()
    kept = servers[0].server.config.app.state.pool.find(None).attached  # type: ignore[union-attr]
    wait_until(lambda: not any(live.tasks for live in kept._open.values()))
    assert told(here, id) == told(there, id)  # the one that came too late has changed nothing
    own = kept.store._records.get_value(kept.store._values, f"{id}.{first['id']}.1.{kept.epoch}")
    assert own is None  # and left nothing


def test_a_store_that_is_away_refuses_a_turn_and_loses_none(
    servers: Servers,  # noqa: F811
    clients: Clients,  # noqa: F811
) -> None:
    here, there = clients
    id = create(here, max_tokens=3)
    first = say(here, id, "Hello")
    before = told(there, id)
    tier = servers[1].engine._tier  # noqa: F811
    assert tier is not None
    body = {"text": "More", "parent": first["id"]}
    for name in ("read_generation", "commit", "put_values"):
        with Fault(tier.stored, name):
            assert there.post(f"{ROOT}/{id}/say", json=body).status_code == 503
    assert told(there, id) == told(here, id) == before
    assert say(there, id, "More", first["id"])["status"] == "length"
    assert len(told(here, id)) == 4


def test_tokens_that_are_lost_are_computed_again(
    servers: Servers,  # noqa: F811
    clients: Clients,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    here, there = clients
    id = create(here, max_tokens=3)
    first = say(here, id, "Hello")
    second = say(here, id, "More", first["id"])
    records = servers[0].server.pool.models[0].attached.store._records  # type: ignore[union-attr]
    values = servers[0].server.pool.models[0].attached.store._values  # type: ignore[union-attr]
    node_there: MessageNode = servers[0].server.pool.models[0].attached._open[id].conversation.nodes[first["id"]]  # type: ignore[union-attr]
    records.remove_values(values, [f"{id}.{first['id']}.0.{node_there.writer}"])
    shown = told(there, id)
    assert [one["text"] for one in shown] == [one["text"] for one in told(here, id)]
    third = say(there, id, "And more", second["id"])
    assert third["status"] == "length" and third["usage"]["prompt"] > 0
