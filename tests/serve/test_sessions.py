"""Sessions over HTTP: what is rewound, forked, undone or restored goes on as if it had always been so."""

from __future__ import annotations

import sqlite3
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from threading import Barrier, Event
from typing import Any

import httpx
import pytest

from lmstate.engine import Engine
from lmstate.engine.session import Session
from lmstate.serve import Settings
from lmstate.serve.wire.errors import as_api_error
from tests.serve.byte_tokenizer import TEMPLATE
from tests.serve.running import Running, events, load_tiny, running
from tests.waiting import GUARD


@pytest.fixture
def client(tiny: Running) -> Any:
    with tiny.client() as client:
        yield client
        for session in client.get("/v1/sessions").json()["data"]:
            client.delete(f"/v1/sessions/{session['name']}")


def send(client: httpx.Client, name: str, **body: Any) -> dict[str, Any]:
    answer = client.post(f"/v1/sessions/{name}/send", json={"max_tokens": 6, "ignore_eos": True, **body})
    assert answer.status_code == 200, answer.text
    return answer.json()


def test_a_session_goes_on_as_the_whole_text_would(client: httpx.Client) -> None:
    assert client.post("/v1/sessions", json={"name": "s"}).status_code == 201
    first = send(client, "s", tokens=[10, 11, 12])
    second = send(client, "s", tokens=[20, 21])
    prompt = [10, 11, 12, *first["tokens"], 20, 21]
    body = {"prompt": prompt, "max_tokens": 6, "ignore_eos": True, "logprobs": 0}
    alone = client.post("/v1/completions", json=body).json()["choices"][0]
    assert alone["text"] == second["text"]
    held = client.get("/v1/sessions/s").json()
    assert held["tokens"] == [*prompt, *second["tokens"]]
    assert held["length"] == second["length"]
    assert second["usage"]["reused_tokens"] > 0


def test_rewound_undone_and_forked_sessions_answer_as_if_it_never_happened(client: httpx.Client) -> None:
    client.post("/v1/sessions", json={"name": "a"})
    send(client, "a", tokens=[10, 11, 12])
    position = client.post("/v1/sessions/a/mark").json()["position"]
    kept = send(client, "a", tokens=[30])
    assert client.post("/v1/sessions/a/fork", json={"name": "b"}).status_code == 201
    assert client.post("/v1/sessions/a/undo").json()["length"] == position
    assert send(client, "a", tokens=[30])["tokens"] == kept["tokens"]
    send(client, "b", tokens=[40])
    assert client.post("/v1/sessions/b/rewind", json={"to": position}).json()["length"] == position
    assert send(client, "b", tokens=[30])["tokens"] == kept["tokens"]


