"""Sounds over HTTP: OpenAI's own client, transcripts of the model alone, and forms that nobody vouches for."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shlex
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import openai
import pytest
import torch

import lmstate
from lmstate.audio.subtitles import as_srt, as_vtt
from lmstate.engine import Engine
from lmstate.generation.transcription import Transcription
from lmstate.serve import Settings
from lmstate.serve.openai import transcriptions
from lmstate.serve.wire.errors import ApiError
from lmstate.serve.wire.multipart import parse_form
from tests.audio.small import saved
from tests.audio.test_transcribe import noise
from tests.audio.test_wav import tone, wav
from tests.docs.test_server_page import commands
from tests.serve.running import Running, running
from tests.serve.vendor_schemas import complain
from tests.zoo import ours

SOUNDS = {seconds: wav(noise(seconds, seed=int(10 * seconds))) for seconds in (0.7, 2.4)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> lmstate.Model:
    folder = tmp_path_factory.mktemp("whisper")
    saved(folder, max_target_positions=128)
    return lmstate.load(folder, weights="float32")


@pytest.fixture(scope="module")
def server(model: lmstate.Model) -> Iterator[Running]:
    with Engine(model, rows=4) as engine, running(engine, Settings("whisper", port=0, max_sound=200_000)) as one:
        yield one


@pytest.fixture(scope="module")
def client(server: Running) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="none", max_retries=0, _strict_response_validation=True
    ) as one:
        yield one


def file(seconds: float) -> tuple[str, bytes]:
    return "speech.wav", SOUNDS[seconds]


@pytest.mark.parametrize("seconds", SOUNDS)
def test_the_official_client_gets_the_transcript_of_the_model(
    client: openai.OpenAI, model: lmstate.Model, seconds: float
) -> None:
    expected = model.transcribe(SOUNDS[seconds], language="de", prompt="Hello")
    asked: Any = {"model": "whisper", "file": file(seconds), "language": "de", "prompt": "Hello"}
    made = client.audio.transcriptions.create(**asked)
    assert made.text == expected.text and made.usage.type == "duration" and made.usage.seconds == seconds
    assert client.audio.transcriptions.create(**asked, response_format="text") == expected.text + "\n"
    assert client.audio.transcriptions.create(**asked, response_format="json").text == expected.text


@pytest.mark.parametrize("seconds", SOUNDS)
def test_formats_with_times(client: openai.OpenAI, server: Running, model: lmstate.Model, seconds: float) -> None:
    expected = model.transcribe(SOUNDS[seconds], times=True, silence=True)
    asked: Any = {"model": "whisper", "file": file(seconds)}
    assert client.audio.transcriptions.create(**asked, response_format="srt") == as_srt(expected.segments)
    assert client.audio.transcriptions.create(**asked, response_format="vtt") == as_vtt(expected.segments)
    made = client.audio.transcriptions.create(
        **asked, response_format="verbose_json", timestamp_granularities=["segment"]
    )
    assert made.text == expected.text and made.duration == seconds and made.language in ("english", "german", "french")
    assert made.segments is not None and len(made.segments) == len(expected.segments)
    for got, own in zip(made.segments, expected.segments):
        assert (got.text, got.tokens, got.start, got.end) == (own.text, list(own.tokens), own.start, own.end)
        assert got.avg_logprob == pytest.approx(own.avg_logprob) and got.seek == own.seek
        assert got.no_speech_prob == pytest.approx(own.no_speech_prob, rel=1e-4) and got.no_speech_prob > 0
    with server.client() as plain:
        for format, schema in (("json", "Json"), ("verbose_json", "VerboseJson")):
            answer = plain.post(
                "/v1/audio/transcriptions", data={"response_format": format}, files={"file": file(seconds)}
            ).json()
            assert complain("openai", f"CreateTranscriptionResponse{schema}", answer) is None


def test_words_have_times(client: openai.OpenAI, server: Running, model: lmstate.Model) -> None:
    asked: Any = {"model": "whisper", "file": file(2.4), "language": "en", "response_format": "verbose_json"}
    for granularities in (["word"], ["word", "segment"]):
        made = client.audio.transcriptions.create(**asked, timestamp_granularities=granularities)
        assert made.words is not None and (made.segments is None) == (granularities == ["word"])
        assert len(made.words) > 3
        for word in made.words:
            assert 0 <= word.start <= word.end <= 2.42
    with server.client() as plain:
        fields = {"language": "en", "response_format": "verbose_json", "timestamp_granularities[]": "word"}
        answer = plain.post("/v1/audio/transcriptions", data=fields, files={"file": file(2.4)}).json()
        assert complain("openai", "CreateTranscriptionResponseVerboseJson", answer) is None
        own = model.transcribe(SOUNDS[2.4], language="en", words=True)
        assert [(each["word"], each["start"], each["end"]) for each in answer["words"]] == [
            (word.text, word.start, word.end) for each in own.segments for word in each.words
        ]


def test_bad_answers_are_tried_again_on_request(
    server: Running, model: lmstate.Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(transcriptions, "FALLBACK", tries := (0.0, 1e-3))
    expected = model.transcribe(SOUNDS[0.7], language="en", temperature=tries, silence=True, times=True)
    assert expected.segments[0].temperature == 1e-3
    with server.client() as plain:
        fields = {"language": "en", "temperature_fallback": "true", "response_format": "verbose_json"}
        answer = plain.post("/v1/audio/transcriptions", data=fields, files={"file": file(0.7)}).json()
    assert [(each["text"], each["temperature"]) for each in answer["segments"]] == [
        (each.text, each.temperature) for each in expected.segments
    ]


def test_a_translation_is_that_of_the_model(client: openai.OpenAI, server: Running, model: lmstate.Model) -> None:
    expected = model.transcribe(SOUNDS[2.4], task="translate", times=True)
    made = client.audio.translations.create(model="whisper", file=file(2.4))
    assert made.text == expected.text
    made = client.audio.translations.create(model="whisper", file=file(2.4), response_format="verbose_json")
    assert made.text == expected.text and made.language == "english" and len(made.segments) == len(expected.segments)


@pytest.mark.parametrize("seconds", SOUNDS)
def test_a_stream_has_the_text_as_it_comes(client: openai.OpenAI, model: lmstate.Model, seconds: float) -> None:
    expected = model.transcribe(SOUNDS[seconds], language="en")
    events = list(client.audio.transcriptions.create(model="whisper", file=file(seconds), language="en", stream=True))
    assert [event.type for event in events[:-1]] == ["transcript.text.delta"] * (len(events) - 1)
    assert "".join(event.delta for event in events[:-1]) == events[-1].text == expected.text
    assert len(events) > 2 and events[-1].usage.output_tokens > 0
    for event in events:
        name = "TranscriptTextDeltaEvent" if event.type.endswith("delta") else "TranscriptTextDoneEvent"
        assert complain("openai", name, event.model_dump(exclude_none=True)) is None


def test_a_stream_that_fails_says_so_and_the_log_says_why(
    server: Running, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(self: Transcription, heard: Any) -> None:
        raise RuntimeError("secret of the machine")

    monkeypatch.setattr(Transcription, "take", fail)
    with server.client() as plain:
        failed = plain.post("/v1/audio/transcriptions", files={"file": file(0.7)}, data={"stream": "true"})
    assert "log says why" in failed.text and "secret" not in failed.text
    assert any(record.exc_info and "secret" in str(record.exc_info[1]) for record in caplog.records)


def test_draws_follow_temperature_and_seed(server: Running, model: lmstate.Model) -> None:
    expected = model.transcribe(SOUNDS[2.4], language="fr", temperature=1.5, seed=4)
    with server.client() as client:
        fields = {"temperature": "1.5", "seed": "4", "language": "French", "model": "whisper"}
        made = client.post("/v1/audio/transcriptions", data=fields, files={"file": file(2.4)})
    assert made.json()["text"] == expected.text


def test_many_at_a_time_get_their_own(server: Running, model: lmstate.Model) -> None:
    sounds = [wav(noise(0.4 + 0.3 * seed, seed)) for seed in range(8)]
    expected = [model.transcribe(sound, language="en").text for sound in sounds]

    async def all_of_them() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
            asked = (
                client.audio.transcriptions.create(model="whisper", file=("x.wav", sound), language="en")
                for sound in sounds
            )
            return [made.text for made in await asyncio.gather(*asked)]

    assert asyncio.run(all_of_them()) == expected


def test_what_cannot_be_transcribed_is_refused(server: Running) -> None:
    path, good = "/v1/audio/transcriptions", {"file": file(0.7)}
    with server.client() as client:
        for fields, files, status, why in (
            ({}, {}, 415, "multipart"),
            ({"model": "whisper"}, {"other": file(0.7)}, 400, "file"),
            ({"model": "other"}, good, 404, "not served"),
            ({"language": "xx"}, good, 400, "knows de, en, fr"),
            ({"response_format": "xml"}, good, 400, "response_format"),
            ({"temperature": "5"}, good, 400, "temperature"),
            ({"temperature": "warm"}, good, 400, "temperature"),
            ({"timestamp_granularities[]": "word"}, good, 400, "verbose_json"),
            ({"include[]": "logprobs"}, good, 400, "include"),
            ({"temperature_fallback": "true", "stream": "true"}, good, 400, "temperature_fallback"),
            ({"stream": "true", "response_format": "srt"}, good, 400, "srt"),
            ({"language": ["de", "en"]}, good, 400, "2 times"),
            ({}, {"file": ("x.mp3", b"ID3" + b"\0" * 99)}, 400, "ffmpeg"),
            ({}, {"file": ("x.wav", wav(tone(440, 8_000, 0.1), 8_000)[:-9])}, 400, "cut short"),
            ({}, {"file": ("x.wav", b"")}, 400, "damaged"),
            ({}, {"file": ("x.wav", b"0" * 200_001)}, 413, "200000 bytes"),
        ):  # fmt: skip
            refused = client.post(path, data=fields, files=files)
            assert refused.status_code == status, (fields, refused.text)
            assert why in refused.json()["error"]["message"]
        assert client.post(path, json={"file": "x"}).status_code == 415
        assert client.post(path, files=good).status_code == 200, "and the server goes on"
        for path, body in (
            ("/v1/completions", {"prompt": "x"}),
            ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
            ("/v1/embeddings", {"input": "x"}),
            ("/v1/responses", {"input": "x"}),
        ):
            refused = client.post(path, json=body)
            assert refused.status_code == 400, refused.text
        assert client.get("/health").status_code == 200


@pytest.mark.parametrize("line", [line for line in commands() if "/audio/" in line])
def test_the_curl_lines_of_the_page_answer(server: Running, tmp_path: Path, line: str) -> None:
    (tmp_path / "speech.wav").write_bytes(SOUNDS[2.4])
    arguments = [*shlex.split(line.replace("$BASE", server.url)), "--silent", "--show-error", "--fail-with-body"]
    env = {**os.environ, "no_proxy": "127.0.0.1"}
    made = subprocess.run(arguments, cwd=tmp_path, env=env, capture_output=True, text=True, check=True)
    assert json.loads(made.stdout)["text"]


def test_a_model_that_hears_nothing_refuses_sounds(tmp_path: Path) -> None:
    from tests.serve.running import load_tiny

    with Engine(load_tiny(tmp_path)) as engine, running(engine, Settings("tiny", port=0)) as one:
        with one.client() as client:
            refused = client.post("/v1/audio/transcriptions", files={"file": file(0.7)})
        assert refused.status_code == 400 and "reads no sounds" in refused.json()["error"]["message"]
    assert not ours("bart").hears


@pytest.mark.parametrize("name", ["preprocessor_config.json", "generation_config.json"])
def test_errors_of_files_tell_no_paths(tmp_path: Path, name: str) -> None:
    saved(tmp_path, max_target_positions=128)
    model = lmstate.load(tmp_path, weights="float32")
    (tmp_path / name).write_text("{")
    with Engine(model) as engine, running(engine, Settings("whisper", port=0)) as one, one.client() as client:
        failed = client.post("/v1/audio/transcriptions", files={"file": file(0.7)})
        assert failed.status_code == 500 and str(tmp_path) not in failed.text and "log says why" in failed.text


def test_one_sound_is_read_at_a_time(model: lmstate.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes much memory, and there are as many threads as requests."""
    listener, inside, most = model.listener(), [], []
    samples = listener.samples

    def slow(data: bytes) -> torch.Tensor:
        inside.append(data)
        most.append(len(inside))
        sleep(0.05)
        try:
            return samples(data)
        finally:
            inside.remove(data)

    monkeypatch.setattr(listener, "samples", slow)
    with ThreadPoolExecutor(4) as threads:
        made = list(threads.map(lambda data: model.transcribe(data).text, [SOUNDS[0.7], SOUNDS[2.4]] * 2))
    assert made[:2] == made[2:] and most == [1] * 4


