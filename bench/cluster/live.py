"""`python -m bench.cluster.live`: replicas on a Ray of this machine: the cost of their front, and of a replica's death.

Counts and processor seconds hold on a busy machine; seconds and tokens per second need a quiet one.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any
from uuid import uuid4

from lmstate.cluster import Cluster, deploy
from lmstate.engine import Request

STILL = 4.0  # seconds without a write after which a store has all
SETTLED = 120.0  # seconds that a replaced replica may take
ANSWER: dict[str, Any] = {"ignore_eos": True, "temperature": 1.0, "seed": 3}
CLIENT = """
import json, sys
from concurrent.futures import ThreadPoolExecutor
import httpx
url, streams, tokens = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
def ask(number):
    body = {"prompt": f"{number} rivers", "max_tokens": tokens, "stream": True, "ignore_eos": True, "temperature": 0}
    with httpx.stream("POST", url + "/v1/completions", json=body, timeout=600) as answer:
        return sum(line.startswith("data: {") for line in answer.iter_lines())
with ThreadPoolExecutor(streams) as threads:
    print(sum(threads.map(ask, range(streams))))
"""


def whole(cluster: Cluster, replicas: int) -> None:
    """Wait until as many replicas take requests."""
    until = perf_counter() + SETTLED
    while sum(one.takes for one in cluster.status()) < replicas:
        if perf_counter() > until:
            raise TimeoutError(f"{replicas} replicas did not come within {SETTLED:.0f} seconds")
        sleep(0.1)


def written(cluster: Cluster) -> None:
    """Wait until the replicas write nothing more to the store: states follow the end of a turn."""
    before, count = -1.0, 0.0
    while before != count:
        sleep(STILL)
        before, count = count, cluster.front.stats()["shared_written"]


def kill_home(cluster: Cluster, session: str | None = None) -> None:
    """End the process that answers, or that a session was last at, as a crash does."""
    home = None if session is None else cluster.front.session_rank(session)
    while not (found := [one for one in cluster.status() if one.rank == home or (home is None and one.load.answering)]):
        sleep(0.01)
    os.kill(found[0].pid, signal.SIGKILL)


def first_token(request: Request) -> float:
    """Seconds until its first piece."""
    begin = perf_counter()
    next(iter(request))
    return perf_counter() - begin


def front_cost(cluster: Cluster, streams: int, tokens: int) -> float:
    """Processor seconds of this process for each token over HTTP; the client is another process."""
    assert cluster.url is not None
    command = [sys.executable, "-c", CLIENT, cluster.url, str(streams), str(tokens)]
    subprocess.run([*command[:-1], "8"], check=True, capture_output=True)
    begin = process_time()
    subprocess.run(command, check=True, capture_output=True)
    return (process_time() - begin) / (streams * tokens)


def pauses(cluster: Cluster, replicas: int, rounds: int) -> Iterator[float]:
    """Seconds from the death of a replica to the next token of its answer. Raises AssertionError for other tokens."""
    prompt = "Once there was a river that"
    expected = cluster.front.submit(prompt, max_new_tokens=400, **ANSWER).result(600).tokens
    for _ in range(rounds):
        whole(cluster, replicas)
        request = cluster.front.submit(prompt, max_new_tokens=400, **ANSWER)
        pieces = iter(request)
        for _ in range(30):
            next(pieces)
        kill_home(cluster)
        before, longest = perf_counter(), 0.0
        for _ in pieces:
            now = perf_counter()
            before, longest = now, max(longest, now - before)
        assert request.result().tokens == expected, "an answer went on otherwise"
        yield longest


def turns(cluster: Cluster, replicas: int, tokens: int, rounds: int) -> Iterator[tuple[float, float, float, int]]:
    """Seconds to the first token of a session's first turn, of its next one, and of one after its replica's death.

    The last number is of the tokens of that turn's prompt that were computed.
    """
    for number in range(rounds):
        whole(cluster, replicas)
        session = cluster.front.session(uuid4().hex)
        ids = [100 + (number * 7919 + at * 31) % 900 for at in range(tokens)]
        seconds = []
        for prompt in (ids, [101] * 16, [102] * 16):
            if len(seconds) == 2:
                kill_home(cluster, session.name)
            request = session.send(prompt, max_new_tokens=8, **ANSWER)
            seconds.append(first_token(request))
            usage = request.result(600).usage
            written(cluster)
        yield seconds[0], seconds[1], seconds[2], usage.prompt - usage.reused


def throughput(cluster: Cluster, streams: int, tokens: int) -> float:
    """Tokens per second of as many answers at a time."""

    def ask(number: int) -> int:
        return cluster.front.submit(f"{number} rivers", max_new_tokens=tokens, **ANSWER).result(600).usage.generated

    begin = perf_counter()
    with ThreadPoolExecutor(streams) as threads:
        return sum(threads.map(ask, range(streams))) / (perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster.live", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--replicas", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt of a session's first turn")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--streams", type=int, default=8)
    options = parser.parse_args()
    replicas, rounds = options.replicas, options.rounds
    with tempfile.TemporaryDirectory(prefix="lmstate-bench-") as folder:
        (store := Path(folder, "store")).mkdir()
        with deploy(options.model, replicas, f"file://{store}", port=0, rows=8, draft="none") as cluster:
            cost = front_cost(cluster, options.streams, 128)
            print(f"front, {options.streams} streams over HTTP: {1000 * cost:.2f} ms of processor time per token")
            speed = throughput(cluster, options.streams * replicas, 64)
            print(f"{replicas} replicas, {options.streams * replicas} answers: {speed:.1f} tokens/s")
            if replicas < 2:
                return
            seen = sorted(pauses(cluster, replicas, rounds))
            print(f"pause at a death, of {rounds}: median {statistics.median(seen):.3f} s, longest {seen[-1]:.3f} s")
            told = list(turns(cluster, replicas, options.tokens, rounds))
            first, after, died = (statistics.median(column) for column in list(zip(*told))[:3])
            computed = max(one[3] for one in told)
            print(
                f"first token of a turn, median of {rounds}: {first:.3f} s for {options.tokens} tokens, {after:.3f} s "
                f"for the next turn, {died:.3f} s for one after a death, with {computed} tokens to compute"
            )


if __name__ == "__main__":
    main()
