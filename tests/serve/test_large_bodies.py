"""Large bodies: bounded in their number and memory, decoded as small ones are, and refused before they cost much."""

from __future__ import annotations

import contextlib
import json
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmstate.engine import Engine
from lmstate.serve import Settings
from lmstate.serve.answer.service import BEGINNING
from lmstate.serve.wire.body import MAX_BRACKETS, parse_body, parse_json, read
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.large_bodies import LARGE
from lmstate.serve.wire.schema.chat import ChatBody
from tests.serve.running import Running, running, save_tiny
from tests.waiting import GUARD, wait_until

USER = [{"role": "user", "content": "Hi"}]
SMALL = {"messages": USER, "max_tokens": 1}
WIDE = {**SMALL, "unknown": "x" * LARGE}  # that the model reads little of


@pytest.fixture(scope="module")
def engine(tiny: Running) -> Engine:
    return tiny.engine


@pytest.mark.parametrize("chunked", [False, True])
def test_bytes_of_large_bodies_are_bounded_until_one_is_answered(engine: Engine, chunked: bool) -> None:
    limits = Settings("tiny", port=0, max_body=2**20, max_sound=2**20, max_bodies=2**20)
    with running(engine, limits) as server, server.client() as client:
        size = 2**20 - 100
        length = "Transfer-Encoding: chunked" if chunked else f"Content-Length: {size}"
        head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: 127.0.0.1\r\n{length}\r\n\r\n"
        begun = b"%x\r\n" % size if chunked else b""
        with socket.create_connection(("127.0.0.1", server.server.port), timeout=GUARD) as slow:
            slow.sendall(head.encode() + begun + b" " * (size - 2))

            def refused() -> bool:
                nonlocal answer
                answer = client.post("/v1/chat/completions", json=WIDE)
                return answer.status_code == 503

            answer = client.post("/v1/chat/completions", json=SMALL)
            wait_until(refused)
            assert answer.json()["error"]["code"] == "too_many_bodies" and int(answer.headers["retry-after"]) > 0
            assert client.post("/v1/chat/completions", json=SMALL).status_code == 200
            slow.sendall(b"{}" + (b"\r\n0\r\n\r\n" if chunked else b""))
            assert slow.recv(2**16).startswith(b"HTTP/1.1 400")
        wait_until(lambda: client.post("/v1/chat/completions", json=WIDE).status_code == 200)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=12,
)


def outcome(body: bytes, depth: int, whole: bool) -> Any:
    try:
        return read(parse_json(body, depth), ChatBody) if whole else parse_body(body, ChatBody, depth)
    except ApiError as error:
        return error


@settings(max_examples=300, deadline=None)
@given(VALUES, st.sampled_from(["temperature", "metadata", "content", "chat_template_kwargs", "top_k", "parameters"]))
def test_a_body_is_read_at_once_as_it_is_read_in_two_steps(value: Any, field: str) -> None:
    body: dict[str, Any] = {"messages": [{"role": "user", "content": value if field == "content" else "Hi"}]}
    if field == "parameters":
        body["tools"] = [{"type": "function", "function": {"name": "f", "parameters": value}}]
    elif field != "content":
        body[field] = value
    raw = json.dumps(body).encode()
    assert outcome(raw, 100, whole=False) == outcome(raw, 100, whole=True)
    if field == "parameters":  # which is kept as it is
        assert outcome(raw, 5, whole=False) == outcome(raw, 5, whole=True)


def test_more_brackets_than_memory_has_room_for_are_refused() -> None:
    body = b'{"messages": [%s]}' % b",".join([b"{}"] * MAX_BRACKETS)
    assert outcome(body, 100, whole=False).status == 413