def test_damaged_forms_are_refused() -> None:
    """Random damage gives a form or an `ApiError`, in time that grows with the body alone."""
    kind = "multipart/form-data; boundary=abc"
    part = b'--abc\r\nContent-Disposition: form-data; name="file"; filename="x\xc3\xa9.wav"\r\n\r\nDATA\r\n'
    whole = part + b"--abc\r\ncontent-disposition: form-data; name=model\r\n\r\n\r\n--abc--\r\n"
    assert parse_form(whole, kind) == {"file": [b"DATA"], "model": [b""]}
    assert parse_form(part + part + b"--abc--", kind) == {"file": [b"DATA", b"DATA"]}
    for bad, why in (
        (b"", "begin"), (b"--abc", "line"), (part, "line|end"), (part + b"--abc", "line"),
        (b"--abcd\r\n\r\n--abc--", "line"),
        (part * 65 + b"--abc--", "64"), (b"--abc\r\n" + b"a: b\r\n" * 3_000 + b"\r\nx\r\n--abc--", "headers"),
        (b"--abc\r\n\r\n\r\nx\r\n--abc--", "Content-Disposition"),
        (b"--abc\r\ncontent-disposition: form-data\r\n\r\nx\r\n--abc--", "Content-Disposition"),
        (b"--abc\r\ncontent-disposition: attachment; name=x\r\n\r\nx\r\n--abc--", "Content-Disposition"),
    ):  # fmt: skip
        with pytest.raises(ApiError, match=why):
            parse_form(bad, kind)
    form = "multipart/form-data; boundary="
    for bad_kind in ("", form[:19], form, form + "a" * 71, form + "\xe9", "application/json; boundary=abc"):
        with pytest.raises(ApiError):
            parse_form(whole, bad_kind)
    begin = perf_counter()
    for bad_kind in (
        'multipart/form-data; a="' + ";" * 60_000, "multipart/form-data" + ";" * 60_000, form + '"' + '\\"' * 30_000,
        form.replace("=", "*" + "9" * 5_000 + "=a"), "multipart/form-data; boundary*=nope''%ff",
    ):  # fmt: skip
        with pytest.raises(ApiError):
            parse_form(whole, bad_kind)
    for named in (
        "(" * 8_000, "(" * 3_900 + ")" * 3_900, "; name*", "; name*=", "; name*=idna''abc", ";" * 8_000,
        f"; name*{'9' * 5_000}=a", "; name=", '; name="', '; name="' + '\\"' * 3_500, "; =", "; name*0*=utf-8''%ff",
        '; filename="name=x"',
    ):  # fmt: skip
        bad = f"--abc\r\ncontent-disposition: form-data{named}\r\n\r\nx\r\n".encode()
        with pytest.raises(ApiError, match="Content-Disposition"):
            parse_form(bad * 64 + b"--abc--", kind)
    assert perf_counter() - begin < 1  # the header in quotes took seconds where it was read again for each `;`
    for told in ('name="a\\"b;c"; filename="x"', 'filename="\\\\"; NAME = "a\\"b;c"'):
        quoted = f"--abc\r\nContent-Disposition:form-data;{told}\r\n\r\nx\r\n--abc--".encode()
        assert parse_form(quoted, 'Multipart/Form-Data ; charset=x; Boundary="abc"') == {'a"b;c': [b"x"]}
    luck, read = random.Random(0), 0
    for _ in range(500):
        damaged = bytearray(whole)
        for _ in range(luck.randint(1, 3)):
            damaged[luck.randrange(len(damaged))] = luck.randrange(256)
        try:
            parse_form(bytes(damaged), kind)
            read += 1
        except ApiError:
            continue
    assert 0 < read < 500
