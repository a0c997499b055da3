"""`python -m bench.engine`: many clients on one model, and agents' traffic, through the engine.

Beside plain `generate` for one client, and beside `llama-server` where `--llama-server` names one that runs with the
same model (`llama-server -m model.gguf -np 8 --port 8080`).
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter

import lmstate
from bench.traces import TRACES, Turn, trace
from lmstate.engine.prefix.tree import shared

CLIENTS = (1, 4, 8, 16)
PROMPTS = (16, 64, 200, 500)  # tokens
ANSWER = 64


@dataclass(frozen=True)
class Served:
    """What some clients got, in seconds but for `tokens_per_second`."""

    clients: int
    tokens_per_second: float
    first_median: float
    first_p99: float
    gap_median: float
    gap_p99: float


def words(count: int, vocab: int, dice: random.Random) -> list[int]:
    return [dice.randrange(10, vocab) for _ in range(count)]


def timed(pieces: Iterable[object]) -> tuple[float, list[float]]:
    """(seconds to the first piece, seconds between pieces)."""
    begin = perf_counter()
    times = [perf_counter() for _ in pieces]
    return times[0] - begin, [after - before for before, after in pairwise(times)]


def summary(clients: int, seconds: float, answers: Sequence[tuple[float, list[float]]]) -> Served:
    firsts = sorted(first for first, _ in answers)
    gaps = sorted(gap for _, gaps in answers for gap in gaps)
    tokens = sum(len(gaps) + 1 for _, gaps in answers)
    high = quantiles(gaps, n=100)[-1]
    return Served(clients, tokens / seconds, median(firsts), firsts[int(0.99 * (len(firsts) - 1))], median(gaps), high)


def serve(model: lmstate.Model, clients: int, requests: int) -> Served:
    """`clients` that send one request after the other, `requests` in all."""
    dice = random.Random(clients)
    prompts = [words(PROMPTS[i % len(PROMPTS)], model.config.vocab_size, dice) for i in range(requests)]
    with lmstate.Engine(model, rows=16) as engine, ThreadPoolExecutor(clients) as pool:
        begin = perf_counter()
        answers = list(pool.map(lambda ids: timed(engine.submit(ids, max_new_tokens=ANSWER, ignore_eos=True)), prompts))
        return summary(clients, perf_counter() - begin, answers)


def serve_llama(url: str, vocab: int, clients: int, requests: int) -> Served:
    """The same of a llama-server, through its own streaming endpoint."""
    dice = random.Random(clients)
    prompts = [words(PROMPTS[i % len(PROMPTS)], vocab, dice) for i in range(requests)]

    def ask(ids: list[int]) -> tuple[float, list[float]]:
        body = {"prompt": ids, "n_predict": ANSWER, "ignore_eos": True, "temperature": 0, "stream": True}
        request = urllib.request.Request(
            f"{url}/completion", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request) as answer:
            return timed(line for line in answer if line.startswith(b"data:"))

    with ThreadPoolExecutor(clients) as pool:
        begin = perf_counter()
        answers = list(pool.map(ask, prompts))
        return summary(clients, perf_counter() - begin, answers)


def overhead(model: lmstate.Model, rounds: int) -> float:
    """Seconds of one client through the engine over those of plain `generate`, alternating; 1.0 is none."""
    ids = words(64, model.config.vocab_size, random.Random(0))
    ratios = []
    for number in range(rounds):
        ids[0] = 10 + number  # nothing is to be reused
        begin = perf_counter()
        model.generate(ids, max_new_tokens=256)
        plain = perf_counter() - begin
        with lmstate.Engine(model) as engine:
            begin = perf_counter()
            engine.submit(ids, max_new_tokens=256).result()
            ratios.append((perf_counter() - begin) / plain)
    return median(ratios)


@dataclass(frozen=True)
class Traced:
    """A trace at one budget. `computed / new` is 1.0 where nothing is computed twice.

    `held`: bytes of the prefix store at the end; `rows`: the most that rows took beside it.
    """

    trace: str
    memory: int
    held: int
    rows: int
    prompt_tokens: int
    new: int
    computed: int
    seconds: float


def run_trace(model: lmstate.Model, name: str, memory: int | str) -> Traced:
    dice = random.Random(name)
    histories: dict[str, list[int]] = {}
    known: list[list[int]] = []  # what was computed by anybody: prompts, and answers but for their last token
    new = 0
    with lmstate.Engine(model, rows=8, memory=memory) as engine:
        begin = perf_counter()
        turns = trace(name)
        for wave in sorted({turn.wave for turn in turns}):
            asked: list[tuple[Turn, list[int], lmstate.engine.Request]] = []
            for turn in [turn for turn in turns if turn.wave == wave]:
                if any(other.save == turn.base for other, _, _ in asked):
                    new += finish(asked, histories, known)
                base = histories[turn.base] if turn.base else []
                ids = [*base[: round(turn.keep * len(base))], *words(turn.new, model.config.vocab_size, dice)]
                asked.append((turn, ids, engine.submit(ids, max_new_tokens=turn.answer, ignore_eos=True)))
            new += finish(asked, histories, known)
        seconds = perf_counter() - begin
        stats = engine.stats()
    return Traced(
        trace=name,
        memory=engine._reuse.memory,
        held=int(stats["prefix_bytes"]),
        rows=int(stats["row_bytes_peak"]),
        prompt_tokens=int(stats["prompt_tokens"]),
        new=new,
        computed=int(stats["computed_tokens"]),
        seconds=seconds,
    )


def finish(
    asked: list[tuple[Turn, list[int], lmstate.engine.Request]], histories: dict[str, list[int]], known: list[list[int]]
) -> int:
    """Wait for requests; how many tokens of their prompts nobody had computed."""
    new = 0
    for turn, ids, request in asked:
        got = request.result()
        new += len(ids) - min(max((shared(text, ids) for text in known), default=0), len(ids) - 1)
        whole = [*ids, *got.tokens[0]]
        known.append(whole[:-1])
        if turn.save is not None:
            histories[turn.save] = whole
    asked.clear()
    return new


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="what lmstate.load takes")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--requests", type=int, default=32, help="of each number of clients")
    parser.add_argument("--llama-server", help="URL of a llama-server with the same model")
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()

    model = lmstate.load(options.model)
    model.generate("warm up", max_new_tokens=8)
    print(f"one client, seconds over plain generate: {overhead(model, options.rounds):.3f}\n")
    result: dict[str, list[dict[str, object]]] = {"lmstate": [], "llama-server": [], "traces": []}
    for clients in CLIENTS:
        rows = {"lmstate": serve(model, clients, options.requests)}
        if options.llama_server:
            rows["llama-server"] = serve_llama(options.llama_server, model.config.vocab_size, clients, options.requests)
        for name, row in rows.items():
            print(f"{name:12} {row}")
            result[name].append(asdict(row))
    for name in TRACES:
        whole = run_trace(model, name, "64GiB")
        for part in (1, 2, 4, 8):
            run = whole if part == 1 else run_trace(model, name, whole.rows + whole.held // part)
            print(f"{name} at 1/{part} of the memory: computed / new {run.computed / run.new:.3f}, {run.seconds:.1f} s")
            result["traces"].append(asdict(run))
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "engine.json").write_text(json.dumps(result, indent=2))
    draw(result, options.out / "engine.png")


def draw(result: dict[str, list[dict[str, object]]], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    figure, axes = plt.subplots(figsize=(6, 4))
    for name in ("lmstate", "llama-server"):
        if rows := result[name]:
            axes.plot([row["clients"] for row in rows], [row["tokens_per_second"] for row in rows], "o-", label=name)
    axes.set_xlabel("clients")
    axes.set_ylabel("tokens a second, all clients")
    axes.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
