"""A server that was killed and started again on the same folder goes on where it was."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

import lmstate
from tests.serve.running import save_tiny
from tests.serve.test_behavior import command
from tests.training.test_adapters import adapted
from tests.waiting import wait_until


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("restarted"))


def ask(client: httpx.Client, path: str, **body: Any) -> dict[str, Any]:
    answer = client.post(path, json={"ignore_eos": True, **body})
    assert answer.status_code < 300, answer.text
    return answer.json()


def prefixes(store: Path) -> int:
    """The number of entries in a store's index."""
    (file,) = store.rglob("index.sqlite3")
    with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as index:
        (entries,) = index.execute("select count(*) from entries").fetchone()
    return entries


def test_responses_sessions_and_prefixes_survive_a_kill(directory: Path, tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    going_on = {"input": "And then?", "max_output_tokens": 6}
    with command(directory, "--store", store) as (process, url), httpx.Client(base_url=url, timeout=300) as client:
        first = ask(client, "/v1/responses", input="Once upon a time" * 20, max_output_tokens=6)
        kept = ask(client, "/v1/responses", **going_on, previous_response_id=first["id"])
        ask(client, "/v1/sessions", name="s")
        wait_until(lambda: prefixes(tmp_path / "store") > 2)  # they are written beside the work
        sent = ask(client, "/v1/sessions/s/send", text="Hello", max_tokens=6)
        process.kill()
    with command(directory, "--store", store) as (_, url), httpx.Client(base_url=url, timeout=300) as client:
        again = ask(client, "/v1/responses", **going_on, previous_response_id=first["id"])
        assert again["output"][0]["content"] == kept["output"][0]["content"]
        assert client.get(f"/v1/responses/{first['id']}").json()["output"] == first["output"]
        session = client.get("/v1/sessions/s").json()
        assert [session[told] for told in ("length", "generation")] == [sent[told] for told in ("length", "generation")]
        assert sent["stored"] is True
        assert again["usage"]["input_tokens"] == kept["usage"]["input_tokens"]
        assert again["usage"]["input_tokens_details"]["cached_tokens"] > 300


def test_an_adapter_small_keys_and_a_store_behind_a_url_are_options_of_the_program(
    directory: Path, tmp_path: Path
) -> None:
    pytest.importorskip("obstore")
    (tmp_path / "store").mkdir()
    adapter = tmp_path / "adapter"
    adapted(directory, adapter)
    model = lmstate.load(directory, weights="float32", adapter=adapter)
    prompt = {"prompt": "Once upon a time" * 20, "max_tokens": 6, "model": str(directory)}
    options = ("--weights", "float32", "--adapter", str(adapter), "--kv-bits", "8", "--stall", "20")
    options = (*options, "--store", (tmp_path / "store").as_uri())
    with command(directory, *options) as (process, url), httpx.Client(base_url=url, timeout=300) as client:
        first = ask(client, "/v1/completions", **prompt)
        process.terminate()
        process.wait(300)  # what is to be stored is written by then
    with lmstate.Engine(model, kv=lmstate.kv.Quantized(8)) as engine:
        alone = engine.submit(prompt["prompt"], max_new_tokens=6, ignore_eos=True).result()
    assert first["choices"][0]["text"] == alone.texts[0]
    with command(directory, *options) as (_, url), httpx.Client(base_url=url, timeout=300) as client:
        again = ask(client, "/v1/completions", **prompt)
    assert again["choices"] == first["choices"]
    assert again["usage"]["prompt_tokens_details"]["cached_tokens"] > 300
