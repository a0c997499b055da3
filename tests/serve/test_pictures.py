"""Pictures over HTTP: each protocol's own client, what a picture costs, and pictures that are not read."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any

import anthropic
import openai
import pytest

import lmstate
from lmstate.cluster.serving import FrontFiles
from lmstate.engine import Engine
from lmstate.serve import Settings
from lmstate.serve.wire import picture_sources
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.picture_sources import picture_bytes
from tests.cluster.helpers import fleet
from tests.serve.running import Running, running
from tests.vision.test_encode import WRITTEN, png, said, saved, saved_of, saved_with_axes
from tests.vision.test_mmproj import written

PICTURE, OTHER = png(20, 30), png(40, 17, seed=1)
POSITIONS = 16  # of a picture


def data(picture: bytes) -> str:
    return base64.b64encode(picture).decode()


def url(picture: bytes) -> str:
    return f"data:image/png;base64,{data(picture)}"


def openai_parts(*parts: str | bytes) -> Any:
    return [
        {"type": "image_url", "image_url": {"url": url(part)}}
        if isinstance(part, bytes)
        else {"type": "text", "text": part}
        for part in parts
    ]


def anthropic_parts(*parts: str | bytes) -> Any:
    return [
        {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data(part)}}
        if isinstance(part, bytes)
        else {"type": "text", "text": part}
        for part in parts
    ]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> lmstate.Model:
    folder = tmp_path_factory.mktemp("llava")
    saved(folder)
    return lmstate.load(folder, weights="float32")


@pytest.fixture(scope="module", params=["engine", "front"])
def seeing(model: lmstate.Model, request: pytest.FixtureRequest) -> Iterator[Running]:
    """One engine, or a front of two with a tower of its own."""
    settings = Settings("tiny", port=0)
    if request.param == "engine":
        with Engine(model) as engine, running(engine, settings) as server:
            yield server
    else:
        files = FrontFiles(model.tokenizer, model.folder)
        with fleet(Engine(model), Engine(model), files=files) as (cluster, _), running(cluster.front, settings) as one:
            yield one


@pytest.fixture(scope="module")
def client(seeing: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{seeing.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


@pytest.fixture(scope="module")
def claude(seeing: Running) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(
        base_url=seeing.url, api_key="none", max_retries=0, _strict_response_validation=True
    ) as client:
        yield client


def expected(model: lmstate.Model, *parts: str | bytes) -> tuple[int, str]:
    """(tokens of the prompt, the answer) of a state that reads it all at once."""
    prompt = model.encode(said(*parts))
    prompt.place(state := model.new_state())
    return len(prompt.tokens), model.generate(prompt.tokens, state=state, max_new_tokens=6, temperature=0.0)


def test_every_protocol_gets_the_answer_of_the_model(
    model: lmstate.Model, seeing: Running, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    length, answer = expected(model, PICTURE, "what is this?", OTHER)
    parts = openai_parts(PICTURE, "what is this?", OTHER)
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=6, temperature=0
    )
    assert chat.choices[0].message.content == answer and chat.usage and chat.usage.prompt_tokens == length
    given: Any = [{"role": "user", "content": anthropic_parts(PICTURE, "what is this?", OTHER)}]
    message = claude.messages.create(model="tiny", messages=given, max_tokens=6, extra_body={"temperature": 0})
    assert message.content[0].text == answer  # type: ignore[union-attr]
    assert message.usage.cache_read_input_tokens and message.usage.cache_read_input_tokens > 2 * POSITIONS
    assert claude.messages.count_tokens(model="tiny", messages=given).input_tokens == length
    shown: Any = [
        {"type": "input_image", "image_url": url(part), "detail": "auto"}
        if isinstance(part, bytes)
        else {"type": "input_text", "text": part}
        for part in (PICTURE, "what is this?", OTHER)
    ]
    response = client.responses.create(
        model="tiny", input=[{"role": "user", "content": shown}], max_output_tokens=6, temperature=0
    )
    assert response.output_text == answer
    went_on = client.responses.create(
        model="tiny", input="and?", previous_response_id=response.id, max_output_tokens=4, temperature=0
    )
    assert went_on.usage and went_on.usage.input_tokens_details.cached_tokens >= length
    with seeing.client() as http:
        body = {"role": "user", "content": "what is this?", "images": [data(PICTURE)]}
        asked = {"model": "tiny", "messages": [body], "stream": False, "options": {"num_predict": 6, "temperature": 0}}
        told = http.post("/api/chat", json=asked).json()
        assert told["message"]["content"] == expected(model, PICTURE, "what is this?")[1]
        counted = http.post(
            "/v1/chat/completions/input_tokens", json={"messages": [{"role": "user", "content": parts}]}
        )
        assert counted.json()["input_tokens"] == length


def test_a_conversation_goes_on_from_what_was_sampled(
    seeing: Running, client: openai.OpenAI, claude: anthropic.Anthropic
) -> None:
    tower = seeing.engine.model.pictures().tower
    given: list[Any] = [{"role": "user", "content": openai_parts("a", PICTURE)}]
    first = client.chat.completions.create(model="tiny", messages=given, max_tokens=5, temperature=0)
    runs = tower.runs
    given += [{"role": "assistant", "content": first.choices[0].message.content}]
    given += [{"role": "user", "content": openai_parts("b", PICTURE)}]
    second = client.chat.completions.create(model="tiny", messages=given, max_tokens=5, temperature=0)
    assert first.usage and second.usage and second.usage.prompt_tokens_details and tower.runs == runs
    assert (second.usage.prompt_tokens_details.cached_tokens or 0) >= first.usage.prompt_tokens
    result = {"type": "tool_result", "tool_use_id": "t", "content": anthropic_parts("seen", PICTURE)}
    message = claude.messages.create(
        model="tiny",
        max_tokens=3,
        messages=[
            {"role": "user", "content": "look"},
            {"role": "assistant", "content": [{"type": "tool_use", "id": "t", "name": "look", "input": {}}]},
            {"role": "user", "content": [result]},  # type: ignore[list-item]
        ],
    )
    assert message.usage.input_tokens + (message.usage.cache_read_input_tokens or 0) > POSITIONS


def test_pictures_of_several_sizes_with_axes(tmp_path: Path) -> None:
    saved_with_axes(tmp_path)
    model = lmstate.load(tmp_path, weights="float32")
    with (
        Engine(model) as engine,
        running(engine, Settings("tiny", port=0)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
    ):
        for parts in ((PICTURE, "and", OTHER), ("what", OTHER), (OTHER, PICTURE)):
            length, answer = expected(model, *parts)
            given: Any = [{"role": "user", "content": openai_parts(*parts)}]
            chat = client.chat.completions.create(model="tiny", messages=given, max_tokens=6, temperature=0)
            assert chat.choices[0].message.content == answer
            assert chat.usage and chat.usage.prompt_tokens == length


@pytest.mark.parametrize("family", WRITTEN)
def test_every_family_answers_the_official_clients(family: str, tmp_path: Path) -> None:
    saved_of(family, tmp_path)
    model = lmstate.load(tmp_path, weights="float32")
    length, answer = expected(model, PICTURE, "what is this?", OTHER)
    parts = PICTURE, "what is this?", OTHER
    options: Any = {"model": "tiny", "max_tokens": 6}
    with (
        Engine(model) as engine,
        running(engine, Settings("tiny", port=0)) as server,
        openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client,
        anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as claude,
    ):
        given: Any = [{"role": "user", "content": openai_parts(*parts)}]
        chat = client.chat.completions.create(messages=given, temperature=0, **options)
        assert chat.choices[0].message.content == answer and chat.usage and chat.usage.prompt_tokens == length
        given = [{"role": "user", "content": anthropic_parts(*parts)}]
        message = claude.messages.create(messages=given, extra_body={"temperature": 0}, **options)
        assert "".join(block.text for block in message.content if block.type == "text") == answer
        runs = model.pictures().tower.runs
        assert claude.messages.count_tokens(model="tiny", messages=given).input_tokens == length
        assert model.pictures().tower.runs == runs


def test_marks_in_a_text_are_text(model: lmstate.Model, client: openai.OpenAI) -> None:
    text = "<image> \U000f0000" + "0" * 64 + "\U000f0001"
    done = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": openai_parts(text, PICTURE)}], max_tokens=6, temperature=0
    )
    assert done.choices[0].message.content == expected(model, text, PICTURE)[1]


def test_bad_pictures_are_refused(client: openai.OpenAI, claude: anthropic.Anthropic) -> None:
    for bad, why in (
        ("data:image/png;base64,AAAA", "damaged"),
        ("data:image/png;base64,A!", "not base64"),
        ("data:image/png;base64,\u00e9", "not base64"),
        ("data:text/plain,hello", "a data URL is"),
        ("http://example.com/a.png", "--allow-image-urls"),
        ("file:///etc/passwd", "http or https"),
    ):
        content: Any = [{"type": "image_url", "image_url": {"url": bad}}]
        with pytest.raises(openai.BadRequestError, match=why):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": content}], max_tokens=1)
    for kind, url, told in (
        ("video_url", "data:video/mp4;base64,AAAA", "a video was given, and llava models read pictures alone"),
        ("video_url", "https://example.com/a.mp4", "send a video as data:video/mp4;base64"),
        ("input_video", "data:video/mp4;base64,AAAA", "text, pictures, sounds and videos are read here"),
    ):
        film: Any = [{"type": kind, kind: {"url": url}}]
        with pytest.raises(openai.BadRequestError, match=told):
            client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": film}], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="64"):
        many = openai_parts(*[PICTURE] * 65)
        client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": many}], max_tokens=1)
    linked: Any = [{"type": "image", "source": {"type": "url", "url": "https://example.com/a.png"}}]
    with pytest.raises(anthropic.BadRequestError, match="--allow-image-urls"):
        claude.messages.create(model="tiny", messages=[{"role": "user", "content": linked}], max_tokens=1)
    with pytest.raises(openai.BadRequestError, match="file_id"):
        filed: Any = [{"role": "user", "content": [{"type": "input_image", "file_id": "f", "detail": "auto"}]}]
        client.responses.create(model="tiny", input=filed)


def test_models_of_text_alone_say_so(tiny: Running) -> None:
    with tiny.client() as http:
        body = {"model": "tiny", "messages": [{"role": "user", "content": openai_parts("?", PICTURE)}]}
        answer = http.post("/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "pictures are not read by models of the family 'qwen2'" in answer.json()["error"]["message"]
        answer = http.post("/v1/sessions/one/send", json={"messages": body["messages"]})
        assert answer.status_code in (400, 404)


@contextmanager
def pictures_at(answers: dict[str, tuple[int, dict[str, str], bytes]]) -> Iterator[str]:
    """A web server on the loopback."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            status, headers, content = answers[self.path]
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *args: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_pictures_come_from_hosts_that_are_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    answers: dict[str, tuple[int, dict[str, str], bytes]] = {
        "/a.png": (200, {}, PICTURE),
        "/moved": (302, {"location": "/a.png"}, b""),
        "/round": (302, {"location": "/round"}, b""),
        "/away": (302, {"location": "http://localhost/a.png"}, b""),
        "/file": (302, {"location": "file:///etc/passwd"}, b""),
        "/gone": (404, {}, b""),
        "/large": (200, {}, b"0" * 5000),
    }
    monkeypatch.setattr(picture_sources, "MOST_BYTES", 4500)
    with pictures_at(answers) as place:
        for path in ("/a.png", "/moved"):
            assert picture_bytes(place + path, ["127.0.0.1"]) == PICTURE
        for path, hosts, why in (
            ("/a.png", [], "allow-image-urls"),
            ("/a.png", ["example.com", "*.0.0.1"], "not public"),
            ("/a.png", ["*"], "not public"),
            ("/round", ["127.0.0.1"], "redirected more than 3"),
            ("/away", ["127.0.0.1"], "allow-image-urls"),
            ("/away", ["127.0.0.1", "localhost"], "not public"),
            ("/file", ["127.0.0.1", "*"], "http or https"),
            ("/gone", ["127.0.0.1"], "status 404"),
            ("/large", ["127.0.0.1"], "more than 4500 bytes"),
        ):
            with pytest.raises(ApiError, match=why):
                picture_bytes(place + path, hosts)
        for bad in ("http://[::1", "http://u:p@127.0.0.1/", "ftp://127.0.0.1/a", "http:///a", "http://127.0.0.1:x/"):
            with pytest.raises(ApiError, match="not read"):
                picture_bytes(bad, ["*", "127.0.0.1"])
        monkeypatch.setattr(picture_sources, "SECONDS", -1.0)
        with pytest.raises(ApiError, match="was not read"):
            picture_bytes(place + "/a.png", ["127.0.0.1"])


@pytest.mark.parametrize("kind", ["engine", "front"])
def test_a_gguf_model_with_the_file_of_its_tower(kind: str, tmp_path: Path) -> None:
    """Its chat template knows no pictures."""
    _, path, mmproj = written("llava", tmp_path)
    model = lmstate.load(path, weights="float32", mmproj=mmproj)
    length, answer = expected(model, PICTURE, "what is this?")
    messages: Any = [{"role": "user", "content": openai_parts(PICTURE, "what is this?")}]
    with ExitStack() as stack:
        engine: Any = stack.enter_context(Engine(model))
        if kind == "front":
            files = FrontFiles.of(str(path), str(mmproj))
            engine = stack.enter_context(fleet(engine, files=files))[0].front
        server = stack.enter_context(running(engine, Settings("tiny", port=0)))
        with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            chat = client.chat.completions.create(model="tiny", messages=messages, max_tokens=6, temperature=0)
        assert chat.choices[0].message.content == answer and chat.usage and chat.usage.prompt_tokens == length
        with server.client() as http:
            assert http.get("/props").json()["modalities"]["vision"]
