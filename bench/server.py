"""Throughput and latencies of a server over HTTP, at several numbers of clients.

    python -m bench.server                                    lmstate's server with SmolLM2, and its engine without HTTP
    python -m bench.server --url http://127.0.0.1:9090/v1     another server that speaks OpenAI's protocol, beside it

Each client streams chat completions one after the other. Printed are tokens a second of all clients together, the
median and the worst time to the first token, and between tokens. Rounds of the servers alternate, so that whatever else
the machine does meets all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from statistics import median
from threading import Thread
from time import perf_counter, sleep
from typing import Any

import httpx

CLIENTS = (1, 4, 8, 16)
TOKENS = 64
TOPICS = ("rivers", "bread", "comets", "bridges", "owls", "salt", "kites", "glass")

Ask = Callable[[list[dict[str, str]], int], AsyncIterator[int]]  # yields how many tokens came at once


@dataclass
class Times:
    """Of one round: seconds, and tokens."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)

    def line(self, name: str, clients: int) -> str:
        def both(values: list[float]) -> str:
            return f"{median(values) * 1000:8.1f} {max(values) * 1000:8.1f}" if values else f"{'-':>8} {'-':>8}"

        rate = self.tokens / self.seconds
        return f"{name:<12} {clients:>7} {rate:>9.1f} {both(self.first)} {both(self.between)}"


def messages(number: int) -> list[dict[str, str]]:
    """A conversation that differs from the others at its end."""
    topic = TOPICS[number % len(TOPICS)]
    return [
        {"role": "system", "content": "You are a patient teacher who answers in plain words. " * 8},
        {"role": "user", "content": f"Question {number}: tell me something about {topic}."},
    ]


async def measure(ask: Ask, clients: int, each: int) -> Times:
    """One round: every client asks `each` times, one after the other."""
    times = Times()

    async def client(number: int) -> None:
        for turn in range(each):
            last = begin = perf_counter()
            async for count in ask(messages(number * each + turn), TOKENS):
                now = perf_counter()
                (times.first if last == begin else times.between).append(now - last)
                times.tokens += count
                last = now

    begin = perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    times.seconds = perf_counter() - begin
    return times


def over_http(url: str, model: str) -> Ask:
    async def ask(conversation: list[dict[str, str]], tokens: int) -> AsyncIterator[int]:
        body: dict[str, Any] = {"model": model, "messages": conversation, "max_tokens": tokens, "stream": True}
        body |= {"temperature": 0, "ignore_eos": True}
        async with (
            httpx.AsyncClient(timeout=None) as client,
            client.stream("POST", f"{url}/chat/completions", json=body) as answer,
        ):
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    choices = json.loads(line[6:])["choices"]
                    if choices and choices[0]["delta"].get("content"):
                        yield 1

    return ask


def in_process(engine: Any) -> Ask:
    async def ask(conversation: list[dict[str, str]], tokens: int) -> AsyncIterator[int]:
        async for piece in engine.submit(conversation, max_new_tokens=tokens, ignore_eos=True):
            if piece.text:
                yield 1

    return ask


@contextmanager
def served(engine: Any, model: str) -> Any:
    """lmstate's server in a thread; gives its URL."""
    from lmstate.serve import Settings, make_server

    server = make_server(engine, Settings(model, port=0), close_engine=False)
    thread = Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.port}/v1"
    finally:
        server.should_exit = True
        thread.join()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--url", action="append", default=[], help="another server; repeatable")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--each", type=int, default=2, help="requests of a client in a round")
    options = parser.parse_args()

    import lmstate
    from lmstate.engine import Engine

    with ExitStack() as stack:
        model = lmstate.load(options.model)
        # Two engines: what one keeps is not to be found by the other.
        plain, behind = (stack.enter_context(Engine(model, rows=max(CLIENTS))) for _ in range(2))
        own = stack.enter_context(served(behind, options.model))
        asked: dict[str, Ask] = {"engine": in_process(plain), "server": over_http(own, options.model)}
        asked |= {url: over_http(url, options.model) for url in options.url}
        print(f"{'':<12} {'clients':>7} {'tokens/s':>9} {'first ms':>8} {'worst':>8} {'next ms':>8} {'worst':>8}")
        for clients in CLIENTS:
            whole = {name: Times() for name in asked}
            for _ in range(options.rounds):
                for name, ask in asked.items():
                    times = asyncio.run(measure(ask, clients, options.each))
                    whole[name].seconds += times.seconds
                    whole[name].tokens += times.tokens
                    whole[name].first += times.first
                    whole[name].between += times.between
            for name, times in whole.items():
                print(times.line(name, clients))


if __name__ == "__main__":
    main()
