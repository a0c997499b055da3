"""What the layout of weights costs and saves: the same numbers, held in two ways, step by step in turns.

`python -m bench.layouts [--threads N] [FOLDER]`: int4 mapped from the cache and in large pages, bfloat16 as a matrix
and in 12 bits, of SmolLM2; with the folder of a checkpoint, its bfloat16 alone.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from time import perf_counter
from unittest.mock import patch

import torch

import lmstate
from lmstate import Model
from lmstate.models.compiled import traceable

PROMPT, ROUNDS, STEPS = 512, 8, 8


def timed(run: Callable[[], object]) -> float:
    start = perf_counter()
    run()
    return perf_counter() - start


def compare(name: str, one: Model, other: Model, prefill: bool) -> None:
    """A row: medians of the first's and the second's milliseconds, and the median of a round's ratios."""
    ids = torch.randint(0, 1000, (1, PROMPT))
    states = [model.new_state() for model in (one, other)]
    for model, state in zip((one, other), states):
        model(ids, state)
    rounds: list[list[float]] = []
    for _ in range(ROUNDS):
        if prefill:
            rounds.append([timed(lambda m=model: m(ids, m.new_state())) for model in (one, other)])
        else:
            pairs = zip((one, other), states)
            rounds.append([min(timed(lambda m=m, s=s: m([[7]], s)) for _ in range(STEPS)) for m, s in pairs])
    first, second = (1e3 * statistics.median(times) for times in zip(*rounds))
    ratios = sorted(b / a for a, b in rounds)
    spread = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
    print(f"| {name} | {first:.2f} | {second:.2f} | {spread} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.layouts", description=__doc__)
    parser.add_argument("folder", nargs="?")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(f"{options.threads} threads\n\n| | ms | ms | the second over the first |\n|---|---|---|---|")
    if options.folder is None:
        with patch("lmstate.checkpoints.loader.spare", lambda: 0):
            mapped = lmstate.load("smollm2")
        compare("int4 mapped, in large pages: decode", mapped, lmstate.load("smollm2"), prefill=False)
    squeezed = lmstate.load(options.folder or "smollm2", weights="bfloat16")
    matrix = traceable(squeezed)
    compare("bfloat16 as a matrix, in 12 bits: decode", matrix, squeezed, prefill=False)
    compare(f"the same: prefill of {PROMPT}", matrix, squeezed, prefill=True)


if __name__ == "__main__":
    main()
