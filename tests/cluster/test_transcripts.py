"""Transcripts through a front are those of the model, also when a replica dies while it writes one."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import lmstate
from lmstate.audio.subtitles import as_srt
from lmstate.cluster import Cluster
from lmstate.cluster.serving import FrontFiles
from lmstate.engine import Engine
from lmstate.serve import Settings
from tests.audio.small import saved
from tests.audio.test_transcribe import noise
from tests.audio.test_wav import wav
from tests.cluster.helpers import LocalChannel, fleet
from tests.serve.running import Running, events, load_tiny, running

SOUND = wav(noise(1.4, seed=14))  # two windows
FILES = {"file": ("speech.wav", SOUND)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    saved(folder := tmp_path_factory.mktemp("whisper"), max_target_positions=128)
    return folder


@pytest.fixture(scope="module")
def model(folder: Path) -> lmstate.Model:
    return lmstate.load(folder, weights="float32")


Served = tuple[Cluster, list[LocalChannel], Running]


@pytest.fixture
def served(model: lmstate.Model, folder: Path) -> Iterator[Served]:
    files = FrontFiles(model.tokenizer, folder)
    with (
        fleet(*(Engine(model, rows=4) for _ in "ab"), files=files) as (cluster, channels),
        running(cluster.front, Settings("whisper", port=0)) as server,
    ):
        yield cluster, channels, server


def test_a_transcript_is_that_of_the_model_whatever_happens_to_replicas(served: Served, model: lmstate.Model) -> None:
    cluster, channels, server = served
    expected = model.transcribe(SOUND, times=True, silence=True)

    def check() -> None:
        with server.client() as client:
            path = "/v1/audio/transcriptions"
            made = client.post(path, data={"response_format": "verbose_json"}, files=FILES).json()
            assert made["text"] == expected.text
            for got, own in zip(made["segments"], expected.segments, strict=True):
                assert (got["tokens"], got["start"], got["end"]) == (list(own.tokens), own.start, own.end)
                assert got["no_speech_prob"] == pytest.approx(own.no_speech_prob, rel=1e-4)
            assert client.post(path, data={"response_format": "srt"}, files=FILES).text == as_srt(expected.segments)
            streamed = events(client.post(path, data={"stream": "true"}, files=FILES).text)
            assert streamed[-1][1]["text"] == expected.text
            translated = client.post("/v1/audio/translations", files=FILES).json()["text"]
            assert translated == model.transcribe(SOUND, task="translate").text

    check()
    assert cluster.front.moved == 0
    home = next(channel for channel in channels if channel.taken)
    home.dies_after = 2
    check()
    assert cluster.front.moved > 0 and home.dead


def test_all_questions_about_a_window_go_to_one_replica(served: Served) -> None:
    _, channels, server = served
    with server.client() as client:
        short = {"file": ("speech.wav", wav(noise(0.7, seed=7)))}
        for form in ({}, {"language": "de"}, {"response_format": "verbose_json"}):
            assert client.post("/v1/audio/transcriptions", data=form, files=short).status_code == 200
    one, other = (channel.sounds for channel in channels)
    assert max((one + other).values()) > 2 and not one.keys() & other.keys(), "the encoding of a window is in one place"


def test_what_cannot_be_transcribed_is_refused(served: Served, tmp_path: Path) -> None:
    with served[2].client() as client:
        refused = client.post("/v1/audio/transcriptions", data={"language": "xx"}, files=FILES)
        assert refused.status_code == 400 and "knows de, en, fr" in json.loads(refused.text)["error"]["message"]
        form = {"response_format": "verbose_json", "timestamp_granularities[]": "word"}
        refused = client.post("/v1/audio/transcriptions", data=form, files=FILES)
        assert refused.status_code == 400 and "ask for segments" in refused.text
    tiny = load_tiny(tmp_path)
    with (
        fleet(Engine(tiny), files=FrontFiles(tiny.tokenizer, tmp_path)) as (cluster, _),
        running(cluster.front, Settings("tiny", port=0)) as server,
        server.client() as client,
    ):
        refused = client.post("/v1/audio/transcriptions", files=FILES)
        assert refused.status_code == 400 and "reads no sounds" in refused.json()["error"]["message"]
