"""Whatever clients do to each other over HTTP, each answer is that of its request alone."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator
from threading import Thread

import httpx
import pytest

import lmstate
from lmstate.engine import Engine
from lmstate.serve import Settings
from tests.engine.alone import alone
from tests.serve.running import Running, running
from tests.waiting import wait_until


@pytest.fixture
def crowded(tiny_model: lmstate.Model) -> Iterator[Running]:
    """Few rows and little memory: requests wait, prefixes go."""
    with (
        Engine(tiny_model, rows=3, memory="1MiB", queue=64) as engine,
        running(engine, Settings("tiny", port=0)) as server,
    ):
        yield server


def test_random_clients_that_share_prefixes_and_leave_get_what_they_get_alone(
    crowded: Running, tiny_model: lmstate.Model
) -> None:
    shared = [random.Random(7).randrange(256) for _ in range(120)]
    failures: list[str] = []
    counted = 0

    def client(seed: int) -> None:
        nonlocal counted
        draw = random.Random(seed)
        with crowded.client() as http:
            for _ in range(6):
                prompt = [
                    *shared[: draw.randrange(1, 120)],
                    *(draw.randrange(256) for _ in range(draw.randrange(1, 9))),
                ]
                count = draw.randrange(1, 12)
                body = {"prompt": prompt, "max_tokens": count, "logprobs": 0, "temperature": 0, "ignore_eos": True}
                if draw.random() < 0.3:  # leaves in the middle
                    with (
                        contextlib.suppress(httpx.TimeoutException),
                        http.stream(
                            "POST", "/v1/completions", json={**body, "max_tokens": 500, "stream": True}, timeout=5
                        ) as answer,
                    ):
                        next(answer.iter_bytes())
                    continue
                told = http.post("/v1/completions", json=body).json()["choices"][0]
                tokens, logprobs, _ = alone(tiny_model, prompt, count, ends=frozenset())
                names = [crowded.server.service.grammars.token_bytes(token) for token in tokens]
                expected = [name.decode("utf-8", "ignore") for name in names]
                given = told["logprobs"]["tokens"]
                same = [one == other or one.startswith("bytes:") for one, other in zip(given, expected, strict=True)]
                close = [abs(one - other) < 1e-3 for one, other in zip(told["logprobs"]["token_logprobs"], logprobs)]
                counted += 1
                if not all(same) or not all(close):
                    failures.append(f"{prompt}: {given}, alone {expected}")

    threads = [Thread(target=client, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(600)
    assert not failures
    assert counted > 15
    wait_until(lambda: not crowded.server.service.running)
    wait_until(lambda: crowded.engine.stats()["decoding"] == 0)
