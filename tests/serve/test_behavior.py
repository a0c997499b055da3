"""How the server behaves: keys, origins, clients that leave or stall, back-pressure, shutdown."""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import re
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread
from time import sleep
from typing import Any

import httpx
import pytest

import lmstate
from lmstate import ops
from lmstate.engine import Engine
from lmstate.serve import Settings, read_keys
from lmstate.serve.answer import handlers as serve_http
from lmstate.serve.wire import linger
from lmstate.serve.wire.metrics import RENAMED, Metrics, together
from tests.serve.running import Running, events, running, save_tiny, standing_still
from tests.serve.test_many_connections import room
from tests.waiting import GUARD, wait_until

CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 3}
LONG = {**CHAT, "max_tokens": 1500, "ignore_eos": True, "stream": True}
# A server that waits for what its store has as long as that takes: what is reused is not to depend on the machine.
PATIENT = (
    "from lmstate.engine import reuse; from lmstate.engine.tiers import fetch; from lmstate.cli import main; "
    "reuse.LEAST_PATIENCE = fetch.ASKING_SECONDS = 600.0; main()"
)
MAIN = (sys.executable, "-c", PATIENT)
BASE = Settings("tiny", port=0, ping_interval=0.2)


@pytest.fixture
def engine(tiny_model: lmstate.Model) -> Iterator[Engine]:
    with Engine(tiny_model, rows=2, queue=2) as engine:
        yield engine


def held(engine: Engine) -> Event:
    """Hold the engine's thread until the event is set."""
    go = Event()
    engine.call(lambda _: go.wait(600))
    return go


@contextlib.contextmanager
def asking(server: Running, path: str, body: dict[str, Any], buffer: int | None = None) -> Iterator[socket.socket]:
    """A connection on which something was asked. `buffer`: bytes that the system takes for who does not read."""
    sent = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: {len(sent)}\r\n\r\n"
    with socket.socket() as connection:
        connection.settimeout(GUARD)
        if buffer is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        connection.connect(("127.0.0.1", server.server.port))
        connection.sendall(head.encode() + sent)
        yield connection


