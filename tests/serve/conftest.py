"""Servers that the tests of a session share: a small random model, and SmolLM2; and a browser."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lmstate
from lmstate.engine import Engine
from lmstate.serve import Settings
from tests.real_model import smollm2
from tests.serve.running import Running, load_tiny, running

KEPT = 86_400  # seconds: no connection of a client that several tests share is closed while it asks


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> lmstate.Model:
    return load_tiny(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def tiny(tiny_model: lmstate.Model, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("store")
    settings = Settings("tiny", port=0, folder=folder, max_new_tokens=16, max_body=2**20, keep_alive=KEPT)
    with Engine(tiny_model, rows=4) as engine, running(engine, settings) as server:
        yield server


@pytest.fixture(scope="session")
def real() -> Iterator[Running]:
    path: Path = smollm2()
    settings = Settings("smollm2", port=0, keep_alive=KEPT)
    with Engine(lmstate.load(str(path)), rows=4) as engine, running(engine, settings) as server:
        yield server


@pytest.fixture(scope="module")  # playwright's event loop runs until its end, and no other can meanwhile
def browser() -> Iterator[Any]:
    from tests.serve.browser import chromium

    with chromium() as browser:
        yield browser
