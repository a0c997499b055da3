"""Quality against bytes for every storage policy, `python -m bench.longcontext [--tokens N] [--budgets 512 1024]`.

The perplexity of SmolLM2 on the documentation that ships with Python, fed 256 tokens at a time. Prints a table; with
`--json PATH` and `--plot PATH` also writes it, and a picture of perplexity against the bytes of the state.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter

import torch

import lmstate
from lmstate import kv

TOPICS = ("types", "specialnames", "exceptions", "assert", "import", "function", "class")
STEP = 256


@dataclass(frozen=True)
class Result:
    name: str
    perplexity: float
    state_bytes: int  # of the attention layers, after the last token
    seconds: float


def text() -> str:
    """Some topics of Python's reference: prose and code, the same on every machine with this version of Python."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in TOPICS if name in topics)


def policies(budgets: list[int]) -> dict[str, kv.Policy]:
    table: dict[str, kv.Policy] = {"dense": kv.Dense(), "float32": kv.Dense(torch.float32)}
    table |= {f"quantized {bits}": kv.Quantized(bits) for bits in (8, 4)}
    for budget in budgets:
        one = {
            "recent": kv.Recent(budget=budget),
            "h2o": kv.H2O(budget=budget, recent=budget // 4),
            "h2o, quantized 8": kv.H2O(budget=budget, recent=budget // 4, storage=kv.Quantized(8)),
            "snapkv": kv.SnapKV(budget=budget),
            "expected": kv.ExpectedAttention(budget=budget),
        }
        table |= {f"{name}, {budget} tokens": policy for name, policy in one.items()}
    return table


def measure(model: lmstate.Model, name: str, policy: kv.Policy, ids: list[int]) -> Result:
    state = model.new_state(kv=policy)
    begin, loss = perf_counter(), 0.0
    for first in range(0, len(ids) - 1, STEP):
        logits = model([ids[first : first + STEP]], state, logits="all")
        assert logits is not None
        following = torch.tensor(ids[first + 1 : first + STEP + 1])[:, None]
        loss -= float(logits[0, : len(following)].log_softmax(-1).gather(1, following).sum())
    held = state.memory()["attention"]
    return Result(name, math.exp(loss / (len(ids) - 1)), held, perf_counter() - begin)


def plot(results: list[Result], path: str) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 5))
    for result in results:
        axes.scatter(result.state_bytes / 2**20, result.perplexity)
        axes.annotate(result.name, (result.state_bytes / 2**20, result.perplexity), fontsize=7)
    axes.set(xlabel="MiB of keys and values", ylabel="perplexity", xscale="log")
    figure.savefig(path, dpi=150, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.longcontext", description=__doc__)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--budgets", type=int, nargs="*", default=[1024])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--json")
    parser.add_argument("--plot")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = lmstate.load(options.model)
    ids = model.tokenizer.encode(text())[: options.tokens]
    results: list[Result] = []
    print(f"{len(ids)} tokens\n{'policy':36} perplexity   against dense     MiB   smaller  seconds")
    for name, policy in policies(options.budgets).items():
        result = measure(model, name, policy, ids)
        results.append(result)
        change, smaller = result.perplexity / results[0].perplexity - 1, results[0].state_bytes / result.state_bytes
        held = result.state_bytes / 2**20
        print(f"{name:36} {result.perplexity:10.3f} {change:+14.2%} {held:7.1f} {smaller:8.2f}x {result.seconds:8.1f}")
    if options.json:
        Path(options.json).write_text(json.dumps([asdict(result) for result in results], indent=1))
    if options.plot:
        plot(results, options.plot)


if __name__ == "__main__":
    main()