def test_ids_of_requests_are_in_every_answer_and_in_the_log(
    engine: Engine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = replace(BASE, api_keys=("secret",), cors_origins=("http://a.example",), log_prompts=True)
    with running(engine, settings) as server, server.client(headers={"x-api-key": "secret"}) as client:
        for method, path, headers, status in (
            ("GET", "/health", {}, 200),
            ("GET", "/nowhere", {}, 404),
            ("GET", "/v1/chat/completions", {}, 405),
            ("GET", "/v1/models", {"x-api-key": "wrong"}, 401),
            ("POST", "/v1/messages", {"x-api-key": "wrong"}, 401),
            ("POST", "/v1/messages", {}, 400),
            ("OPTIONS", "/v1/models", {"origin": "http://a.example"}, 204),
        ):
            answer = client.request(method, path, headers=headers)
            assert answer.status_code == status
            assert re.fullmatch("req_[A-Za-z0-9]{24}", answer.headers["x-request-id"])
            again = client.request(method, path, headers={**headers, "x-request-id": "mine-1"})
            mine = again.headers
            assert mine["x-request-id"] == "mine-1"
            assert ("request-id" in mine) == ("messages" in path)
            assert "messages" not in path or again.json()["request_id"] == "mine-1"
        for odd in ("a b", "%s", "x" * 129, "", "é"):
            given = client.get("/health", headers={"x-request-id": odd.encode("latin-1")}).headers["x-request-id"]
            assert given.startswith("req_")
        with caplog.at_level("INFO", "lmstate.serve"):
            client.post("/v1/chat/completions", json=CHAT, headers={"x-request-id": "mine-2"})
            monkeypatch.setattr(type(engine.model), "logits", lambda *_: 1 / 0)
            for number, stream in ((3, False), (4, True)):
                body = {"messages": [{"role": "user", "content": f"Hello {number}"}], "stream": stream}
                client.post("/v1/chat/completions", json=body, headers={"x-request-id": f"mine-{number}"})
            wait_until(lambda: not server.server.service.running)
    told = [record.getMessage() for record in caplog.records if record.name == "lmstate.serve"]
    assert told and all(re.match(r"\[(mine-[234]|req_\w{24})\] [^[]", line) for line in told)
    for line in ("[mine-2] prompt: ", "[mine-3] a request failed", "[mine-3] /v1/chat", "[mine-4] a stream failed"):
        assert any(one.startswith(line) for one in told), told


def test_pages_of_another_origin_may_not_ask(engine: Engine) -> None:
    with running(engine, BASE) as server, server.client() as client:
        host = f"{client.base_url.host}:{client.base_url.port}"
        for origin, status in (
            (f"http://{host}", 200),
            (f"https://{host}", 200),  # a proxy in front speaks TLS
            (f"ftp://{host}", 403),
            (host, 403),
            ("null", 403),
            ("http://a.example", 403),
        ):
            assert client.get("/v1/models", headers={"origin": origin}).status_code == status, origin


def test_every_request_has_one_line_in_the_log(engine: Engine, caplog: pytest.LogCaptureFixture) -> None:
    with running(engine, BASE) as server, server.client() as client, caplog.at_level("INFO", "lmstate.serve"):
        for stream in (False, True):
            client.post("/v1/chat/completions?secret=1", json={**CHAT, "stream": stream, "ignore_eos": True})
        client.post("/v1/completions", json={"prompt": [[1, 2, 3], [4, 5]], "max_tokens": 2, "ignore_eos": True})
        client.get("/a%0d%0ab?c")
        client.get("/health")
        with standing_still(engine), asking(server, "/v1/chat/completions", LONG):
            wait_until(lambda: any(request.generated for request in server.server.service.running))
        wait_until(lambda: caplog.records[-1].getMessage().endswith("(cut off)"))
    told = [record.getMessage().partition("] ")[2] for record in caplog.records]
    counts = [re.search(r"in=(\d+) reused=(\d+) out=(\d+)", line) for line in told]
    assert [line.split(" ")[:3] for line in told] == [
        ["POST", "/v1/chat/completions", "200"],
        ["POST", "/v1/chat/completions", "200"],
        ["POST", "/v1/completions", "200"],
        ["GET", "/a%0D%0Ab", "404"],
        ["POST", "/v1/chat/completions", "200"],
    ]
    assert all(re.search(r" \d+\.\d{3}s( \(cut off\))?$", line) for line in told)
    first, second, both, none, cut = [found and [int(count) for count in found.groups()] for found in counts]
    assert first and second and cut and none is None
    assert first[1:] == [0, 3]
    assert second == [first[0], first[0], 3]
    assert both == [5, 0, 4]
    assert cut[2] > 0


def test_a_key_is_needed_in_every_protocol(engine: Engine) -> None:
    with running(engine, replace(BASE, api_keys=("secret", "other"))) as server, server.client() as client:
        assert client.get("/health").status_code == 200
        for path in ("/v1/models", "/metrics", "/v1/sessions", "/openapi.json"):
            answer = client.get(path)
            assert answer.status_code == 401
            assert answer.json()["error"]["type"] == "authentication_error"
            assert answer.json()["error"]["code"] == "invalid_api_key"
        body = {**CHAT, "model": "tiny"}
        for headers in (
            {},
            {"x-api-key": "wrong"},
            {"authorization": "Bearer secre"},
            {"authorization": "Basic secret"},
        ):
            answer = client.post("/v1/messages", json=body, headers=headers)
            assert answer.status_code == 401
            assert answer.json()["type"] == "error"
        for headers in (
            {"x-api-key": "secret"},
            {"authorization": "Bearer other"},
            {"authorization": "bearer secret"},
            {"x-api-key": "secret", "authorization": "Bearer of a library's default"},
        ):
            assert client.post("/v1/messages", json=body, headers=headers).status_code == 200
            assert client.post("/v1/chat/completions", json=body, headers=headers).status_code == 200


def test_the_network_is_not_served_without_a_key() -> None:
    with pytest.raises(ValueError, match="API key"):
        Settings("m", host="0.0.0.0").check()
    Settings("m", host="0.0.0.0").check(allow_anonymous=True)
    Settings("m", host="0.0.0.0", api_keys=("k",)).check()
    for host in ("127.0.0.1", "localhost", "::1"):
        Settings("m", host=host).check()


@pytest.mark.parametrize("host", ["http://a.example", "a.example/", "a.example:80", "*.", "a.*", ""])
def test_what_is_no_host_of_pictures_is_refused_since_it_would_never_match(host: str) -> None:
    with pytest.raises(ValueError, match="not a host"):
        Settings("m", picture_hosts=(host,)).check()
    Settings("m", picture_hosts=("*", "a.example", "*.a.example", "localhost", "10.0.0.1", "::1", "fe80::1")).check()


@pytest.mark.parametrize("origin", ["localhost:3000", "http://localhost:3000/", "https://a.example/page", "a.example"])
def test_what_is_no_origin_is_refused_since_it_would_never_match(origin: str) -> None:
    with pytest.raises(ValueError, match="not the origin"):
        Settings("m", cors_origins=(origin,)).check()
    Settings(
        "m", cors_origins=("*", "null", "http://localhost:3000", "chrome-extension://abc", "http://[::1]:80")
    ).check()


def test_keys_come_from_a_file_and_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "keys"
    file.write_text("# of people\n one \n\ntwo\n")
    monkeypatch.setenv("LMSTATE_API_KEY", "three")
    assert read_keys(file) == ("one", "two", "three")
    file.write_text("# nobody\n")
    with pytest.raises(ValueError, match="no API key"):
        read_keys(file)
    file.write_bytes(b"\xff")
    with pytest.raises(ValueError, match="keys is not UTF-8 text"):
        read_keys(file)


def test_pages_of_other_origins_may_not_ask_unless_allowed(engine: Engine) -> None:
    with running(engine, BASE) as server, server.client() as client:
        for headers in ({"origin": "https://elsewhere.example"}, {"host": "elsewhere.example"}, {"origin": "null"}):
            assert client.post("/v1/chat/completions", json=CHAT, headers=headers).status_code == 403
        own = {"origin": server.url}
        answer = client.post("/v1/chat/completions", json=CHAT, headers=own)
        assert answer.status_code == 200
        assert "access-control-allow-origin" not in answer.headers
    with running(engine, replace(BASE, cors_origins=("https://a.example",))) as server, server.client() as client:
        headers = {"origin": "https://a.example"}
        answer = client.options("/v1/chat/completions", headers={**headers, "access-control-request-method": "POST"})
        assert answer.status_code == 204
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        answer = client.post("/v1/chat/completions", json=CHAT, headers=headers)
        assert answer.headers["access-control-allow-origin"] == "https://a.example"
        assert client.get("/health", headers={"origin": "https://b.example"}).status_code == 403


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/chat/completions", LONG),
        ("/v1/chat/completions", {**LONG, "stream": False}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1500, "ignore_eos": True, "stream": True}),
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 1500, "ignore_eos": True}),
        ("/v1/responses", {"input": "x", "max_output_tokens": 1500, "ignore_eos": True, "stream": True}),
        ("/v1/messages", {**LONG, "model": "tiny"}),
        ("/v1/messages", {**LONG, "model": "tiny", "stream": False}),
    ],
)
def test_a_client_that_leaves_ends_its_request(engine: Engine, path: str, body: dict[str, Any]) -> None:
    with running(engine, BASE) as server, standing_still(engine):
        service = server.server.service
        with asking(server, path, body) as connection:
            wait_until(lambda: service.running)
            requests = list(service.running)
            if body.get("stream"):
                wait_until(lambda: b"data: " in connection.recv(1000, socket.MSG_PEEK))
        wait_until(lambda: not service.running)
        assert all("cancelled" in request.result(600).finished for request in requests)