def test_a_downloaded_session_goes_on_elsewhere(client: httpx.Client) -> None:
    client.post("/v1/sessions", json={"name": "here"})
    send(client, "here", messages=[{"role": "user", "content": "Hello"}])
    file = client.get("/v1/sessions/here/snapshot")
    assert file.status_code == 200
    kept = send(client, "here", text="More")
    assert client.put("/v1/sessions/there/snapshot", content=file.content).status_code == 201
    assert send(client, "there", text="More")["tokens"] == kept["tokens"]
    assert client.get("/v1/sessions/there").json()["messages"][0]["content"] == "Hello"
    assert client.post("/v1/sessions/here/save").status_code == 200
    for content in (b"", b"nonsense", file.content[: len(file.content) // 2]):
        answer = client.put("/v1/sessions/broken/snapshot", content=content)
        assert answer.status_code == 400, answer.text
        assert answer.json()["error"]["message"].startswith("the file is damaged"), answer.text
    taken = client.put("/v1/sessions/here/snapshot", content=file.content)
    assert taken.status_code == 409
    assert taken.json()["error"]["message"] == "there is a session 'here' already: delete it, or take another name"


def test_prefixes_are_forgotten_but_not_those_of_sessions(client: httpx.Client) -> None:
    client.post("/v1/sessions", json={"name": "kept"})
    send(client, "kept", tokens=[10, 11, 12, 13])
    body = {"prompt": [9, 8, 7, 6, 5, 4], "max_tokens": 1}
    client.post("/v1/completions", json=body)
    assert client.post("/reset_prefix_cache").status_code == 200
    assert client.post("/v1/completions", json=body).json()["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
    assert send(client, "kept", tokens=[14])["usage"]["reused_tokens"] >= 4


CALLED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    "<call>{{ c.function.name }}{{ ARGUMENTS }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if tools %}{{ tools | length }}{% endif %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.mark.parametrize(
    ("template", "call", "result"),
    [
        (TEMPLATE, '<tool_call>\n{"name": "now", "arguments": {"a": 1}}\n</tool_call>', "user\n<tool_response>\nnoon"),
        (CALLED.replace("ARGUMENTS", "c.function.arguments | tojson"), '<call>now{"a": 1}</call>', "tool\nnoon"),
        (CALLED.replace("ARGUMENTS", "'' + c.function.arguments"), '<call>now{"a": 1}</call>', "tool\nnoon"),
    ],
    ids=["no tools", "objects", "texts"],
)
def test_calls_and_their_results_are_sent_with_the_messages(
    tmp_path: Path, template: str, call: str, result: str
) -> None:
    function = {"name": "now", "arguments": '{"a": 1}'}
    messages = [
        {"role": "user", "content": "When?"},
        {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "noon"},
    ]
    model = load_tiny(tmp_path, template=template)
    with (
        Engine(model, rows=1) as engine,
        running(engine, Settings("tiny", port=0)) as server,
        server.client() as client,
    ):
        client.post("/v1/sessions", json={"name": "s"})
        send(client, "s", messages=messages)
        held = client.get("/v1/sessions/s").json()["text"]
        assert f"{call}<|im_end|>\n<|im_start|>{result}" in held
        send(client, "s", text="More")
        assert client.get("/v1/sessions/s").json()["text"].startswith(held)  # and goes on from the very tokens


def test_streamed_pieces_are_the_answer(client: httpx.Client) -> None:
    client.post("/v1/sessions", json={"name": "s"})
    with client.stream(
        "POST", "/v1/sessions/s/send", json={"text": "Hi", "max_tokens": 6, "ignore_eos": True, "stream": True}
    ) as answer:
        found = [data for _, data in events(answer.read().decode())]
    assert found.pop() == "[DONE]"
    whole = found.pop()
    assert "".join(piece["text"] for piece in found) == whole["text"]
    assert [token for piece in found for token in piece["tokens"]] == whole["tokens"]


def test_what_a_session_cannot_do_is_refused(client: httpx.Client) -> None:
    client.post("/v1/sessions", json={"name": "s"})
    assert client.post("/v1/sessions", json={"name": "s"}).status_code == 409
    assert client.post("/v1/sessions/s/fork", json={"name": "s"}).status_code == 409
    assert client.post("/v1/sessions/s/undo").status_code == 400
    assert client.post("/v1/sessions/s/rewind", json={"to": 99}).status_code == 400
    assert client.post("/v1/sessions/s/rewind", json={}).status_code == 400
    assert client.post("/v1/sessions/s/send", json={}).status_code == 400
    assert client.post("/v1/sessions/none/send", json={"text": "x"}).status_code == 404
    assert client.delete("/v1/sessions/none").status_code == 404
    for name in ("../x", "a/b", "", ".hidden", "x" * 101, "ä"):
        answer = client.post("/v1/sessions", json={"name": name or "/"})
        assert answer.status_code == 400, name


def test_of_two_clients_that_make_one_session_one_has_it(
    tiny: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    together, sessions = Barrier(2), tiny.engine.sessions

    def both() -> list[str]:
        known = sessions()
        together.wait(GUARD)
        return known

    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(tiny.engine, "sessions", both)
        made = list(pool.map(lambda _: client.post("/v1/sessions", json={"name": "s"}), range(2)))
    assert sorted(answer.status_code for answer in made) == [201, 409]


def test_a_session_is_looked_for_beside_the_loop(
    tiny: Running, client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.post("/v1/sessions", json={"name": "s"})
    find, asked, answered = tiny.engine.find_session, Event(), Event()

    def slow(name: str, salt: str) -> Session | None:
        asked.set()
        assert answered.wait(GUARD)
        return find(name, salt)

    with monkeypatch.context() as patch, ThreadPoolExecutor() as pool:
        patch.setattr(tiny.engine, "find_session", slow)
        waiting = pool.submit(client.get, "/v1/sessions/s")
        try:
            assert asked.wait(GUARD)
            with tiny.client(timeout=5) as other:
                assert other.get("/health").status_code == 200
        finally:
            answered.set()
        assert waiting.result(GUARD).status_code == 200


def test_an_explanation_tells_the_first_token_that_differs(client: httpx.Client) -> None:
    prompt = list(range(60, 100))
    client.post("/v1/completions", json={"prompt": prompt, "max_tokens": 1})
    other = [*prompt[:30], 5, *prompt[31:]]
    told = client.post("/v1/cache/explain", json={"prompt": other}).json()
    assert told["prompt_tokens"] == 40
    assert told["differs_at"] == 30
    assert told["reused"] == 30
    usage = client.post("/v1/completions", json={"prompt": other, "max_tokens": 1}).json()["usage"]
    assert usage["prompt_tokens_details"]["cached_tokens"] == 30
    assert usage["lmstate"]["differs_at"] == 30


def test_a_server_without_a_folder_tells_what_to_do_instead_of_saving(
    client: httpx.Client, tiny: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = tiny.server.service
    monkeypatch.setattr(service, "settings", replace(service.settings, folder=None))  # as with the URL of a store
    client.post("/v1/sessions", json={"name": "s"})
    refused = client.post("/v1/sessions/s/save")
    assert refused.status_code == 409
    message = refused.json()["error"]["message"]
    assert message == "there is no folder to save in: start the server with --store FOLDER, or GET /snapshot"
    assert client.get("/v1/sessions/s/snapshot").status_code == 200


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
def test_a_full_disk_is_told(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Session, "save", lambda self, path: Path("/dev/full").write_bytes(b"x"))
    assert client.post("/v1/sessions", json={"name": "s"}).status_code == 201
    refused = client.get("/v1/sessions/s/snapshot")
    assert refused.status_code == 507
    assert refused.json()["error"]["code"] == "insufficient_storage"
    assert client.get("/v1/sessions/s").status_code == 200


def test_a_full_database_is_a_full_disk() -> None:
    database = sqlite3.connect(":memory:")
    database.execute("PRAGMA max_page_count = 2")
    database.execute("CREATE TABLE texts (text TEXT)")
    with pytest.raises(sqlite3.Error) as raised:
        database.execute("INSERT INTO texts VALUES (?)", ("x" * 100_000,))
    assert as_api_error(raised.value).status == 507