def test_a_text_whose_beginning_is_far_too_long_is_not_tokenized(
    tiny: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = tiny.server.service.context
    assert context is not None
    lengths: list[int] = []
    tokenizer = tiny.engine.model.tokenizer
    encode = tokenizer.encode

    def counted(text: str, add_special_tokens: bool = True) -> list[int]:
        lengths.append(len(text))
        return encode(text, add_special_tokens)

    monkeypatch.setattr(tokenizer, "encode", counted)
    text = "a" * (3 * BEGINNING * context)
    with tiny.client() as client:
        asked = ({"prompt": text}, {"messages": [{"role": "user", "content": text}]})
        for path, body in zip(("/v1/completions", "/v1/chat/completions"), asked):
            told = client.post(path, json=body)
            assert told.status_code == 400 and told.json()["error"]["code"] == "context_length_exceeded"
            assert f"> {context} maximum" in told.text
        for path, body in (
            ("/v1/embeddings", {"input": text}),
            ("/api/embed", {"model": "tiny", "input": text, "truncate": False}),
            ("/v1/rerank", {"query": "a", "documents": [text]}),
        ):
            assert f"> {context} maximum" in client.post(path, json=body).text
        first = client.post("/v1/responses", json={"input": "Hi", "max_output_tokens": 2}).json()["id"]
        assert client.post("/v1/sessions", json={"name": "long"}).status_code == 201
        said = [{"role": "user", "content": text}]
        for path, body in (
            ("/v1/responses", {"input": text}),
            ("/v1/responses", {"input": text, "previous_response_id": first}),
            ("/v1/responses", {"input": text, "truncation": "auto"}),
            ("/v1/responses", {"input": [*said, *said], "truncation": "auto"}),
            ("/v1/messages", {"model": "tiny", "messages": said, "max_tokens": 2}),
            ("/api/generate", {"model": "tiny", "prompt": text, "context": [1, 2]}),
            ("/v1/sessions/long/send", {"text": text}),
            ("/v1/sessions/long/send", {"messages": said}),
            ("/v1/cache/explain", {"messages": said}),
            ("/v1/cache/explain", {"prompt": text}),
        ):
            told = client.post(path, json=body)
            assert told.status_code == 400 and f"> {context} maximum" in told.text, path
        client.delete("/v1/sessions/long").raise_for_status()
        assert lengths and max(lengths) == BEGINNING * context
        cut = {"input": [*said, {"role": "user", "content": "Hi"}], "truncation": "auto", "max_output_tokens": 2}
        assert client.post("/v1/responses", json=cut).status_code == 200, "the turn that is too long is left out"
        assert max(lengths) == BEGINNING * context
        assert client.post("/api/embed", json={"model": "tiny", "input": text}).status_code == 200  # it is cut
        cut = {"query": "a", "documents": [text], "max_tokens_per_doc": 3}
        assert client.post("/v1/rerank", json=cut).status_code == 200
    assert max(lengths) == 2 * BEGINNING * context


def test_inputs_of_one_request_are_bounded_together(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    limits = Settings("tiny", port=0, max_input_tokens=20)
    with running(engine, limits) as server, server.client() as client:
        assert client.post("/v1/embeddings", json={"input": ["a" * 10] * 2}).status_code == 200
        told = client.post("/v1/embeddings", json={"input": ["a" * 10] * 3})
        assert told.status_code == 400 and "30 tokens" in told.json()["error"]["message"]
        lengths: list[int] = []
        encode = engine.model.tokenizer.encode
        monkeypatch.setattr(
            engine.model.tokenizer, "encode", lambda text, *rest: lengths.append(len(text)) or encode(text, *rest)
        )
        for path in ("/v1/embeddings", "/api/embed"):
            lengths.clear()
            told = client.post(path, json={"model": "tiny", "input": ["a" * 10] * 100})
            assert told.status_code == 400 and "first 3 inputs" in told.text
            assert len(lengths) == 3, "the rest was tokenized, though it is refused"


FIRST = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
import msgspec
from lmstate.serve.wire.body import parse_body

threads = 8
for number in range(40):
    fields = [(f"f{k}", "int | str | None", None) for k in range(20)]
    inner = [msgspec.defstruct(f"Inner{i}", fields) for i in range(20)]
    form = msgspec.defstruct("Form", [(f"g{i}", each | None, None) for i, each in enumerate(inner)])
    barrier = Barrier(threads)
    def ask(_):
        barrier.wait()
        return parse_body(b'{"g1": {"f1": 5}}', form).g1.f1
    with ThreadPoolExecutor(threads) as pool:
        assert list(pool.map(ask, range(threads))) == [5] * threads
"""


def test_threads_that_read_the_first_bodies_at_once_do_not_end_the_process() -> None:
    subprocess.run([sys.executable, "-c", FIRST], check=True, timeout=GUARD)


MEMORY = """
from pathlib import Path
from threading import Barrier
from lmstate.serve.wire.workers import Workers, return_memory

def resident():
    return int(Path("/proc/self/status").read_text().partition("VmRSS:")[2].split()[0])

def ask(_):
    barrier.wait()
    held = [bytes(30_000) for _ in range(1_000)]
    return len(held)

barrier = Barrier(4)
with Workers(4) as workers:
    assert workers.submit(int, "3").result() == 3
    start = resident()
    for _ in range(3):
        assert list(workers.map(ask, range(4))) == [1_000] * 4
        return_memory()
        assert resident() < start + 10_000, (start, resident())
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads resident bytes in /proc")
def test_threads_keep_no_memory_that_is_free() -> None:
    subprocess.run([sys.executable, "-c", MEMORY], check=True, timeout=GUARD)


SERVER = """
import sys
import lmstate
from lmstate.engine import Engine
from lmstate.serve import Settings, make_server

server = make_server(Engine(lmstate.load(sys.argv[1], weights="float32"), rows=4), Settings("tiny", port=0))
server.ready = lambda port: print("PORT", port, flush=True)
server.run()
"""


@pytest.mark.soak
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads resident bytes in /proc")
def test_memory_is_back_after_each_overload(tmp_path: Path) -> None:
    size = 15 * 2**20
    phases: list[tuple[str, dict[str, Any]]] = [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hello world " * (size // 12)}]}),
        ("/v1/completions", {"prompt": [5] * (size // 2)}),
        ("/v1/chat/completions", {**SMALL, "metadata": [{}] * (size // 3)}),
        ("/v1/embeddings", {"input": ["hello world " * 250] * 2048}),
    ]
    with (
        subprocess.Popen(
            [sys.executable, "-c", SERVER, str(save_tiny(tmp_path))], stdout=subprocess.PIPE, text=True
        ) as process,
        contextlib.ExitStack() as ends,
    ):
        ends.callback(process.kill)
        assert process.stdout is not None
        port = next(int(line.split()[1]) for line in process.stdout if line.startswith("PORT"))

        def resident() -> int:
            status = Path(f"/proc/{process.pid}/status").read_text()
            return int(status.partition("VmRSS:")[2].split()[0])

        with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=GUARD) as client:
            for _ in range(3):
                assert client.post("/v1/chat/completions", json=SMALL).is_success
            start = resident()
            for path, body in phases * 2:
                raw = json.dumps(body, separators=(",", ":")).encode()
                with ThreadPoolExecutor(8) as pool:
                    answers = list(pool.map(lambda _, path=path, raw=raw: client.post(path, content=raw), range(8)))
                assert {answer.status_code for answer in answers} <= {200, 400, 413, 503}, path
                assert client.post("/v1/chat/completions", json=SMALL).is_success
                wait_until(lambda: resident() < 1.1 * start, 60)