def test_a_client_that_leaves_before_its_body_is_whole_is_no_failure(
    engine: Engine, caplog: pytest.LogCaptureFixture
) -> None:
    with running(engine, BASE) as server:
        with socket.create_connection(("127.0.0.1", server.server.port)) as connection:
            connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9\r\n\r\n{")
            wait_until(lambda: server.server.server_state.tasks)
        wait_until(lambda: not server.server.server_state.tasks)
        assert 'status="499"' in server.client().get("/metrics").text
    assert not caplog.records


def test_a_client_that_leaves_during_its_prompt_ends_its_request(engine: Engine) -> None:
    with running(engine, BASE) as server:
        go, service = held(engine), server.server.service
        with asking(server, "/v1/completions", {"prompt": [5] * 1500, "max_tokens": 400, "ignore_eos": True}):
            wait_until(lambda: service.running)
        (request,) = service.running
        wait_until(lambda: request.cancelled)
        go.set()
        assert request.result(600).finished == ["cancelled"]
        assert request.progress[0] == 0


def test_a_text_is_embedded_in_parts_between_which_streams_go_on(
    tiny_model: lmstate.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    parts, hidden = [], tiny_model.hidden
    body = {"input": "y" * 400, "encoding_format": "float"}
    with Engine(tiny_model, rows=2, draft=None) as engine, running(engine, BASE) as server, server.client() as client:
        counts, decode = engine._work.counts, engine._scheduler._compute

        def paced() -> None:  # else the stream may be over before the text comes
            if counts["generated_tokens"] < 100 + 100 * len(parts):
                decode()

        def told(tokens: list[list[int]], *given: Any) -> Any:
            parts.append((len(tokens[0]), counts["generated_tokens"]))
            return hidden(tokens, *given)

        engine._scheduler._compute = paced  # type: ignore[method-assign]
        with client.stream("POST", "/v1/chat/completions", json=LONG) as stream:
            lines = stream.iter_lines()  # which close the stream when they are forgotten
            next(lines)
            monkeypatch.setattr(tiny_model, "hidden", told)
            beside = client.post("/v1/embeddings", json=body).json()["data"]
        wait_until(lambda: not server.server.service.running)
        alone = client.post("/v1/embeddings", json=body).json()["data"]
    assert [width for width, _ in parts] == [64] * 6 + [16, 400]
    made = [count for _, count in parts[:7]]
    assert made == sorted(set(made)), "no token of the stream came between two parts"
    whole = ops.norm(hidden([tiny_model.tokenizer.encode("y" * 400)])[0], tiny_model.norm).mean(0)
    assert beside == alone == [{"object": "embedding", "index": 0, "embedding": (whole / whole.norm()).tolist()}]


def test_a_client_that_leaves_ends_the_embedding_of_its_text(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    parts, go, hidden = [], Event(), engine.model.hidden

    def held_up(tokens: list[list[int]], *given: Any) -> Any:
        parts.append(len(tokens[0]))
        go.wait(GUARD)
        return hidden(tokens, *given)

    monkeypatch.setattr(engine.model, "hidden", held_up)
    with running(engine, BASE) as server:
        with asking(server, "/v1/embeddings", {"input": "y" * 2000}):
            wait_until(lambda: parts)
        wait_until(lambda: not server.server.server_state.tasks)
        go.set()
        engine.call(lambda _: None).result(GUARD)
    assert parts == [512]


def test_a_waiting_stream_tells_its_progress_in_comments(engine: Engine) -> None:
    with running(engine, BASE) as server, server.client() as client:
        go, text = held(engine), ""
        with client.stream("POST", "/v1/chat/completions", json={**CHAT, "stream": True}) as answer:
            assert answer.headers["content-type"].startswith("text/event-stream")
            assert answer.headers["x-accel-buffering"] == "no", "a proxy is to pass each event on as it comes"
            for piece in answer.iter_text():
                text += piece
                if re.search(r"^: prompt 0/\d+$", text, re.MULTILINE):
                    go.set()
        assert go.is_set() and events(text)[-1][1] == "[DONE]"


def test_the_first_event_of_messages_counts_what_is_cached_and_pings_go_on_until_it_is_known(engine: Engine) -> None:
    with running(engine, BASE) as server, server.client() as client:
        whole = client.post("/v1/messages", json={**CHAT, "model": "tiny"}).json()
        go, text = held(engine), ""
        with client.stream("POST", "/v1/messages", json={**CHAT, "model": "tiny", "stream": True}) as answer:
            for piece in answer.iter_text():
                text += piece
                if "event: ping" in text:
                    go.set()
        told = [value for name, value in events(text) if name != "ping"]
        first, last = told[0]["message"]["usage"], told[-2]["usage"]
        assert first["cache_read_input_tokens"] > 0
        assert first["input_tokens"] + first["cache_read_input_tokens"] == whole["usage"]["input_tokens"]
        assert {key: last[key] for key in first if key != "output_tokens"} == {
            key: value for key, value in first.items() if key != "output_tokens"
        }


def test_more_requests_than_the_queue_holds_are_told_to_come_again(engine: Engine) -> None:
    with running(engine, BASE) as server, server.client() as client:
        go = held(engine)
        answers: list[int] = []
        retry: list[str | None] = []

        def ask() -> None:
            answer = client.post("/v1/chat/completions", json=CHAT)
            answers.append(answer.status_code)
            retry.append(answer.headers.get("retry-after"))

        threads = [Thread(target=ask) for _ in range(8)]
        for thread in threads:
            thread.start()
        wait_until(lambda: len(answers) == 6)
        go.set()
        for thread in threads:
            thread.join(300)
        assert sorted(answers) == [200] * 2 + [429] * 6
        assert retry.count("1") == 6


def test_slots_tell_which_rows_are_at_work(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._scheduler, "_compute", lambda: sleep(0.001))  # no answer ends by itself
    settings = replace(BASE, api_keys=("secret",))
    with running(engine, settings) as server, server.client(headers={"x-api-key": "secret"}) as client:
        free = [{"id": id, "n_ctx": 2048, "is_processing": False} for id in (0, 1)]
        assert client.get("/slots").json() == free
        assert client.get("/slots", headers={"x-api-key": "wrong"}).status_code == 401
        with contextlib.ExitStack() as stack:
            for number in range(3):
                body = {**LONG, "prompt": f"{number}"}
                stack.enter_context(client.stream("POST", "/v1/completions", json=body))
                taken = [{**free[id], "is_processing": True, "id_task": id} for id in range(min(number + 1, 2))]
                wait_until(lambda taken=taken: client.get("/slots").json() == [*taken, *free[len(taken) :]])
                full = client.get("/slots", params={"fail_on_no_slot": 1})
                assert full.status_code == (200 if number == 0 else 503)
        wait_until(lambda: client.get("/v1/slots").json() == free)


def test_a_prompt_that_memory_has_no_room_for_is_too_long(tiny_model: lmstate.Model) -> None:
    with Engine(tiny_model, rows=1, memory="256KiB") as engine, running(engine, BASE) as server:
        answer = server.client().post("/v1/completions", json={"prompt": [5] * 2000, "max_tokens": 1})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert "shorten the prompt" in error["message"]
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_may_have_more_prompts_than_the_queue_holds(engine: Engine, stream: bool) -> None:
    prompts = [[65 + number] for number in range(12)]
    with running(engine, BASE) as server, server.client() as client:
        answer = client.post("/v1/completions", json={"prompt": prompts, "max_tokens": 2, "stream": stream})
        assert answer.status_code == 200, answer.text
        parts = [part for _, part in events(answer.text) if part != "[DONE]"] if stream else [answer.json()]
        ended = [choice["index"] for part in parts for choice in part["choices"] if choice["finish_reason"]]
        assert sorted(ended) == list(range(12))


def test_slow_heads_and_bodies_are_ended_and_hold_up_nobody(engine: Engine) -> None:
    settings = replace(BASE, header_timeout=4.0, body_timeout=4.0)  # others may be as slow on a crowded machine
    with running(engine, settings) as server, server.client() as client:
        address = ("127.0.0.1", server.server.port)
        slow = [socket.create_connection(address) for _ in range(200)]
        for number, connection in enumerate(slow):
            what = (b"POST /v1/completions", b"PUT /v1/sessions/a/snapshot", b"POST /page/upload")[number % 3]
            head = what + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n"
            connection.sendall(head if number % 2 else head + b"Content-Length: 100\r\n\r\n{")
        assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
        for connection in slow:
            connection.settimeout(GUARD)
            answer = connection.recv(1000)
            assert not answer or answer.startswith(b"HTTP/1.1 408")
            connection.close()
        wait_until(lambda: len(server.server.server_state.connections) <= 1)


@pytest.mark.parametrize(
    ("status", "path", "headers"),
    [
        (413, "/v1/completions", {}),
        (415, "/v1/completions", {"content-encoding": "gzip"}),
        (401, "/v1/completions", {"x-api-key": "wrong"}),
        (403, "/v1/completions", {"origin": "http://elsewhere.example"}),
        (404, "/nowhere", {}),
        (405, "/v1/models", {}),
        (413, "/v1/sessions/a/snapshot", {}),
    ],
)
@pytest.mark.parametrize("chunked", [False, True])
def test_who_sends_all_of_a_large_body_gets_to_the_answer(
    engine: Engine, status: int, path: str, headers: dict[str, str], chunked: bool
) -> None:
    settings = replace(BASE, api_keys=("secret",), max_body=2**20, max_snapshot=2**20)
    body = b"a" * (32 * 2**20)  # more than the system's buffers take
    asked = {"x-api-key": "secret", "connection": "close", **headers}
    with running(engine, settings) as server:
        for _ in range(3):
            connection = http.client.HTTPConnection("127.0.0.1", server.server.port, timeout=GUARD)
            with contextlib.closing(connection):
                sent = iter([body]) if chunked else body
                method = "PUT" if path.endswith("snapshot") else "POST"
                connection.request(method, path, sent, asked, encode_chunked=chunked)
                answer = connection.getresponse()
                assert answer.status == status and json.loads(answer.read())["error"]["message"]
        wait_until(lambda: not server.server.server_state.connections)


def test_a_body_that_is_refused_is_read_up_to_a_bound(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linger, "MOST", 2**22)
    head = "POST /nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 9999999999999\r\n"
    with running(engine, BASE) as server:
        for more, sends in (("", True), ("Expect: 100-continue\r\n", False)):
            with socket.create_connection(("127.0.0.1", server.server.port), timeout=GUARD) as connection:
                connection.sendall(f"{head}{more}\r\n".encode())
                assert connection.recv(1000).startswith(b"HTTP/1.1 404")
                if sends:
                    with pytest.raises(ConnectionError):
                        for _ in range(1000):
                            connection.sendall(b"a" * 2**20)
                else:  # it was not asked to send, and is not waited for
                    while connection.recv(1000):
                        pass


def test_a_connection_whose_small_body_nobody_read_is_kept(engine: Engine) -> None:
    with running(engine, BASE) as server:
        connection = http.client.HTTPConnection("127.0.0.1", server.server.port, timeout=GUARD)
        with contextlib.closing(connection):
            for _ in range(3):
                connection.request("POST", "/nowhere", b"{}")
                assert (answer := connection.getresponse()).status == 404 and answer.read()
                made = connection.sock
                assert made is not None
            connection.request("GET", "/health")
            assert connection.getresponse().status == 200 and connection.sock is made


@pytest.mark.parametrize("protocol", ["websocket", "h2c"])
def test_an_upgrade_is_ignored_and_nothing_is_logged(
    engine: Engine, protocol: str, caplog: pytest.LogCaptureFixture
) -> None:
    headers = {"connection": "Upgrade", "upgrade": protocol, "sec-websocket-version": "13", "sec-websocket-key": "eA=="}
    with running(engine, BASE) as server, server.client() as client:
        assert client.get("/health", headers=headers).json() == {"status": "ok"}
    assert not [record for record in caplog.records if record.name.startswith("uvicorn")]


def test_a_reader_that_takes_nothing_is_dropped_and_holds_up_nobody(engine: Engine) -> None:
    settings = replace(BASE, write_timeout=0.5)
    with running(engine, settings) as server, server.client() as client:
        # More than anybody computes while nothing is taken.
        body = {**LONG, "n": 100, "logprobs": True, "top_logprobs": 20}
        with asking(server, "/v1/chat/completions", body, buffer=4096):
            wait_until(lambda: server.server.service.running)
            (request,) = server.server.service.running
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
            wait_until(lambda: not server.server.service.running)
        assert "cancelled" in request.result(600).finished


def test_forty_readers_that_do_not_read_keep_no_chat_waiting(tiny_model: lmstate.Model) -> None:
    body = {**LONG, "max_tokens": 100, "logprobs": True, "top_logprobs": 20}  # more than the system's buffers take
    settings = replace(BASE, write_timeout=GUARD, max_unread=8)
    with Engine(tiny_model, rows=8) as engine, running(engine, settings) as server, server.client() as client:
        for listening in server.server.servers[0].sockets:  # those of its connections have as small buffers
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        with contextlib.ExitStack() as readers:
            slow = [readers.enter_context(asking(server, "/v1/chat/completions", body, 4096)) for _ in range(40)]

            def all_rest() -> bool:  # some do so again and again, until the system's buffers are full
                said = engine.stats()
                return bool(said["set_aside"] == 40 and said["decoding"] == 0)

            wait_until(all_rest)
            assert client.post("/v1/chat/completions", json=CHAT).status_code == 200
            wait_until(all_rest)
            request = next(iter(server.server.service.running))
            assert not request.done
            read = b""
            while b"[DONE]" not in read:
                read += slow[0].recv(2**20)
        whole = client.post("/v1/chat/completions", json={**body, "stream": False}).json()["choices"][0]
        told = [
            one["choices"][0]["delta"] for _, one in events(read.decode().partition("\r\n\r\n")[2]) if one != "[DONE]"
        ]
        assert "".join(delta.get("content") or "" for delta in told) == whole["message"]["content"]


def test_an_answer_that_is_not_taken_is_dropped(engine: Engine) -> None:
    settings = replace(BASE, write_timeout=2.0, keep_alive=1)
    with running(engine, settings) as server, server.client() as client:
        # More than the system's buffers take.
        said = {"type": "message", "role": "user", "content": "a" * 600_000}
        id = client.post("/v1/conversations", json={"items": [said] * 20}).json()["id"]
        path = f"/v1/conversations/{id}/items"
        with socket.socket() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.connect(("127.0.0.1", server.server.port))
            connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            held = server.server.server_state.connections
            wait_until(lambda: any(one.transport.get_write_buffer_size() for one in held))
            wait_until(lambda: not held)
        with socket.create_connection(("127.0.0.1", server.server.port)) as slow:  # one that does take it, but slowly
            slow.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\n\r\n".encode())
            slow.settimeout(GUARD)
            taken = 0
            while taken < 12_000_000 and (part := slow.recv(500_000)):
                taken += len(part)
                sleep(0.1)
        assert taken >= 12_000_000


def test_texts_of_tokens_are_made_beside_the_loop(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[bool] = []

    def told(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **more: Any) -> Any:
            beside.append(asyncio._get_running_loop() is None)
            return function(*args, **more)

        return call

    with running(engine, BASE) as server, server.client() as client:
        service = server.server.service
        monkeypatch.setattr(service.tokenizer, "decode", told(service.tokenizer.decode))
        monkeypatch.setattr(service.grammars, "token_bytes", told(service.grammars.token_bytes))
        answer = client.post("/tokenize", json={"prompt": "abc", "return_token_strs": True}).json()
        assert answer["token_strs"] == ["a", "b", "c"]
        assert client.post("/detokenize", json={"tokens": answer["tokens"]}).json()["prompt"] == "abc"
    assert beside == [True] * 4


def test_pieces_of_tokens_have_the_shape_of_llama_server(tiny: Running) -> None:
    with tiny.client() as client:
        plain, pieces = (
            client.post("/tokenize", json={"content": "a€", **more}) for more in ({}, {"with_pieces": True})
        )
        assert [type(token) for token in plain.json()["tokens"]] == [int] * 4
        told = dict(zip(plain.json()["tokens"], ["a", [226], [130], [172]]))
        assert pieces.json()["tokens"] == [{"id": token, "piece": piece} for token, piece in told.items()]
        assert "token_strs" not in pieces.json()


def test_a_large_body_is_read_beside_the_loop(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    beside: list[bool] = []
    read = serve_http.parse_body

    def told(body: bytes, form: type[Any]) -> Any:
        beside.append(asyncio._get_running_loop() is None)
        return read(body, form)

    monkeypatch.setattr(serve_http, "parse_body", told)
    with running(engine, BASE) as server, server.client() as client:
        for length in (1, 2**18):
            assert client.post("/tokenize", json={"prompt": "a" * length}).json()["count"] == length
    assert beside == [False, True]


def test_metrics_count_requests_and_tokens(tiny: Running) -> None:
    def value(text: str, name: str) -> float:
        found = re.search(rf"^lmstate:{name}{{[^}}]*}} (\S+)$", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    def settled(client: httpx.Client, past: float = -1.0) -> str:
        """The metrics once all requests are counted, also those that other tests left, and more tokens than `past`."""
        wait_until(lambda: not tiny.server.service.running)
        wait_until(lambda: value(client.get("/metrics").text, "generation_tokens_total") > past)
        return client.get("/metrics").text

    with tiny.client() as client:
        before = settled(client)
        client.post("/v1/chat/completions", json={**CHAT, "ignore_eos": True})
        after = settled(client, value(before, "generation_tokens_total"))
    assert value(after, "generation_tokens_total") - value(before, "generation_tokens_total") == 3
    assert value(after, "time_to_first_token_seconds_count") - value(before, "time_to_first_token_seconds_count") == 1
    assert 'path="/v1/chat/completions",status="200"' in after
    assert "lmstate:spec_decode_num_drafts_total{" in after


def test_what_counts_from_the_start_is_a_counter(tiny_model: lmstate.Model, tmp_path: Path) -> None:
    with Engine(tiny_model, rows=2, store=tmp_path) as engine:
        tier = engine._tier
        assert tier is not None
        counts = {**engine._work.counts, **engine._drafting.counts}
        counts |= {f"prefixes_{name}": 0 for name in engine._reuse.prefixes.counts}
        counts |= {f"{tier.name}_{name}": 0 for name in tier.counts} | {"session_failures": 0}
        del counts["draft_seconds_saved"]  # which drafts that do not hold take back
        text, stats = together([Metrics(engine, "m")]).decode(), engine.stats()
    kinds = dict(re.findall(r"^# TYPE lmstate:(\S+) (\S+)$", text, re.MULTILINE))
    for key in stats:
        name = RENAMED.get(key, f"engine_{key}")
        assert (kinds.get(f"{name}_total") == "counter") == (key in counts), key
        assert (kinds.get(name) == "gauge") == (key not in counts), key
    assert "lmstate:engine_folder_written_total{" in text and "lmstate:num_requests_waiting{" in text


def test_the_openapi_document_names_every_route(tiny: Running) -> None:
    from lmstate.serve.app import PATHS

    with tiny.client() as client:
        document = client.get("/openapi.json").json()
    assert {(path.replace(":path", "").replace("{model}", "{model}")) for path in document["paths"]} == {
        one.path.replace(":path", "") for one in PATHS
    }
    operations = [operation["operationId"] for path in document["paths"].values() for operation in path.values()]
    assert len(operations) == len(set(operations)) == len(PATHS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("served"))


@contextlib.contextmanager
def command(
    directory: Path, *options: str, files: int = 4096, main: Sequence[str] = MAIN
) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`lmstate serve` as a process that may open at most so many files, and its URL."""
    arguments = [*main, "serve", str(directory), "--port", "0", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(arguments, stderr=subprocess.PIPE, text=True, env=environment)
    resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (min(files, 1024), files))
    assert process.stderr is not None
    lines = []
    try:
        for line in process.stderr:
            lines.append(line)
            if found := re.search(r"OPENAI_BASE_URL=(http://\S+)/v1 ", line):
                yield process, found[1]
                return
        raise AssertionError("".join(lines))
    finally:
        process.kill()
        process.wait()


def test_sigterm_lets_streams_end_properly(directory: Path) -> None:
    with command(directory) as (process, url), httpx.Client(base_url=url, timeout=300) as client:
        assert client.get("/health").json() == {"status": "ok"}
        body = {**LONG, "max_tokens": 200}
        with client.stream("POST", "/v1/chat/completions", json=body) as answer:
            chunks = answer.iter_text()
            text = next(chunks)
            process.send_signal(signal.SIGTERM)
            text += "".join(chunks)
        found = [data for _, data in events(text)]
        assert found[-1] == "[DONE]"
        assert found[-2]["choices"][0]["finish_reason"] == "length"
        assert process.wait(300) in (0, -signal.SIGTERM)


def test_the_limit_of_open_files_is_never_reached(directory: Path) -> None:
    """With it, connections would no longer be accepted, and asyncio would fill the log."""
    with command(directory, files=1000) as (process, url):
        address = ("127.0.0.1", int(url.rsplit(":", 1)[1]))
        with contextlib.ExitStack() as stack:
            for number in range(min(1500, 2 * room())):
                connection = stack.enter_context(socket.create_connection(address, timeout=300))
                connection.sendall(b"GET /health HTTP/1.1\r\n" if number % 2 else b"")
                if number % 300 == 299:  # on a connection of its own: one kept alive might be the one that gives way
                    assert httpx.post(f"{url}/v1/chat/completions", json=CHAT, timeout=300).status_code == 200
        process.send_signal(signal.SIGTERM)
        assert process.stderr is not None
        assert "out of system resource" not in process.stderr.read()


def test_the_command_refuses_the_network_without_a_key(directory: Path) -> None:
    arguments = [*MAIN, "serve", str(directory), "--host", "0.0.0.0"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    environment.pop("LMSTATE_API_KEY", None)
    ended = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert ended.returncode == 1
    assert "--api-key-file" in ended.stderr


def test_the_command_says_that_its_address_is_taken_before_it_loads_a_model() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        for options, said in (
            (["--port", str(port)], f"lmstate: cannot listen on 127.0.0.1:{port}: Address already in use; --port 0"),
            (["--host", "nowhere.invalid", "--allow-anonymous"], "lmstate: cannot listen on nowhere.invalid:8080: "),
        ):
            arguments = [*MAIN, "serve", "nobody/nothing", *options]
            ended = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=600, check=False)
            assert ended.returncode == 1 and ended.stderr.startswith(said), ended.stderr


@pytest.mark.parametrize(
    ("memory", "code", "said"),
    [
        ("1KiB", 1, r"1,024 bytes of memory were asked for.* needs about [0-9,]+ "),
        ("plenty", 2, "'plenty' is not a size"),
    ],
)
def test_the_command_refuses_memory_that_no_request_fits_in(directory: Path, memory: str, code: int, said: str) -> None:
    arguments = [*MAIN, "serve", str(directory) if code == 1 else "nobody/nothing", "--port", "0", "--memory", memory]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(arguments, capture_output=True, text=True, env=environment, timeout=300, check=False)
    assert ended.returncode == code and re.search(said, ended.stderr), ended.stderr
