"""Several models behind one server: each is loaded when it is asked for, makes room for others, and is found again."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

import lmstate
from lmstate.engine import Engine
from lmstate.engine.tiers import open_records
from lmstate.engine.tiers.fetch import PatientRecords
from lmstate.errors import ModelError
from lmstate.serve import Settings, make_server
from lmstate.serve.answer.pool import ModelPool, ModelSource
from lmstate.serve.run import Server
from lmstate.training import IA3Config, PrefixTuningConfig, PromptTuningConfig
from tests.serve.running import events, load_tiny, save_tiny, standing_still, started
from tests.waiting import GUARD, wait_until

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello"}], "max_tokens": 8, "temperature": 0}
LAYERS = {"one": 2, "two": 3}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    made = {name: tmp_path_factory.mktemp(name) for name in LAYERS}
    return {name: save_tiny(path, num_hidden_layers=LAYERS[name]) for name, path in made.items()}


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, str]:
    """The answer of each model alone."""
    texts = {}
    for name, folder in folders.items():
        with Engine(lmstate.load(folder, weights="float32"), rows=1) as engine:
            texts[name] = engine.submit(CHAT["messages"], max_new_tokens=8, temperature=0.0).result().texts[0]
    assert texts["one"] != texts["two"]
    return texts


def broken() -> Engine:
    raise ModelError("weights are missing")


@contextmanager
def serving(
    folders: dict[str, Path], store: Path, lasts: bool = True, **limits: Any
) -> Iterator[tuple[ModelPool, httpx.Client]]:
    def load(folder: Path) -> Engine:
        return Engine(lmstate.load(folder, weights="float32"), rows=2, memory=2**28, store=store)

    sources = [ModelSource(name, partial(load, folder), nbytes=1) for name, folder in folders.items()]
    settings = Settings("one", port=0, folder=store, folder_lasts=lasts, drain=0.1)
    sources.append(ModelSource("broken", broken))
    with closing(open_records(store)) as opened:
        pool = ModelPool(sources, settings, records=PatientRecords(opened) if lasts else None, **limits)
        with started(make_server(pool, settings)) as server, asking(server) as client:
            yield pool, client


def asking(server: Server) -> httpx.Client:
    return httpx.Client(base_url=f"http://127.0.0.1:{server.port}", timeout=GUARD)


def text_of(client: httpx.Client, model: str) -> str:
    answer = client.post("/v1/chat/completions", json={**CHAT, "model": model}).raise_for_status().json()
    assert answer["model"] == model
    return answer["choices"][0]["message"]["content"]  # type: ignore[no-any-return]


def statuses(client: httpx.Client) -> dict[str, str]:
    return {card["id"]: card["status"]["value"] for card in client.get("/v1/models").json()["data"]}


def test_a_model_is_loaded_when_asked_for_and_makes_room(
    folders: dict[str, Path], expected: dict[str, str], tmp_path: Path
) -> None:
    with serving(folders, tmp_path, max_loaded=1) as (pool, client):
        assert statuses(client) == {"one": "unloaded", "two": "unloaded", "broken": "unloaded"}
        assert client.get("/health").json() == {"status": "ok"} and client.get("/api/ps").json() == {"models": []}
        assert client.post("/v1/chat/completions", json={**CHAT, "model": "three"}).status_code == 404
        told = client.post("/v1/chat/completions", json={**CHAT, "model": "two", "stream": True})
        assert told.status_code == 200 and told.text.startswith(": loading two 0s\n\n")
        parts = [part for _, part in events(told.text)]
        assert parts[-1] == "[DONE]"
        text = "".join(part["choices"][0]["delta"].get("content") or "" for part in parts[:-1] if part["choices"])
        assert text == expected["two"]
        assert statuses(client) == {"one": "unloaded", "two": "loaded", "broken": "unloaded"}

        # A session of a model that was unloaded meanwhile goes on where it stood.
        sent = {"text": "a river", "max_tokens": 4, "temperature": 0, "model": "two"}
        client.post("/v1/sessions?model=two", json={"name": "plan"}).raise_for_status()
        client.post("/v1/sessions/plan/send", json=sent).raise_for_status()
        before = client.get("/v1/sessions/plan?model=two").json()
        said = {"input": "a river", "max_output_tokens": 4, "temperature": 0, "model": "two"}
        response = client.post("/v1/responses", json=said).raise_for_status().json()
        unloaded = weakref.ref(next(pool.loaded).model)
        assert text_of(client, "one") == expected["one"]
        assert statuses(client) == {"one": "loaded", "two": "unloaded", "broken": "unloaded"}
        assert unloaded() is None
        assert client.get("/v1/sessions/plan").status_code == 404  # the first model has none of this name
        assert client.get("/v1/sessions/plan?model=two").json() == before
        usage = client.post("/v1/sessions/plan/send", json=sent).raise_for_status().json()["usage"]
        assert usage["reused_tokens"] >= before["length"] - 1
        said["previous_response_id"] = response["id"]
        cached = client.post("/v1/responses", json=said).raise_for_status().json()["usage"]["input_tokens_details"]
        assert cached["cached_tokens"] >= response["usage"]["total_tokens"] - 1
        assert 'lmstate:request_success_total{finished_reason="length",model_name="two"}' in client.get("/metrics").text


def test_what_is_at_work_is_not_unloaded(folders: dict[str, Path], expected: dict[str, str], tmp_path: Path) -> None:
    with serving(folders, tmp_path, max_loaded=1) as (pool, client):
        text_of(client, "one")
        service = next(pool.loaded)
        long = {**CHAT, "model": "one", "max_tokens": 64, "ignore_eos": True, "stream": True}
        with standing_still(service.engine, 16), client.stream("POST", "/v1/chat/completions", json=long) as stream:
            wait_until(lambda: any(request.generated for request in service.running))
            with client.stream("POST", "/v1/chat/completions", json={**CHAT, "model": "two", "stream": True}) as other:
                lines = other.iter_lines()
                while next(lines) != ": loading two 1s":
                    assert statuses(client)["two"] == "loading"
                assert next(pool.loaded) is service
                stream.close()
                assert sum(line.startswith("data:") for line in lines) > 1
        assert next(pool.loaded).settings.model_name == "two"
        assert text_of(client, "one") == expected["one"]


def test_a_model_that_cannot_be_loaded_fails_alone(
    folders: dict[str, Path], expected: dict[str, str], tmp_path: Path
) -> None:
    with serving(folders, tmp_path) as (_, client):
        failed = client.post("/v1/chat/completions", json={**CHAT, "model": "broken"})
        assert failed.status_code == 500 and failed.json()["error"]["code"] == "model_not_loaded"
        body = {**CHAT, "model": "broken", "stream": True}
        for path in ("/v1/chat/completions", "/v1/messages"):
            *_, (name, told) = events(client.post(path, json=body).text)
            assert name == ("error" if path == "/v1/messages" else "")
            assert "'broken' cannot be loaded" in told["error"]["message"]
        assert {name: text_of(client, name) for name in folders} == expected
        assert set(statuses(client).values()) == {"loaded", "unloaded"}


def test_a_model_that_rests_is_unloaded(folders: dict[str, Path], expected: dict[str, str], tmp_path: Path) -> None:
    with serving(folders, tmp_path, lasts=False, unload_after=0.2) as (pool, client):
        assert client.get("/page/about?model=two").json()["kept"] is False  # of a folder that ends with the server
        client.post("/v1/sessions?model=two", json={"name": "plan"}).raise_for_status()
        assert client.post("/v1/sessions/plan/save?model=two").status_code == 409
        assert text_of(client, "two") == expected["two"]
        wait_until(lambda: not list(pool.loaded))
        shown = client.post("/api/show", json={"model": "two"}).raise_for_status().json()
        assert shown["capabilities"] == ["completion"] and not list(pool.loaded)
        assert text_of(client, "two") == expected["two"]


def test_adapters_answer_by_their_names_and_share_no_prefix(tmp_path: Path) -> None:
    model = load_tiny(tmp_path / "base")
    adapters = {}
    kinds: dict[str, Any] = {
        "red": "lora", "blue": "lora", "factors": IA3Config(), "prompt": PromptTuningConfig(6),
        "prefix": PrefixTuningConfig(6),
    }  # fmt: skip
    for seed, (name, kind) in enumerate(kinds.items()):
        trained: Any = lmstate.load(tmp_path / "base", weights="float32", trainable=kind)
        torch.manual_seed(seed)
        for parameter in trained.parameters():
            parameter.data.normal_(std=0.3 if kind == "lora" else 1.0)
        trained.save_pretrained(tmp_path / name)
        adapters[name] = tmp_path / name
    shared: Any = lmstate.load(tmp_path / "base", weights="float32", adapter=adapters)
    told = {"tiny": None, **{name: name for name in kinds}}
    prints = {shared.adapted(name).fingerprint for name in told.values()}
    assert len(prints) == 6, "prefixes of one adapter would be taken for those of another"
    prompt = model.tokenizer.chat(CHAT["messages"])
    texts = {name: shared.adapted(each).generate(prompt, max_new_tokens=8) for name, each in told.items()}
    sources = [ModelSource(name, lambda each=each: Engine(shared.adapted(each), rows=2)) for name, each in told.items()]
    settings = Settings("tiny", port=0, drain=0.1)
    with started(make_server(ModelPool(sources, settings), settings)) as server, asking(server) as client:
        for name, text in texts.items():
            answer = client.post("/v1/chat/completions", json={**CHAT, "model": name}).raise_for_status().json()
            assert answer["choices"][0]["message"]["content"] == text
            assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        assert len(set(texts.values())) == 6
    gc.collect()
