"""Two servers on one store: responses and conversations of one are those of the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

import httpx
import pytest

import lmstate
from lmstate.engine import Engine
from lmstate.engine.tiers import Tier
from lmstate.serve import Settings
from lmstate.serve.openai.responses import kept
from tests.engine.conftest import redis_url, tier  # noqa: F401 - fixtures
from tests.engine.faults import Fault, retry_at_once
from tests.serve.running import Running, running, standing_still
from tests.waiting import patient, wait_until

ASKED: dict[str, Any] = {"model": "tiny", "max_output_tokens": 4, "temperature": 0}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    patient(monkeypatch)
    retry_at_once(monkeypatch)


@pytest.fixture
def servers(tiny_model: lmstate.Model, tier: Callable[[], Tier]) -> Iterator[tuple[Running, Running]]:  # noqa: F811
    with ExitStack() as stack:
        engines = [stack.enter_context(Engine(tiny_model, store=tier())) for _ in range(2)]
        here, there = (stack.enter_context(running(engine, Settings("tiny", port=0))) for engine in engines)
        yield here, there


@pytest.fixture
def clients(servers: tuple[Running, Running]) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    with servers[0].client() as here, servers[1].client() as there:
        yield here, there


def ask(client: httpx.Client, **body: Any) -> dict[str, Any]:
    answer = client.post("/v1/responses", json={**ASKED, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def text(response: dict[str, Any]) -> str:
    return response["output"][-1]["content"][0]["text"]


def items(client: httpx.Client, path: str) -> list[dict[str, Any]]:
    return client.get(path, params={"order": "asc", "limit": 100}).json()["data"]


def test_a_response_of_one_server_is_gone_on_with_by_the_other(clients: tuple[httpx.Client, httpx.Client]) -> None:
    here, there = clients
    first = ask(here, input="Name a river.", instructions="Be brief.")
    id = first["id"]
    assert there.get(f"/v1/responses/{id}").json() == first
    listed = items(there, f"/v1/responses/{id}/input_items")
    assert listed == items(here, f"/v1/responses/{id}/input_items")
    more = {"input": "And another.", "previous_response_id": id, "instructions": "Be brief."}
    second, same = ask(there, **more), ask(here, **more)
    assert text(second) == text(same)
    assert second["usage"]["input_tokens"] == same["usage"]["input_tokens"]
    third = {"input": "A third.", "previous_response_id": second["id"], "instructions": "Be brief."}
    assert text(ask(here, **third)) == text(ask(there, **third))
    named = [{"type": "item_reference", "id": item["id"]} for item in (*listed, *first["output"])]
    again = ask(there, input=[*named, {"role": "user", "content": "And another."}], instructions="Be brief.")
    assert again["usage"]["input_tokens"] == second["usage"]["input_tokens"]
    assert there.delete(f"/v1/responses/{id}").json()["deleted"] is True
    assert here.get(f"/v1/responses/{id}").status_code == 404
    assert here.post("/v1/responses", json={**ASKED, **more}).status_code == 404


def test_a_conversation_of_two_servers_has_each_item_once(clients: tuple[httpx.Client, httpx.Client]) -> None:
    here, there = clients
    id = here.post("/v1/conversations", json={"metadata": {"of": "here"}}).json()["id"]
    path = f"/v1/conversations/{id}"
    said = [ask(client, input=f"Turn {turn}", conversation=id) for turn, client in enumerate((here, there, here))]
    assert [item["role"] for item in items(there, f"{path}/items")] == ["user", "assistant"] * 3
    assert text(ask(there, input="x", previous_response_id=said[-1]["id"])) == text(
        ask(here, input="x", conversation=id)
    )

    def add(number: int) -> None:
        body = {"items": [{"role": "user", "content": f"added {number}"}]}
        assert clients[number % 2].post(f"{path}/items", json=body).status_code == 200

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(add, range(12)))
    told = [item["content"][0]["text"] for item in items(here, f"{path}/items")]
    assert sorted(one for one in told if one.startswith("added")) == sorted(f"added {number}" for number in range(12))
    assert there.post(path, json={"metadata": {"of": "there"}}).status_code == 200
    assert here.get(path).json()["metadata"] == {"of": "there"}
    assert there.delete(path).status_code == 200
    assert here.get(path).status_code == 404
    assert here.post(f"{path}/items", json={"items": [{"role": "user", "content": "x"}]}).status_code == 404


def test_a_response_that_the_other_server_makes_is_no_failed_one(
    servers: tuple[Running, Running], clients: tuple[httpx.Client, httpx.Client], monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = clients
    with standing_still(servers[0].engine, 2):
        made, gone = (ask(here, input="Hello", background=True, max_output_tokens=200) for _ in range(2))
        path = f"/v1/responses/{made['id']}"
        assert there.get(path).json()["status"] in ("queued", "in_progress")
        assert there.post(f"{path}/cancel").status_code == 409
        body = {**ASKED, "input": "x", "previous_response_id": made["id"]}
        assert there.post("/v1/responses", json=body).status_code == 409
        with monkeypatch.context() as patch:
            patch.setattr(kept, "ALIVE_SECONDS", 0.0)  # as if that server were gone
            assert there.get(path).json()["status"] == "failed"
        assert there.delete(f"/v1/responses/{gone['id']}").status_code == 200
        assert here.post(f"{path}/cancel").json()["status"] == "cancelled"
    assert there.get(path).json()["status"] == "cancelled"
    wait_until(lambda: not servers[0].server.service.running)
    assert [client.get(f"/v1/responses/{gone['id']}").status_code for client in clients] == [404, 404]


def test_a_store_that_is_away_is_unknown_and_not_empty(
    servers: tuple[Running, Running], clients: tuple[httpx.Client, httpx.Client]
) -> None:
    here, there = clients
    first = ask(here, input="Hello")
    id = here.post("/v1/conversations", json={}).json()["id"]
    store = servers[1].engine._tier
    assert store is not None
    with Fault(store.stored, "read", "get_value"):
        for method, path, body in (
            ("GET", f"/v1/responses/{first['id']}", None),
            ("POST", "/v1/responses", {**ASKED, "input": "x", "previous_response_id": first["id"]}),
            ("POST", "/v1/responses", {**ASKED, "input": "x", "conversation": id}),
            ("GET", f"/v1/conversations/{id}", None),
            ("DELETE", f"/v1/responses/{first['id']}", None),
        ):
            answer = there.request(method, path, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "store_unreachable"), path
            assert int(answer.headers["retry-after"]) > 0
    with Fault(store.stored, "commit"):
        told = ask(there, input="x", previous_response_id=first["id"])
        assert told["store"] is False and told["usage"]["output_tokens"] == 4
        assert there.get(f"/v1/responses/{told['id']}").status_code == 404
        answer = there.post("/v1/responses", json={**ASKED, "input": "x", "conversation": id})
        assert answer.status_code == 503
    assert items(here, f"/v1/conversations/{id}/items") == []
    assert there.get(f"/v1/responses/{first['id']}").json() == first
