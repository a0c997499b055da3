"""Pictures in the page's conversations: whatever is done with the tree, the model sees them, and they are shown."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

import lmstate
from lmstate.cluster.serving import FrontFiles
from lmstate.engine import Engine
from lmstate.serve import Settings
from lmstate.serve.conversations.store import ConversationStore
from lmstate.vision.reader import name_of
from tests.cluster.helpers import fleet
from tests.serve.running import Running, running
from tests.serve.test_page import ROOT, create, ended, look, node, tokens
from tests.serve.test_pictures import OTHER, PICTURE, expected, openai_parts, url
from tests.vision.test_encode import png, said, saved
from tests.waiting import wait_until

BIG = png(60, 40, seed=2)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> lmstate.Model:
    folder = tmp_path_factory.mktemp("llava")
    saved(folder)
    return lmstate.load(folder, weights="float32")


@pytest.fixture
def enter() -> Iterator[Callable[[Any], Any]]:
    """Enters a context until the end of the test."""
    with ExitStack() as stack:
        yield stack.enter_context


@pytest.fixture(scope="module")
def seeing(model: lmstate.Model) -> Iterator[Running]:
    with Engine(model, rows=2) as engine, running(engine, Settings("tiny", port=0)) as server:
        yield server


@pytest.fixture
def client(seeing: Running) -> Iterator[httpx.Client]:
    with seeing.client() as client:
        yield client
        for conversation in client.get(ROOT).json()["data"]:
            client.delete(f"{ROOT}/{conversation['id']}")


def show(
    client: httpx.Client, id: str, text: str | None, *pictures: bytes | str, parent: str | None = None
) -> dict[str, Any]:
    """Send a message with pictures, given as files or by their names. Returns the answer."""
    given = [url(one) if isinstance(one, bytes) else one for one in pictures]
    answer = client.post(f"{ROOT}/{id}/say", json={"text": text, "pictures": given, "parent": parent})
    assert answer.status_code == 201, answer.text
    return ended(client, id, answer.json()["answer"])


def kept(server: Running) -> ConversationStore:
    store: ConversationStore = server.server.pool.models[0].attached.store  # type: ignore[union-attr]
    return store


def lose(store: ConversationStore, id: str, picture: bytes) -> None:
    store._records.remove_values(store._pictures, [f"{id}.{name_of(picture)}"])


def test_a_picture_is_seen_and_given_back(client: httpx.Client, model: lmstate.Model) -> None:
    id = create(client, max_tokens=6, temperature=0)
    answer = show(client, id, "what is this?", PICTURE, OTHER)
    length, text = expected(model, PICTURE, OTHER, "what is this?")
    assert answer["text"] == text and answer["usage"]["prompt"] == length
    names = [name_of(PICTURE), name_of(OTHER)]
    assert node(client, id, answer["parent"])["pictures"] == names
    for name, picture in zip(names, (PICTURE, OTHER)):
        given = client.get(f"{ROOT}/{id}/pictures/{name}")
        assert given.content == picture and given.headers["content-type"] == "image/png"
        assert given.headers["x-content-type-options"] == "nosniff"
    assert client.get(f"{ROOT}/{id}/pictures/{'0' * 64}").status_code == 404
    other = create(client)
    assert client.get(f"{ROOT}/{other}/pictures/{names[0]}").status_code == 404, "it is another conversation's"
    alone = show(client, id, "", PICTURE)
    assert alone["text"] == expected(model, PICTURE)[1], "a picture needs no text beside it"


def test_a_conversation_about_a_picture_is_that_of_a_chat(client: httpx.Client) -> None:
    id = create(client, max_tokens=5, temperature=0)
    first = show(client, id, "what is this?", PICTURE)
    second = show(client, id, "and this?", OTHER, parent=first["id"])
    messages: list[Any] = [{"role": "user", "content": openai_parts(PICTURE, "what is this?")}]
    for answer in (first, second):
        body = {"messages": messages, "max_tokens": 5, "temperature": 0}
        given = client.post("/v1/chat/completions", json=body).json()
        assert given["choices"][0]["message"]["content"] == answer["text"]
        assert given["usage"]["prompt_tokens"] == answer["usage"]["prompt"]
        messages += [
            {"role": "assistant", "content": answer["text"]},
            {"role": "user", "content": openai_parts(OTHER, "and this?")},
        ]
    assert second["usage"]["reused_tokens"] >= first["usage"]["prompt"]
    told = client.get(f"{ROOT}/{id}/{second['id']}/state")
    assert told.status_code == 200, told.text
    state = told.json()
    assert state["tokens"] == second["usage"]["prompt"] + second["tokens"]
    assert state["reuse"]["reused"] >= second["usage"]["prompt"], "the prefixes with the pictures are found"
    assert any("positions of a picture" in one["text"] for one in state["prefixes"] if one["branch"])
    assert [one["computed"] for one in state["back"]] == [0]


def test_edits_and_other_answers_and_other_tokens_keep_the_pictures(client: httpx.Client, model: lmstate.Model) -> None:
    id = create(client, max_tokens=4, temperature=0)
    first = show(client, id, "what is this?", PICTURE)
    client.post(f"{ROOT}/{id}", json={"settings": {"max_tokens": 8, "temperature": 0}})
    again = show(client, id, None, parent=first["parent"])
    assert again["parent"] == first["parent"] and again["usage"]["prompt"] == first["usage"]["prompt"]
    eight = model_text(model, 8, PICTURE, "what is this?")
    assert again["text"] == eight
    client.post(f"{ROOT}/{id}", json={"settings": {"max_tokens": 4, "temperature": 0}})
    assert client.post(f"{ROOT}/{id}/{first['id']}/continue").status_code == 200
    assert ended(client, id, first["id"])["text"] == eight, "it goes on as if it had not been cut"
    edited = show(client, id, "tell me", name_of(PICTURE))
    assert edited["text"] == model_text(model, 4, PICTURE, "tell me")
    seen = tokens(client, id, edited["id"])
    other = next(one for one in seen[1]["top"] if one["id"] != seen[1]["id"] and not one["end"])
    forked = client.post(f"{ROOT}/{id}/{edited['id']}/fork", json={"at": 1, "token": other["id"]})
    own = [one["id"] for one in tokens(client, id, ended(client, id, forked.json()["answer"])["id"])]
    prompt = model.encode(said(PICTURE, "tell me"))
    prompt.place(state := model.new_state())
    begun = [*prompt.tokens, *own[:2]]
    logits = model([begun], state)
    assert logits is not None and own[:2] == [seen[0]["id"], other["id"]]
    assert own[2] == int(logits[0].argmax()), "behind the other token it goes on greedily, with the picture in sight"
    assert sum(one["role"] == "user" for one in look(client, id)["nodes"]) == 2


def model_text(model: lmstate.Model, count: int, *parts: str | bytes) -> str:
    prompt = model.encode(said(*parts))
    prompt.place(state := model.new_state())
    return model.generate(prompt.tokens, state=state, max_new_tokens=count, temperature=0.0)


def test_bad_pictures_change_nothing(client: httpx.Client, seeing: Running) -> None:
    id = create(client)
    for bad, why in (
        (["data:image/png;base64,AAAA"], "damaged"),
        (["data:image/png;base64,"], "damaged"),
        (["data:image/png;base64,A!"], "not base64"),
        (["http://example.com/a.png"], "a data URL"),
        (["file:///etc/passwd"], "a data URL"),
        ([name_of(PICTURE)], "a data URL"),
        ([url(PICTURE)] * 65, "0 to 64"),
        ([url(PICTURE), 3], "a string"),
        ("x", "an array"),
    ):
        answer = client.post(f"{ROOT}/{id}/say", json={"text": "x", "pictures": bad})
        assert answer.status_code == 400 and why in answer.text, (bad, answer.text)
    assert look(client, id)["nodes"] == []
    first = show(client, id, "x", *[PICTURE] * 20)
    more = {"text": "x", "pictures": [name_of(PICTURE)] * 45, "parent": first["id"]}
    answer = client.post(f"{ROOT}/{id}/say", json=more)
    assert answer.status_code == 400 and "65 pictures" in answer.text
    assert len(look(client, id)["nodes"]) == 2


def test_the_pictures_of_a_branch_are_bounded_in_bytes(model: lmstate.Model) -> None:
    most = len(url(BIG)) + 400
    assert most < len(PICTURE) + len(OTHER) + len(BIG)
    with (
        Engine(model, rows=1) as engine,
        running(engine, Settings("tiny", port=0, max_body=most)) as server,
        server.client() as client,
    ):
        id = create(client, max_tokens=2)
        first = show(client, id, "", PICTURE)
        second = show(client, id, "", OTHER, parent=first["id"])
        third = show(client, id, "", PICTURE, parent=second["id"])  # it counts once: it is read once
        answer = client.post(f"{ROOT}/{id}/say", json={"text": "", "pictures": [url(BIG)], "parent": third["id"]})
        assert answer.status_code == 413 and "begin another conversation" in answer.text, answer.text
        assert len(look(client, id)["nodes"]) == 6
        show(client, id, "", BIG)


def test_a_model_of_text_takes_none(tiny: Running, seeing: Running) -> None:
    with tiny.client() as client, seeing.client() as other:
        id = create(client)
        answer = client.post(f"{ROOT}/{id}/say", json={"text": "x", "pictures": [url(PICTURE)]})
        assert answer.status_code == 400 and "pictures are not read" in answer.text
        assert look(client, id)["nodes"] == []
        for one, sees in ((client, False), (other, True)):
            assert one.get("/props").json()["modalities"]["vision"] is sees
            assert one.get("/page/about").json()["pictures"] is sees
            model = one.get("/v1/models").json()["data"][0]["id"]
            told = one.post("/api/show", json={"model": model}).json()
            assert ("vision" in told["capabilities"]) is sees


def test_who_asks_whether_a_model_sees_does_not_load_its_tower(tmp_path: Path) -> None:
    saved(tmp_path)
    model = lmstate.load(tmp_path, weights="float32")
    assert model.sees and model._pictures is None
    (tmp_path / "processor_config.json").unlink()
    assert not model.sees, "without a processor none is read"


def test_a_lost_picture_is_told_and_loses_nothing_else(client: httpx.Client, seeing: Running) -> None:
    id = create(client, max_tokens=3, temperature=0)
    first = show(client, id, "what is this?", PICTURE)
    beside = show(client, id, "Hello")
    lose(kept(seeing), id, PICTURE)
    before = look(client, id)["nodes"]
    for method, path, body in (
        ("GET", f"pictures/{name_of(PICTURE)}", None),
        ("GET", f"{first['id']}/state", None),
        ("GET", f"{first['id']}/session", None),
        ("POST", f"{first['id']}/continue", {}),
        ("POST", f"{first['id']}/fork", {"at": 0, "token": 5}),
        ("POST", "say", {"text": "more", "parent": first["id"]}),
        ("POST", "say", {"parent": first["parent"]}),
        ("POST", "say", {"text": "again", "pictures": [name_of(PICTURE)]}),
    ):
        answer = client.request(method, f"{ROOT}/{id}/{path}", json=body)
        assert answer.status_code == 409, (path, answer.text)
        assert answer.json()["error"]["code"] == "picture_lost" and "edit its message" in answer.text
    assert look(client, id)["nodes"] == before
    assert show(client, id, "more", parent=beside["id"])["status"] == "length"
    store = kept(seeing)
    store._records.put_values(store._pictures, {f"{id}.{name_of(PICTURE)}": OTHER})
    assert client.get(f"{ROOT}/{id}/pictures/{name_of(PICTURE)}").status_code == 409, "another file is not it"


def test_a_deleted_conversation_leaves_no_picture(client: httpx.Client, seeing: Running) -> None:
    id, beside = create(client, max_tokens=2), create(client, max_tokens=2)
    for one in (id, beside):
        show(client, one, "what is this?", PICTURE)
    store = kept(seeing)
    assert store.picture(id, name_of(PICTURE)) == PICTURE
    assert client.delete(f"{ROOT}/{id}").status_code == 200
    assert store.picture(id, name_of(PICTURE)) is None
    assert store.picture(beside, name_of(PICTURE)) == PICTURE


def test_pictures_survive_a_restart(model: lmstate.Model, tmp_path: Path) -> None:
    settings = Settings("tiny", port=0, folder=tmp_path)
    with Engine(model, rows=2) as engine, running(engine, settings) as server, server.client() as client:
        id = create(client, max_tokens=4, temperature=0)
        first = show(client, id, "what is this?", PICTURE)
        more = show(client, id, "and?", parent=first["id"])
    with Engine(model, rows=2) as engine, running(engine, settings) as server, server.client() as client:
        assert client.get(f"{ROOT}/{id}/pictures/{name_of(PICTURE)}").content == PICTURE
        same = show(client, id, "and?", parent=first["id"])
        assert (same["text"], same["usage"]["prompt"]) == (more["text"], more["usage"]["prompt"])
        assert client.post(f"{ROOT}/{id}/{same['id']}/continue").status_code == 200
        longer = ended(client, id, same["id"])["text"]
        assert longer.startswith(more["text"]) and len(longer) > len(more["text"])


def test_two_servers_of_one_store_have_the_pictures(
    model: lmstate.Model, tmp_path: Path, enter: Callable[[Any], Any]
) -> None:
    engines = [enter(Engine(model, rows=2, store=tmp_path)) for _ in range(2)]
    servers = [enter(running(engine, Settings("tiny", port=0))) for engine in engines]
    here, there = (enter(server.client()) for server in servers)
    id = create(here, max_tokens=4, temperature=0)
    first = show(here, id, "what is this?", PICTURE)
    assert node(there, id, first["parent"])["pictures"] == [name_of(PICTURE)]
    assert there.get(f"{ROOT}/{id}/pictures/{name_of(PICTURE)}").content == PICTURE
    second = show(there, id, "and this?", OTHER, parent=first["id"])
    same = show(here, id, "and this?", OTHER, parent=first["id"])
    assert (second["text"], second["usage"]["prompt"]) == (same["text"], same["usage"]["prompt"])
    assert there.post(f"{ROOT}/{id}/{same['id']}/continue").status_code == 200
    wait_until(lambda: node(here, id, same["id"])["status"] != "running")
    assert there.delete(f"{ROOT}/{id}").status_code == 200
    assert [kept(server).picture(id, name_of(one)) for server in servers for one in (PICTURE, OTHER)] == [None] * 4
    answer = here.post(f"{ROOT}/{id}/say", json={"text": "x", "pictures": [url(PICTURE)]})
    assert answer.status_code == 404
    assert kept(servers[0]).picture(id, name_of(PICTURE)) is None


def test_a_front_of_replicas_takes_pictures(model: lmstate.Model, client: httpx.Client) -> None:
    files = FrontFiles(model.tokenizer, model.folder)
    with (
        fleet(Engine(model), Engine(model), files=files) as (cluster, _),
        running(cluster.front, Settings("tiny", port=0)) as server,
        server.client() as there,
    ):
        assert there.get("/page/about").json()["pictures"] is True
        answers = []
        for one in (client, there):
            id = create(one, max_tokens=4, temperature=0)
            first = show(one, id, "what is this?", PICTURE)
            second = show(one, id, "and this?", OTHER, parent=first["id"])
            assert one.get(f"{ROOT}/{id}/{second['id']}/state").status_code == 200
            answers.append([(each["text"], each["usage"]["prompt"]) for each in (first, second)])
        assert answers[0] == answers[1]


def test_a_branch_as_a_file_has_its_pictures(client: httpx.Client, model: lmstate.Model) -> None:
    id = create(client, system="Be brief.", max_tokens=4, temperature=0)
    last = show(client, id, "and?", parent=show(client, id, "what is this?", PICTURE, OTHER)["id"])
    file = client.get(f"{ROOT}/{id}/{last['id']}/session")
    assert file.status_code == 200, file.text
    settings = {"system": "Be brief.", "max_tokens": 4, "temperature": 0}
    with (
        Engine(model, rows=1) as engine,
        running(engine, Settings("tiny", port=0)) as server,
        server.client() as there,
    ):
        uploaded = there.post("/page/upload", content=file.content)
        assert uploaded.status_code == 201, uploaded.text
        other = uploaded.json()["id"]
        there.post(f"{ROOT}/{other}", json={"settings": settings})
        nodes = look(there, other)["nodes"]
        told = [(one["text"], one["pictures"]) for one in look(client, id)["nodes"]]
        assert [(one["text"], one["pictures"]) for one in nodes] == told
        assert there.get(f"{ROOT}/{other}/pictures/{name_of(OTHER)}").content == OTHER
        moved = show(there, other, "more", parent=nodes[-1]["id"])
        here = show(client, id, "more", parent=last["id"])
        assert (moved["text"], moved["usage"]["prompt"]) == (here["text"], here["usage"]["prompt"])
        assert there.put("/v1/sessions/copy/snapshot", content=file.content).status_code == 201
        messages = there.get("/v1/sessions/copy").json()["messages"]
        assert messages[1]["content"][0]["type"] == "image"


def test_the_session_of_a_branch_goes_on_with_its_pictures(client: httpx.Client) -> None:
    id = create(client, max_tokens=3, temperature=0)
    answer = show(client, id, "what is this?", PICTURE)
    name = client.get(f"{ROOT}/{id}/{answer['id']}/state").json()["session"]
    wait_until(lambda: client.get(f"/v1/sessions/{name}").status_code == 200)
    session = client.get(f"/v1/sessions/{name}").json()
    assert session["messages"] == [] and len(session["tokens"]) == answer["usage"]["prompt"] + answer["tokens"]
    sent = client.post(f"/v1/sessions/{name}/send", json={"text": "ok", "max_tokens": 2, "temperature": 0})
    assert sent.status_code == 200 and sent.json()["usage"]["reused_tokens"] >= answer["usage"]["prompt"]


def test_an_answer_with_the_mark_of_a_picture_in_it_is_gone_on_with(client: httpx.Client) -> None:
    """The model may sample the token that stands where a picture is: no picture belongs there."""
    id = create(client, max_tokens=4, temperature=0)
    first = show(client, id, "what is this?", PICTURE)
    forked = client.post(f"{ROOT}/{id}/{first['id']}/fork", json={"at": 1, "token": 258})
    answer = ended(client, id, forked.json()["answer"])
    assert tokens(client, id, answer["id"])[1]["id"] == 258
    more = show(client, id, "and this?", OTHER, parent=answer["id"])
    assert more["usage"]["prompt"] > answer["usage"]["prompt"]
    assert show(client, id, "and?", parent=more["id"])["status"] in ("length", "done")
    assert client.post(f"{ROOT}/{id}/{answer['id']}/continue").status_code == 200
