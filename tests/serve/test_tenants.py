"""Owners of names: with several API keys, what one key makes is to another as if it did not exist, on every path."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

import lmstate
from lmstate.engine import Engine, Request
from lmstate.serve import Settings
from lmstate.serve.answer.paths import Path as Route
from lmstate.serve.app import PATHS
from lmstate.serve.conversations import page
from lmstate.serve.conversations import routes as conversations
from lmstate.serve.wire.schema.responses import ConversationBody, ItemsBody, MetadataBody, ResponseBody
from lmstate.serve.wire.schema.sessions import (
    PageConversation,
    PageFork,
    PageMessage,
    RewindBody,
    SendBody,
    SessionBody,
)
from lmstate.serve.wire.tenants import EVERYBODY, Tenant, as_owner, caller, sender_of
from tests.engine.test_batching import paused
from tests.serve.running import Running, running
from tests.waiting import GUARD, wait_until

SECRET = "what the first key said"
ALL = (*PATHS, *conversations.PATHS, *page.PATHS)
NO_NAMES = ("/v1/models/{model:path}", "/page/files/{file}")  # the model and the page's files are everybody's
NAMED = [route for route in ALL if "{" in route.path and route.path not in NO_NAMES]
PLAIN = [route for route in ALL if "{" not in route.path]
BODIES: dict[type | None, Any] = {
    None: None,
    MetadataBody: {"metadata": {"a": "b"}},
    ItemsBody: {"items": [{"type": "message", "role": "user", "content": "Hi"}]},
    RewindBody: {"to": 0},
    SendBody: {"text": "Hi", "max_tokens": 1},
    SessionBody: {"name": "new"},
    PageConversation: {"title": "another"},
    PageMessage: {"parent": None, "text": "Hi"},
    PageFork: {"at": 0, "token": 65},
}


def client(server: Running, key: str) -> httpx.Client:
    return server.client(headers={"authorization": f"Bearer {key}"})


@contextmanager
def keys(engine: Engine, folder: Path | None = None, **changes: Any) -> Iterator[tuple[httpx.Client, httpx.Client]]:
    """Clients of two keys of one server."""
    settings = Settings("tiny", port=0, api_keys=("first", "second"), folder=folder, max_new_tokens=8, **changes)
    with running(engine, settings) as server, client(server, "first") as one, client(server, "second") as other:
        yield one, other


@dataclass
class Made:
    """Names that a key has made, by the path that they are under and their parameter."""

    names: dict[tuple[str, str], str]

    def path(self, path: str, *, missing: bool = False) -> str:
        """A path with the names in it; `missing`: with others, that nothing has."""
        root = path.partition("/{")[0].removeprefix("/v1")

        def name(found: re.Match[str]) -> str:
            told = self.names[root, found[1]]
            return "0" * len(told) if missing else told

        return re.sub(r"\{(\w+)\}", name, path)


def make(client: httpx.Client) -> Made:
    """One of everything that has a name."""

    def post(path: str, **body: Any) -> Any:
        answer = client.post(path, json=body)
        assert answer.status_code < 300, answer.text
        return answer.json()

    post("/v1/sessions", name="mine")
    post("/v1/sessions/mine/send", text=SECRET, max_tokens=2)
    item = {"type": "message", "role": "user", "content": SECRET}
    conversation = post("/v1/conversations", items=[item])["id"]
    items = client.get(f"/v1/conversations/{conversation}/items").json()["data"]
    response = post("/v1/responses", input=SECRET, max_output_tokens=2)["id"]
    page = post("/page/conversations", title=SECRET)["id"]
    answer = post(f"/page/conversations/{page}/say", text=SECRET)["answer"]

    def ended() -> bool:
        with client.stream("GET", f"/page/conversations/{page}/events") as stream:
            block = next(line for line in stream.iter_lines() if line.startswith("data: "))
        return '"running"' not in block

    wait_until(ended)
    return Made(
        {
            ("/sessions", "name"): "mine",
            ("/conversations", "id"): conversation,
            ("/conversations", "item"): items[0]["id"],
            ("/responses", "id"): response,
            ("/page/conversations", "id"): page,
            ("/page/conversations", "node"): answer,
            ("/page/conversations", "name"): "a" * 64,  # of a picture: the conversation itself is what is not told of
        }
    )


@pytest.fixture(scope="module")
def engine(tiny_model: lmstate.Model) -> Iterator[Engine]:
    with Engine(tiny_model, rows=2) as engine:
        yield engine


@pytest.fixture(scope="module")
def two(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[httpx.Client, httpx.Client, Made]]:
    with keys(engine, tmp_path_factory.mktemp("owned")) as (one, other):
        yield one, other, make(one)


@pytest.mark.parametrize("route", NAMED, ids=lambda route: f"{route.method} {route.path}")
def test_a_name_of_another_key_is_as_one_that_does_not_exist(
    route: Route, two: tuple[httpx.Client, httpx.Client, Made]
) -> None:
    one, other, made = two
    if route.method == "PUT":  # which makes one: of the other key, beside the first one's
        file = one.get("/v1/sessions/mine/snapshot").content
        path = made.path(route.path)
        assert other.put(path, content=file).status_code == 201
        assert other.delete("/v1/sessions/mine").status_code == 200
        assert other.post("/reset_prefix_cache").status_code == 200  # what was in the file is the other one's too
    else:
        for path in route.paths:
            theirs, missing = made.path(path), made.path(path, missing=True)
            got, expected = (other.request(route.method, at, json=BODIES[route.body]) for at in (theirs, missing))
            assert (got.status_code, expected.status_code) == (404, 404), got.text
            words = zip(theirs.split("/"), missing.split("/"))
            told = got.text
            for word, instead in words:
                told = told.replace(f"'{word}'", f"'{instead}'")
            assert told == expected.text
    assert SECRET in one.get("/v1/sessions/mine").text
    assert SECRET in one.get(made.path("/v1/responses/{id}/input_items")).text
    assert one.get(made.path("/v1/conversations/{id}/items/{item}")).status_code == 200
    assert one.get(made.path("/page/conversations/{id}/{node}/tokens")).status_code == 200


@pytest.mark.parametrize("route", PLAIN, ids=lambda route: f"{route.method} {route.path}")
def test_nothing_of_another_key_is_told(route: Route, two: tuple[httpx.Client, httpx.Client, Made]) -> None:
    _, other, made = two
    ids = [made.names["/responses", "id"], made.names["/conversations", "id"], made.names["/conversations", "item"]]
    if route.body in (ResponseBody, ConversationBody, ItemsBody):
        missing = [id[:4] + "0" * (len(id) - 4) for id in ids]
        for asked, instead in zip(going_on(route, *ids), going_on(route, *missing), strict=True):
            got, expected = (other.post(route.path, json=body) for body in (asked, instead))
            assert got.status_code == expected.status_code >= 400, got.text
            assert SECRET not in got.text
        return
    for path in route.paths:
        told = other.request(route.method, path, json=BODIES.get(route.body) or {}).text
        assert SECRET not in told
        assert not [id for id in (*ids, made.names["/page/conversations", "id"]) if id in told]


def going_on(route: Route, response: str, conversation: str, item: str) -> list[dict[str, Any]]:
    """Bodies that name a response, a conversation or an item."""
    references = [{"type": "item_reference", "id": item}]
    if route.body is not ResponseBody:
        return [{"items": references}]
    named = [{"previous_response_id": response}, {"conversation": conversation}, {"conversation": {"id": conversation}}]
    return [{"input": "Hi", "max_output_tokens": 1, **one} for one in (*named, {"input": references})]


def test_prefixes_belong_to_a_key_and_within_it_to_a_salt(engine: Engine) -> None:
    body = {"prompt": [*range(60, 90)], "max_tokens": 1}

    def cached(client: httpx.Client, **changes: Any) -> int:
        answer = client.post("/v1/completions", json={**body, **changes}).json()
        return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

    def known(client: httpx.Client, **changes: Any) -> int:
        return client.post("/v1/cache/explain", json={"prompt": body["prompt"], **changes}).json()["matched"]

    with keys(engine) as (one, other):
        assert [cached(one), cached(other), cached(one, cache_salt="a"), cached(one, cache_salt="b")] == [0] * 4
        assert min(cached(one), cached(other), cached(one, cache_salt="a")) > 0
        assert known(one) > 0 and known(one, cache_salt="a") > 0 and known(other, cache_salt="a") == 0
        shown = [each.get("/v1/cache/tree").json()["tree"].splitlines()[1:] for each in (one, other)]
        assert all(shown)
        assert other.post("/reset_prefix_cache").status_code == 200
        assert cached(one) > 0 and cached(other) == 0


def test_owners_hold_over_a_restart_and_everybody_shares_where_that_is_said(
    tiny_model: lmstate.Model, tmp_path: Path
) -> None:
    with Engine(tiny_model, rows=1, store=tmp_path / "store") as engine, keys(engine, tmp_path) as (one, other):
        for each in (one, other):
            assert each.post("/v1/sessions", json={"name": "same"}).status_code == 201
        answer = one.post("/v1/sessions/same/send", json={"text": SECRET, "max_tokens": 2}).json()
        assert answer["name"] == "same"
        taken = one.post("/v1/sessions", json={"name": "same"}).json()["error"]["message"]
        assert taken == "there is a session 'same' already: delete it, or take another name"
        assert one.post("/v1/sessions/same/save").status_code == 200
    with Engine(tiny_model, rows=1, store=tmp_path / "store") as engine:
        assert len(engine.sessions()) == 2 and not any("first" in name for name in engine.sessions())
        with keys(engine, tmp_path) as (one, other):
            assert one.get("/v1/sessions/same").json()["length"] == answer["length"]
            assert other.get("/v1/sessions/same").json()["length"] == 0
        with keys(engine, tmp_path, shared=True) as (one, other):
            assert one.get("/v1/sessions").json()["data"] == []
            for stored in engine.sessions():
                assert one.get(f"/v1/sessions/{stored}").status_code == 404
            assert one.post("/v1/sessions", json={"name": "both"}).status_code == 201
            assert [each["name"] for each in other.get("/v1/sessions").json()["data"]] == ["both"]


@pytest.mark.parametrize("shared", [False, True])
def test_a_key_with_one_request_is_served_beside_one_with_forty(
    tiny_model: lmstate.Model, shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    ended: list[str] = []

    with Engine(tiny_model, rows=1) as engine, keys(engine, shared=shared) as (many, one):
        submit, go = engine.submit, paused(engine)

        def submitted(prompt: Any, **options: Any) -> Request:
            request = submit(prompt, **options)
            request.when_done(lambda _: ended.append(options["sender"]))
            return request

        monkeypatch.setattr(engine, "submit", submitted)
        body = {"prompt": "Hi", "max_tokens": 1}
        with ThreadPoolExecutor(41) as threads:
            asked = [threads.submit(many.post, "/v1/completions", json=body) for _ in range(40)]
            wait_until(lambda: engine.load().waiting == 40)
            asked.append(threads.submit(one.post, "/v1/completions", json=body))
            wait_until(lambda: engine.load().waiting == 41)
            go.set()
            assert all(each.result(GUARD).is_success for each in asked)
    assert ended[0] != ended[1]
    assert ended.count(ended[0]) == 40
    assert "" not in ended


def test_a_sender_without_a_key_is_an_address_or_a_network_of_one() -> None:
    assert sender_of(b"key", "127.0.0.1") == sender_of(b"key", "::1") != sender_of(b"other", "127.0.0.1")
    assert sender_of(None, "192.0.2.1") != sender_of(None, "192.0.2.2")
    assert sender_of(None, "2001:db8:1:2::3") == sender_of(None, "2001:db8:1:2:ffff::4")
    assert sender_of(None, "2001:db8:1:2::3") != sender_of(None, "2001:db8:1:3::3")
    assert sender_of(None, "") == ""


def test_the_oldest_of_all_owners_go_when_there_is_no_room(engine: Engine) -> None:
    def respond(client: httpx.Client) -> tuple[str, str]:
        made = client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 1}).json()
        return made["id"], made["output"][0]["id"]

    def there(client: httpx.Client, id: str, item: str) -> tuple[bool, bool]:
        body = {"input": [{"type": "item_reference", "id": item}], "max_output_tokens": 1, "store": False}
        return client.get(f"/v1/responses/{id}").is_success, client.post("/v1/responses", json=body).is_success

    with keys(engine, stored_responses=0) as (one, other):
        first = respond(one)
        assert there(one, *first) == (True, True) and there(other, *first) == (False, False)
        second = respond(other)  # there is room for one
        assert there(one, *first) == (False, False) and there(other, *second) == (True, True)


@pytest.mark.parametrize("tenant", [EVERYBODY, Tenant.of(b"first"), Tenant.of(b"second")])
def test_a_stored_name_has_one_owner(tenant: Tenant) -> None:
    others = [one for one in (EVERYBODY, Tenant.of(b"first"), Tenant.of(b"second")) if one != tenant]
    seen: list[tuple[Tenant, str]] = []
    for name in ("a", "@a", "@.a", Tenant.of(b"first").stored("a"), ""):
        stored = tenant.stored(name)
        assert tenant.shown(stored) == name
        assert all(one.shown(stored) is None for one in others)
        as_owner(stored, lambda name: seen.append((caller(), name)))
        assert seen.pop() == (tenant, name) and caller() == EVERYBODY
    assert len({one.salt(salt) for one in (tenant, *others) for salt in (None, "a", "b")}) == 9
