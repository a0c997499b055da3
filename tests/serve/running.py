"""A server in a thread of the test, on a free port of the loopback."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import torch

import lmstate
from lmstate.engine import Engine
from lmstate.serve import Settings, make_server
from lmstate.serve.run import Server
from tests.serve.byte_tokenizer import END, TEMPLATE, save_tokenizer
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
    engine: Engine
    url: str

    def client(self, **changes: Any) -> httpx.Client:
        return httpx.Client(**{"base_url": self.url, "timeout": 60, **changes})


@contextmanager
def running(engine: Engine, settings: Settings) -> Iterator[Running]:
    """Runs until the end of the block; the engine stays open."""
    server = make_server(engine, settings, close_engine=False)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    deadline = time.monotonic() + 120
    while not server.started:
        assert thread.is_alive(), "the server did not start"
        assert time.monotonic() < deadline
        time.sleep(0.01)
    try:
        yield Running(server, engine, f"http://127.0.0.1:{server.port}")
    finally:
        server.should_exit = True
        thread.join(120)
        assert not thread.is_alive(), "the server did not end"


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


def wait_until(condition: Any, seconds: float = 120) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.01)
