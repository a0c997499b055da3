"""Sounds in chats over HTTP: OpenAI's own client, and sounds that are not read."""

from __future__ import annotations

import base64
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import openai
import pytest

import lmstate
from lmstate.cluster.serving import FrontFiles
from lmstate.engine import Engine
from lmstate.serve import Settings
from tests.audio.hearing import saved
from tests.audio.test_heard import DRAWN, said
from tests.audio.test_transcribe import noise
from tests.audio.test_wav import wav
from tests.cluster.helpers import fleet
from tests.serve.running import Running, load_tiny, running

SOUNDS = [noise(0.6, 1), noise(0.95, 2)]


def heard(sound: bytes, format: str = "wav") -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(sound).decode(), "format": format}}


def asked(*parts: Any) -> Any:
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> lmstate.Model:
    folder = tmp_path_factory.mktemp("qwen2_audio")
    saved("qwen2_audio", folder)
    return lmstate.load(folder, weights="float32")


@pytest.fixture(scope="module", params=["engine", "front"])
def server(model: lmstate.Model, request: pytest.FixtureRequest) -> Iterator[Running]:
    """One engine, or a front of two with a tower of its own."""
    settings = Settings("tiny", port=0)
    if request.param == "engine":
        with Engine(model) as engine, running(engine, settings) as one:
            yield one
    else:
        files = FrontFiles(model.tokenizer, model.folder)
        with fleet(Engine(model), Engine(model), files=files) as (cluster, _), running(cluster.front, settings) as one:
            yield one


@pytest.fixture
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as one:
        yield one


def test_the_official_client_gets_the_answer_of_the_model(client: openai.OpenAI, model: lmstate.Model) -> None:
    options: Any = {"model": "tiny", "max_tokens": 8, "temperature": 1.0, "seed": 1}
    answers = set()
    for first, second in ((0, 1), (1, 0)):
        prompt = model.encode(said(SOUNDS[first], "then", SOUNDS[second], "What?"), add_generation_prompt=True)
        state = model.new_state()
        prompt.place(state)
        expected = model.generate(prompt.tokens, state, **DRAWN)
        files = [wav(SOUNDS[index], width=4) for index in (first, second)]
        messages = asked(heard(files[0]), "then", heard(files[1]), "What?")
        made = client.chat.completions.create(messages=messages, **options)
        assert made.choices[0].message.content == expected
        assert made.usage is not None and made.usage.prompt_tokens == len(prompt.tokens)
        pieces = client.chat.completions.create(messages=messages, stream=True, **options)
        assert "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices) == expected
        answers.add(expected)
    assert len(answers) == 2


def test_bad_sounds_are_refused(client: openai.OpenAI, server: Running) -> None:
    good = wav(SOUNDS[0])
    for part, why in (
        (heard(good, "mp3"), "format"),
        (heard(b"ID3"), "damaged"),
        (heard(good[:-3]), "cut short"),
        (heard(wav(noise(1.5))), "1.5 seconds"),
        ({"type": "input_audio"}, "input_audio"),
        ({"type": "input_audio", "input_audio": {"data": "???", "format": "wav"}}, "base64"),
        ({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}, "sounds alone"),
    ):
        with pytest.raises(openai.BadRequestError, match=why):
            client.chat.completions.create(model="tiny", messages=asked(part, "x"), max_tokens=1)
    with server.client() as plain:
        assert plain.get("/props").json()["modalities"] == {"vision": False, "audio": True}
    made = client.chat.completions.create(model="tiny", messages=asked(heard(good), "x"), max_tokens=1)
    assert made.choices[0].finish_reason == "length"


def test_errors_of_files_tell_no_paths(tmp_path: Path) -> None:
    saved("qwen2_audio", tmp_path)
    model = lmstate.load(tmp_path, weights="float32")
    for file in tmp_path.glob("*processor*.json"):
        file.write_text("{")
    with Engine(model) as engine, running(engine, Settings("tiny", port=0)) as one, one.client() as client:
        body = {"messages": asked(heard(wav(SOUNDS[0])), "x"), "max_tokens": 1}
        failed = client.post("/v1/chat/completions", json=body)
        assert failed.status_code == 500 and str(tmp_path) not in failed.text and "log says why" in failed.text


def test_models_of_text_alone_say_so(tmp_path: Path) -> None:
    with (
        Engine(load_tiny(tmp_path)) as engine,
        running(engine, Settings("tiny", port=0)) as one,
        one.client() as client,
    ):
        body = {"messages": asked(heard(wav(SOUNDS[0])), "x"), "max_tokens": 1}
        refused = client.post("/v1/chat/completions", json=body)
        assert refused.status_code == 400 and "sounds" in refused.json()["error"]["message"]
        assert client.get("/props").json()["modalities"]["audio"] is False


@pytest.mark.parametrize("front", [False, True])
def test_transcripts_of_a_model_that_hears_in_conversations(tmp_path: Path, front: bool) -> None:
    saved("voxtral", tmp_path)
    model = lmstate.load(tmp_path, weights="float32")
    sound = wav(SOUNDS[0], width=4)
    expected, settings = model.transcribe(sound, language="en"), Settings("tiny", port=0)
    assert expected.text
    with ExitStack() as stack:
        engine: Any = stack.enter_context(Engine(model))
        if front:
            engine = stack.enter_context(fleet(engine, files=FrontFiles(model.tokenizer, tmp_path)))[0].front
        server = stack.enter_context(running(engine, settings))
        client = stack.enter_context(
            openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True)
        )
        asked: Any = {"model": "tiny", "file": ("speech.wav", sound), "language": "en"}
        made = client.audio.transcriptions.create(**asked)
        assert made.text == expected.text and made.usage is not None and made.usage.type == "duration"
        assert client.audio.transcriptions.create(**asked, response_format="text") == expected.text + "\n"
        told = list(client.audio.transcriptions.create(**asked, stream=True))
        assert "".join(event.delta for event in told[:-1]) == told[-1].text == expected.text and len(told) > 2
        for wish in ({"response_format": "verbose_json"}, {"prompt": "x"}, {"language": "lang"}):
            with pytest.raises(openai.BadRequestError, match=r"times|prompt|letters"):
                client.audio.transcriptions.create(**{**asked, **wish})
        with pytest.raises(openai.BadRequestError, match="translation"):
            client.audio.translations.create(model="tiny", file=("speech.wav", sound))
