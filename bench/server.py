"""Throughput and latencies of a server over HTTP, at several numbers of clients.

    python -m bench.server                                    lmstate's server with SmolLM2, and its engine without HTTP
    python -m bench.server --llama-server PATH                llama-server on the same file, beside it
    python -m bench.server --url http://127.0.0.1:9090/v1     another server that speaks OpenAI's protocol, beside it
    python -m bench.server --trace agents                     a trace of `bench.traces`, played through each server
    python -m bench.server --plot server.png                  a figure of it

Servers are processes of their own. Each client streams chat completions one after the other. Printed are tokens a
second of all clients together, the median and the worst time to the first token and between tokens, and what HTTP
costs: the part of the engine's throughput that the server lacks, in the median of the rounds. Rounds alternate, so that
whatever else the machine does meets all of them alike.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import monotonic, perf_counter, sleep
from typing import Any
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

from bench.llama_server import LlamaServer
from bench.traces import TRACES

CLIENTS = (1, 4, 8, 16)
TOKENS, CONTEXT = 48, 2048  # of an answer, and of a slot of llama-server
TOPICS = ("rivers", "bread", "comets", "bridges", "owls", "salt", "kites", "glass")
START = 120.0  # seconds that a server may take to load its model
ENGINE, SERVER, LLAMA = "engine", "lmstate serve", "llama-server"

Ask = Callable[[list[dict[str, str]], int], AsyncIterator[int]]  # yields how many tokens came at once
Player = Callable[[list[int], int], Callable[[], list[int]]]


@dataclass
class Times:
    """Of rounds: seconds, tokens, and tokens a second of each round."""

    seconds: float = 0.0
    tokens: int = 0
    first: list[float] = field(default_factory=list)
    between: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)

    def add(self, other: Times) -> None:
        self.seconds += other.seconds
        self.tokens += other.tokens
        self.first += other.first
        self.between += other.between
        self.rates.append(other.tokens / other.seconds)

    def line(self, name: str, clients: int) -> str:
        def both(values: list[float]) -> str:
            return f"{median(values) * 1000:8.1f} {max(values) * 1000:8.1f}" if values else f"{'-':>8} {'-':>8}"

        return f"{name:<16} {clients:>7} {median(self.rates):>9.1f} {both(self.first)} {both(self.between)}"


def messages(number: int) -> list[dict[str, str]]:
    """A conversation that differs from the others at its end."""
    topic = TOPICS[number % len(TOPICS)]
    return [
        {"role": "system", "content": "You are a patient teacher who answers in plain words. " * 8},
        {"role": "user", "content": f"Question {number}: tell me something about {topic}."},
    ]


async def measure(ask: Ask, clients: int, each: int, begin_at: int) -> Times:
    """One round: every client asks `each` times, one after the other, from question `begin_at` on."""
    times = Times()

    async def client(number: int) -> None:
        for turn in range(each):
            last = begin = perf_counter()
            async for count in ask(messages(begin_at + number * each + turn), TOKENS):
                now = perf_counter()
                (times.first if last == begin else times.between).append(now - last)
                times.tokens += count
                last = now

    begin = perf_counter()
    await asyncio.gather(*(client(number) for number in range(clients)))
    times.seconds = perf_counter() - begin
    return times


def over_http(url: str, model: str) -> Ask:
    """Chat completions of a server."""

    def ask(conversation: list[dict[str, str]], tokens: int) -> AsyncIterator[int]:
        body = {"model": model, "messages": conversation, "max_tokens": tokens}
        return streamed(f"{url}/chat/completions", body, "content")

    return ask


async def streamed(url: str, body: dict[str, Any], key: str) -> AsyncIterator[int]:
    """Number of events that came at once with a text under `key`. Greedy, and past the end of the sequence.

    Plain sockets: a client's library would take more of the processor than a server does.
    """
    where = urlsplit(url)
    content = json.dumps({**body, "stream": True, "temperature": 0, "ignore_eos": True}).encode()
    head = (
        f"POST {where.path} HTTP/1.1\r\nHost: {where.netloc}\r\nConnection: close\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    )
    with_text, empty = (re.compile(rf'"{key}": ?"{end}'.encode()) for end in ("", '"'))
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    try:
        writer.write(head.encode() + content)
        if b" 200 " not in (status := await reader.readline()):
            raise RuntimeError(f"{url} answered {status.decode().strip()}: {(await reader.read(2000)).decode()}")
        rest = b""
        while piece := await reader.read(2**16):
            *lines, rest = (rest + piece).split(b"\n")
            if count := sum(bool(with_text.search(line)) and not empty.search(line) for line in lines):
                yield count
    finally:
        writer.close()


class Completions:
    """Completions of token ids, as a trace asks for them."""

    def __init__(self, url: str) -> None:
        self._url = f"{url}/completions"
        self._pool = ThreadPoolExecutor(max(CLIENTS))

    def ask(self, ids: list[int], count: int) -> Callable[[], list[int]]:
        """The answer's ids, once it is called."""

        def complete() -> list[int]:
            body = {"prompt": ids, "max_tokens": count, "ignore_eos": True, "temperature": 0, "return_token_ids": True}
            request = Request(self._url, json.dumps(body).encode(), {"Content-Type": "application/json"})
            with urlopen(request) as answer:
                tokens: list[int] = json.load(answer)["choices"][0]["token_ids"]
                return tokens

        return self._pool.submit(complete).result


