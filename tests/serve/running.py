"""A server in a thread of the test, on a free port of the loopback."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Event, Thread
from typing import Any

import httpx
import torch

import lmstate
from lmstate.engine import Engine
from lmstate.engine.serving import ServingEngine
from lmstate.serve import Settings, make_server
from lmstate.serve.answer.grammar import Grammars
from lmstate.serve.run import Server
from tests.serve.byte_tokenizer import END, TEMPLATE, save_tokenizer
from tests.waiting import GUARD, wait_until
from tests.zoo import auto, randomize
from tests.zoo.small import config

CONTEXT = 2048


def save_tiny(folder: Path, template: str = TEMPLATE, **changes: Any) -> Path:
    """The directory of a small random model that reads and writes bytes."""
    settings = {"vocab_size": 300, "max_position_embeddings": CONTEXT, "eos_token_id": 257, "bos_token_id": None}
    made = config("Qwen2Config", **{**settings, **changes})
    torch.manual_seed(0)
    theirs = auto(made).from_config(made, dtype=torch.float32)
    randomize(theirs)
    theirs.save_pretrained(folder)
    save_tokenizer(folder, template=template)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 257}))
    return folder


def load_tiny(folder: Path, **changes: Any) -> lmstate.Model:
    model = lmstate.load(str(save_tiny(folder, **changes)), weights="float32")
    assert model.tokenizer.id_of(END) == 257
    return model


@dataclass
class Running:
    server: Server
    engine: ServingEngine
    url: str

    def client(self, **changes: Any) -> httpx.Client:
        return httpx.Client(**{"base_url": self.url, "timeout": GUARD, **changes})


@contextmanager
def running(engine: ServingEngine, settings: Settings) -> Iterator[Running]:
    """Runs until the end of the block; the engine stays open."""
    with started(make_server(engine, settings, close_engine=False)) as server:
        yield Running(server, engine, f"http://127.0.0.1:{server.port}")


@contextmanager
def started(server: Server) -> Iterator[Server]:
    """Runs until the end of the block."""
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started or not thread.is_alive())
    assert server.started, "the server did not start"
    try:
        yield server
    finally:
        server.should_exit = True
        thread.join(GUARD)
        assert not thread.is_alive(), "the server did not end"


@contextmanager
def standing_still(engine: Engine, tokens: int = 100) -> Iterator[None]:
    """Have an engine without work make about so many tokens, and no more until a request is cancelled.

    Else a long answer may be over before a test on a crowded machine has come to leave or to stop it.
    """
    scheduler, work = engine._scheduler, engine._work
    decode, most, over = scheduler._compute, work.counts["generated_tokens"] + tokens, Event()

    def held() -> None:
        if work.counts["generated_tokens"] >= most:
            wait_until(lambda: over.is_set() or not (jobs := work.all()) or any(job.request.cancelled for job in jobs))
        decode()

    scheduler._compute = held  # type: ignore[method-assign]
    try:
        yield
    finally:
        over.set()
        del scheduler._compute


@contextmanager
def saying(server: Running, text: str) -> Iterator[None]:
    """Make every answer this text, as if the model said it by itself."""
    submit, model = server.engine.submit, server.engine.model
    grammars = Grammars(model.tokenizer, model.config.vocab_size)

    def forced(prompt: Any, **options: Any) -> Any:
        return submit(prompt, **{**options, "grammar": grammars.compile(f"start: {json.dumps(text)}", "said")})

    server.engine.submit = forced  # type: ignore[method-assign]
    try:
        yield
    finally:
        del server.engine.submit  # type: ignore[method-assign]


def events(text: str) -> list[tuple[str, Any]]:
    """(name, data) of server-sent events, comments left out."""
    found = []
    for block in text.strip().split("\n\n"):
        lines = [line for line in block.split("\n") if line and not line.startswith(":")]
        name = next((line[7:] for line in lines if line.startswith("event: ")), "")
        data = next((line[6:] for line in lines if line.startswith("data: ")), None)
        if data is not None:
            found.append((name, data if data == "[DONE]" else json.loads(data)))
    return found
