"""A model on a GPU beside transformers on the same random weights, and the bars that are set for it.

    python -m bench.gpu [--shape 135M] [--rounds 3] [--only decode] [--out FILE.json]

Cases run by turns in one process, each run waited for; medians of the rounds, in tokens per second. transformers
decodes eagerly with a `DynamicCache`, compiled (`reduce-overhead`) with a `StaticCache`, and 32 requests at once by its
continuous batching. For vLLM serve a model with it, and use `python -m bench.load --url`.

The bandwidth of a copy and the rate of a bfloat16 product are measured in the same run. The share of the limit is, for
decoding, that of the bandwidth at which a step reads weights and state; for prompts, that of the rate of products.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from bench import gpu_runs as runs
from bench.limits import step_bytes
from bench.record import commit
from lmstate.models.describe import WeightTotals

WARM_UP = 3  # a graph is compiled, recorded, and replayed from the third time on
PEER, COMPILED = "transformers", "transformers compiled"


@dataclass(frozen=True)
class Sizes:
    """What is measured: lengths of prompts, (rows, length) of decoding, (clients, prompt, answer) of requests."""

    prompts: tuple[int, ...] = (512, 4096, 16000)
    decodes: tuple[tuple[int, int], ...] = ((1, 512), (8, 512), (32, 512), (1, 3500))
    requests: tuple[int, int, int] = (32, 256, 64)
    near: int = 512  # compiled steps are measured at this length


TINY = Sizes(prompts=(40,), decodes=((1, 24), (3, 24)), requests=(3, 20, 5), near=24)


@dataclass
class Case:
    """Tokens per second of each engine, and the share of the limit that each of ours reaches."""

    name: str
    rates: dict[str, float]
    shares: dict[str, float] = field(default_factory=dict)


def limits(device: str) -> dict[str, float]:
    """Bytes per second of a copy, read and written, and operations per second of a bfloat16 product."""
    small = device == "cpu"
    source = torch.empty(1 << (24 if small else 28), dtype=torch.uint8, device=device)
    into, side = torch.empty_like(source), 256 if small else 8192
    a, b = (torch.randn(side, side, device=device, dtype=torch.bfloat16) for _ in range(2))
    return {
        "copy": 2 * source.nbytes * _per_second(lambda: into.copy_(source), device),
        "product": 2 * side**3 * _per_second(lambda: a @ b, device),
    }


def _per_second(run: Callable[[], object], device: str, times: int = 10) -> float:
    def once() -> float:
        begun = perf_counter()
        for _ in range(times):
            run()
        wait(device)
        return times / (perf_counter() - begun)

    return max(once() for _ in range(4))


def wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def rates(made: dict[str, runs.Run], rounds: int, device: str) -> dict[str, float]:
    """Tokens per second, round by round, each in turn. A run that fails is reported and left out."""
    found: dict[str, list[float]] = {name: [] for name in made}
    for number in range(rounds + WARM_UP):
        for name in list(found):
            try:
                begun = perf_counter()
                count = made[name]()
                wait(device)
                if number >= WARM_UP:
                    found[name].append(count / (perf_counter() - begun))
            except Exception as error:  # of a peer's version, say
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
                del found[name]
    return {name: statistics.median(each) for name, each in found.items() if each}


def measured(
    shape: str, device: str, rounds: int, kinds: list[str], graphs: bool, only: str, sizes: Sizes
) -> Iterator[tuple[Case, dict[str, float]]]:
    """Each case, and the limits measured before the first one."""
    theirs, ours = runs.models(shape, device, kinds)
    limit = limits(device)

    def some(make: Any, peer: Any, *arguments: int, compiled: bool = False) -> dict[str, runs.Run]:
        made: dict[str, runs.Run] = {}
        makers = {COMPILED if compiled else PEER: lambda: peer(theirs, *arguments)}
        for kind, model in ours.items():
            if not (compiled and kind.startswith("int")):
                makers[f"lmstate {kind}"] = lambda model=model: make(model, *arguments)
        for name, maker in makers.items():
            try:
                made[name] = maker()
            except Exception as error:
                print(f"{name}: {type(error).__name__}: {str(error)[:300]}", flush=True)
        return made

    for length in sizes.prompts:
        if only in (name := f"prompt {length}"):
            case = Case(name, rates(some(runs.our_prompt, runs.their_prompt, length), rounds, device))
            for kind, model in ours.items():
                if rate := case.rates.get(f"lmstate {kind}"):
                    totals = WeightTotals.of(model.network)
                    case.shares[kind] = 2 * totals.parameters * rate / limit["product"]
            yield case, limit
    for rows, near in sizes.decodes:
        if only in (name := f"decode {rows} near {near}"):
            case = Case(name, rates(some(runs.our_decode, runs.their_decode, rows, near), rounds, device))
            for kind, model in ours.items():
                if rate := case.rates.get(f"lmstate {kind}"):
                    state = model.new_state(rows)
                    model([runs.ids(near, model.config.vocab_size)] * rows, state)
                    case.shares[kind] = step_bytes(model, state) * rate / rows / limit["copy"]
            yield case, limit
        if graphs and near == sizes.near and only in (name := f"graph {rows} near {near}"):
            made = some(runs.our_graph, runs.their_graph, rows, near, compiled=True)
            yield Case(name, rates(made, rounds, device)), limit
    if only in (name := f"{sizes.requests[0]} clients"):
        made = some(runs.our_engine, runs.their_batching, *sizes.requests)
        yield Case(name, rates(made, rounds, device)), limit


def bars(shape: str, cases: list[Case], prompts: tuple[int, ...]) -> list[tuple[str, float, float]]:
    """(what, its bar, what was reached) of those bars of a shape whose cases were measured."""
    rate = {(case.name, name): value for case in cases for name, value in case.rates.items()}
    share = {(case.name, kind): value for case in cases for kind, value in case.shares.items()}
    found: list[tuple[str, float, float]] = []

    def ratio(what: str, bar: float, over: tuple[str, str], under: tuple[str, str]) -> None:
        if over in rate and under in rate:
            found.append((what, bar, rate[over] / rate[under]))

    def reaches(what: str, bar: float, of: tuple[str, str]) -> None:
        if of in share:
            found.append((what, bar, share[of]))

    one, bf16, int4 = "decode 1 near 512", "lmstate bfloat16", "lmstate int4"
    if shape == "135M":
        ratio("decode over transformers compiled", 3.0, (one, bf16), ("graph 1 near 512", COMPILED))
        ratio("decode over transformers eager", 20.0, (one, bf16), (one, PEER))
    if shape in ("1.7B", "8B"):
        reaches("decode, share of the copy bandwidth", 0.65 if shape == "1.7B" else 0.75, (one, "bfloat16"))
        ratio("decode, int4 over bfloat16", 1.8 if shape == "1.7B" else 2.5, (one, int4), (one, bf16))
    if shape == "1.7B":
        ratio("8 rows over one", 6.0, ("decode 8 near 512", bf16), (one, bf16))
        ratio("32 rows over one", 18.0, ("decode 32 near 512", bf16), (one, bf16))
        ratio("32 clients over transformers", 1.5, ("32 clients", bf16), ("32 clients", PEER))
    if shape == "qwen3.5-0.8B":
        ratio("decode over transformers", 3.0, (one, bf16), (one, PEER))
        reaches("decode, share of the copy bandwidth", 0.45, (one, "bfloat16"))
    if shape in ("1.7B", "qwen3.5-0.8B"):
        for length in prompts:
            ratio(f"prompt of {length} over transformers", 1.0, (f"prompt {length}", bf16), (f"prompt {length}", PEER))
            if shape == "1.7B":
                reaches(f"prompt of {length}, share of the product rate", 0.55, (f"prompt {length}", "bfloat16"))
    return found


def markdown(shape: str, cases: list[Case], reached: list[tuple[str, float, float]]) -> str:
    names = list(dict.fromkeys(name for case in cases for name in case.rates))
    lines = [
        f"| {shape}, tokens/s | " + " | ".join(names) + " | share of the limit |",
        "|---|" + "---|" * (len(names) + 1),
    ]
    for case in cases:
        cells = [f"{case.rates[name]:.0f}" if name in case.rates else "" for name in names]
        shares = ", ".join(f"{kind} {value:.0%}" for kind, value in case.shares.items())
        lines.append(f"| {case.name} | " + " | ".join(cells) + f" | {shares} |")
    if reached:
        lines += ["", "| bar | at least | reached |", "|---|---|---|"]
        lines += [
            f"| {what} | {bar:g} | {value:.2f}{'' if value >= bar else ' (missed)'} |" for what, bar, value in reached
        ]
    return "\n".join(lines)


def main(arguments: list[str] | None = None) -> None:
    import transformers

    parser = argparse.ArgumentParser(
        prog="python -m bench.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--shape", choices=runs.SHAPES, default="135M")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--kinds", nargs="+", default=["bfloat16", "int4"])
    parser.add_argument("--no-graphs", action="store_true", help="leave the cases of torch.compile out")
    parser.add_argument("--only", default="", help="cases with this in their name")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write card, versions, limits and cases as JSON")
    options = parser.parse_args(arguments)
    sizes = TINY if options.shape == "tiny" else Sizes()
    card = torch.cuda.get_device_name() if options.device == "cuda" else options.device
    cases: list[Case] = []
    limit: dict[str, float] = {}
    for case, limit in measured(  # noqa: B007
        options.shape, options.device, options.rounds, options.kinds, not options.no_graphs, options.only, sizes
    ):
        cases.append(case)
        print(f"{options.shape} {case.name}: " + ", ".join(f"{k} {v:.0f}" for k, v in case.rates.items()), flush=True)
    reached = bars(options.shape, cases, sizes.prompts)
    told = ", ".join(f"{name} {value / 1e9:,.0f} G/s" for name, value in limit.items())
    print(f"\n{card}, torch {torch.__version__}, {told}\n\n{markdown(options.shape, cases, reached)}")
    if options.out:
        kept = {
            "card": card, "commit": commit(), "torch": torch.__version__, "transformers": transformers.__version__,
            "shape": options.shape, "limits": limit, "cases": [asdict(case) for case in cases],
            "bars": [{"what": what, "bar": bar, "reached": value} for what, bar, value in reached],
        }  # fmt: skip
        options.out.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