def in_process(engine: Any) -> Ask:
    async def ask(conversation: list[dict[str, str]], tokens: int) -> AsyncIterator[int]:
        async for piece in engine.submit(conversation, max_new_tokens=tokens, ignore_eos=True):
            if piece.text:
                yield 1

    return ask


@contextmanager
def process(command: list[str], url: str, health: str, environment: Mapping[str, str] | None = None) -> Iterator[str]:
    """A server as a process, once it answers; gives its URL. By default in our environment and with our path."""
    environment = environment or {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    started = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        deadline = monotonic() + START
        while True:
            if started.poll() is not None or monotonic() > deadline:
                raise SystemExit(f"{command[0]} did not start: run {' '.join(command)!r} to see why")
            try:
                with urlopen(health, timeout=2) as answer:
                    if answer.status == 200:
                        break
            except OSError:
                sleep(0.1)
        yield url
    finally:
        started.terminate()
        started.wait(30)


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


@contextmanager
def served(model: str, threads: int | None, rows: int, draft: str, more: Sequence[str] = ()) -> Iterator[str]:
    """`lmstate serve`, with `more` arguments."""
    port = free_port()
    main = [sys.executable, "-c", "from lmstate.cli import main; main()"]
    command = [*main, "serve", model, "--port", str(port), "--rows", str(rows), "--alias", "*", "--draft", draft]
    command += [*([] if threads is None else ["--threads", str(threads)]), *more]
    with process(command, f"http://127.0.0.1:{port}/v1", f"http://127.0.0.1:{port}/health") as url:
        yield url


@contextmanager
def llama_served(program: str, file: Path, threads: int | None, slots: int) -> Iterator[str]:
    """llama-server with a slot for each client."""
    if file.suffix != ".gguf":
        raise SystemExit(f"llama-server reads .gguf files, and the model is {file}: name one with --model")
    port = free_port()
    command = [program, "-m", str(file), "--port", str(port), "-np", str(slots), "-c", str(slots * CONTEXT)]
    command += [] if threads is None else ["-t", str(threads)]
    with process(command, f"http://127.0.0.1:{port}/v1", f"http://127.0.0.1:{port}/health") as url:
        yield url


@contextmanager
def vllm_served(program: str, folder: Path, model: str, threads: int | None) -> Iterator[str]:
    """vLLM on the CPU, with the weights of `folder` in bfloat16 and 3 GiB of keys and values."""
    port = free_port()
    command = [program, "serve", str(folder), "--served-model-name", model, "--dtype", "bfloat16"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    count = threads or len(os.sched_getaffinity(0))
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(count),
        "VLLM_CPU_KVCACHE_SPACE": "3",
        "VLLM_CPU_OMP_THREADS_BIND": f"0-{count - 1}",
    }
    root = f"http://127.0.0.1:{port}"
    with process(command, f"{root}/v1", f"{root}/health", environment) as url:
        yield url


def plot(whole: dict[str, dict[int, Times]], path: Path) -> None:
    """Tokens a second, times to the first token and between tokens, by the number of clients."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(1, 3, figsize=(13, 4))
    shown: tuple[tuple[str, Callable[[Times], float]], ...] = (
        ("tokens a second, all clients", lambda times: median(times.rates)),
        ("median ms to the first token", lambda times: median(times.first) * 1000),
        ("median ms between tokens", lambda times: median(times.between) * 1000),
    )
    counts = sorted({clients for by_clients in whole.values() for clients in by_clients})
    for panel, (title, value) in zip(panels, shown):
        for name, by_clients in whole.items():
            panel.plot(list(by_clients), [value(times) for times in by_clients.values()], marker="o", label=name)
        panel.set(
            title=title,
            xlabel="clients",
            xscale="log",
            xticks=counts,
            xticklabels=counts,
            ylim=(0, None),
        )
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    panels[0].legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--llama-server", metavar="PATH", help="the program, to be run on the same file")
    parser.add_argument("--url", action="append", default=[], help="another server; repeatable")
    parser.add_argument("--threads", type=int, help="of each server; by default as many as it takes itself")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS, help="at a time; each number is measured")
    parser.add_argument("--draft", default="auto", help="as `lmstate serve --draft`; none shows what HTTP costs best")
    parser.add_argument("--trace", choices=list(TRACES), action="append", default=[], help="repeatable")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--each", type=int, default=1, help="requests of a client in a round")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="write a figure")
    options = parser.parse_args()

    import lmstate
    from bench.traces.run import play
    from lmstate.checkpoints.hub import resolve
    from lmstate.engine import Engine

    if options.threads is not None:
        lmstate.set_threads(options.threads)
    with ExitStack() as stack:
        rows = max(options.clients)
        draft = None if options.draft == "none" else options.draft
        engine = stack.enter_context(Engine(lmstate.load(options.model), rows=rows, draft=draft))
        asked: dict[str, Ask] = {ENGINE: in_process(engine)}
        url = stack.enter_context(served(options.model, options.threads, rows, options.draft))
        asked[SERVER] = over_http(url, options.model)
        players: dict[str, Player] = {SERVER: Completions(url).ask}
        if options.llama_server:
            file = Path(resolve(options.model))
            url = stack.enter_context(llama_served(options.llama_server, file, options.threads, rows))
            asked[LLAMA] = over_http(url, options.model)
            players[LLAMA] = LlamaServer(url.removesuffix("/v1")).ask
        asked |= {re.sub(r"^https?://", "", url): over_http(url, options.model) for url in options.url}
        whole: dict[str, dict[int, Times]] = {name: {} for name in asked}
        print(f"{'':<16} {'clients':>7} {'tokens/s':>9} {'first ms':>8} {'worst':>8} {'next ms':>8} {'worst':>8}")
        question = 0
        for ask in asked.values():  # the first answers of a process come later than the others
            asyncio.run(measure(ask, 2, 1, question))
        for clients in options.clients:
            for by_clients in whole.values():
                by_clients[clients] = Times()
            for turn in range(options.rounds):
                question += 1000
                names = list(asked) if turn % 2 else list(asked)[::-1]
                for name in names:
                    whole[name][clients].add(asyncio.run(measure(asked[name], clients, options.each, question)))
            for name, by_clients in whole.items():
                print(by_clients[clients].line(name, clients))
            pairs = zip(whole[ENGINE][clients].rates, whole[SERVER][clients].rates)
            print(f"HTTP costs {100 * (1 - median(server / plain for plain, server in pairs)):.1f} %")
        config, ends = engine.model.config, engine.model.eos_ids
        for trace in options.trace:
            for name, player in players.items():
                new, seconds = play(trace, config.vocab_size, min(ends, default=1), player)
                print(f"trace {trace}: {name} {seconds:.1f} s; {new} tokens of prompts were new")
        if options.plot:
            plot(whole, options.plot)


if __name__ == "__main__":
    main()
