"""Decode and prompts on one and on two threads: on a machine that does nothing else, beside a process that keeps one
processor busy, in another Python thread than one that has computed, and in two at once. `python -m bench.busy
[--weights KIND]`; Linux; tokens a second, mean of the turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from time import perf_counter

import torch

import lmstate

PROMPT = [3 + (7919 * i) % 40000 for i in range(512)]
SECONDS, WARM, TURNS = 1.0, 0.6, 2
SPIN = "import os, sys; os.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


@contextmanager
def spinning(processor: int) -> Iterator[None]:
    """A process that does nothing but keep this processor busy."""
    process = subprocess.Popen([sys.executable, "-c", SPIN, str(processor)])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def decode(model: lmstate.Model, seconds: float) -> float:
    state = model.new_state(1, capacity=4096)
    model([PROMPT[:128]], state)
    begin, tokens = perf_counter(), 0
    while perf_counter() - begin < seconds:
        model([[5]], state)
        tokens += 1
    return tokens / (perf_counter() - begin)


def prefill(model: lmstate.Model, seconds: float) -> float:
    begin, tokens = perf_counter(), 0
    while perf_counter() - begin < seconds:
        model([PROMPT], model.new_state(1, capacity=len(PROMPT)))
        tokens += len(PROMPT)
    return tokens / (perf_counter() - begin)


def elsewhere(model: lmstate.Model, seconds: float, count: int = 1) -> float:
    """Decode in so many Python threads of its own at once: the sum."""
    with ThreadPoolExecutor(count) as pool:
        return sum(pool.map(lambda _: decode(model, seconds), range(count)))


def turns(model: lmstate.Model, run: Callable[[lmstate.Model, float], float]) -> list[float]:
    """Of one and of two threads, by turns."""
    sums = [0.0, 0.0]
    for _ in range(TURNS):
        for index, threads in enumerate((1, 2)):
            torch.set_num_threads(threads)
            run(model, WARM)
            sums[index] += run(model, SECONDS) / TURNS
    return sums


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.busy", description=__doc__)
    parser.add_argument("--weights", default="int4")
    model = lmstate.load("smollm2", weights=parser.parse_args().weights)
    last = max(os.sched_getaffinity(0))
    print("| | 1 thread | 2 threads | ratio |\n|---|---|---|---|", flush=True)

    def show(name: str, run: Callable[[lmstate.Model, float], float]) -> None:
        one, two = turns(model, run)
        print(f"| {name} | {one:.0f} | {two:.0f} | {two / one:.2f} |", flush=True)

    for name, run in (("decode", decode), ("prompts of 512", prefill)):
        show(f"{name}, nothing else", run)
        with spinning(last):
            show(f"{name}, processor {last} busy", run)
    show("decode, in another Python thread", elsewhere)
    show("decode, in two at once", partial(elsewhere, count=2))


if __name__ == "__main__":
    main()
