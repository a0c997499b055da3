"""Tokens a second over 1, 2, 4, .. new tokens at once, for each weight kind: `python -m bench.curve [--most N]`.

Between the powers of two stand 48, 96 and 200, which are turns of a chat.

Speed must not fall as a step grows: after each kind stands the worst step, over the best of those before it. `--cpu`
counts processor time instead, for a machine that has other work; `--chunks N` feeds a prompt of N tokens in chunks of
each size instead of one chunk to an empty state. `--plot PATH` draws the curves (needs matplotlib).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from time import perf_counter, process_time

import torch

import lmstate

KINDS = ("int4", "int8", "bfloat16", "float32")
TURNS = (48, 96, 200)  # between the powers of two: the turns of a chat
LEAST = 0.3  # seconds that a size is measured for, at least


def rate(model: lmstate.Model, size: int, total: int, clock: Callable[[], float], rounds: int) -> float:
    """Tokens a second of `total` tokens in chunks of `size`: the best of some rounds."""
    ids, best = [3 + (7919 * i) % 40000 for i in range(total)], 0.0
    for _ in range(rounds):
        fed, spent = 0, 0.0
        while spent < LEAST:
            state = model.new_state(1, capacity=total)
            begin = clock()
            for at in range(0, total, size):
                model([ids[at : at + size]], state)
            spent += clock() - begin
            fed += total
        best = max(best, fed / spent)
    return best


def plot(sizes: Sequence[int], curves: Mapping[str, Sequence[float]], path: Path) -> None:
    """A curve for each weight kind: tokens a second over new tokens at once."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4), constrained_layout=True)
    for kind, rates in curves.items():
        axes.plot(sizes, rates, marker=".", label=kind)
    axes.set_xscale("log", base=2)
    axes.set_ylim(bottom=0)
    axes.set_xlabel("new tokens at once")
    axes.set_ylabel("tokens a second")
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.curve", description=__doc__)
    parser.add_argument("--most", type=int, default=4096, help="the largest number of new tokens")
    parser.add_argument("--weights", action="append", choices=KINDS, help="only this kind; may be repeated")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--chunks", type=int, default=0)
    parser.add_argument("--plot", type=Path, metavar="PATH")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    clock = process_time if options.cpu else perf_counter
    powers = {2**power for power in range(options.most.bit_length())}
    sizes = sorted(size for size in powers | set(TURNS) if size <= options.most)
    curves: dict[str, list[float]] = {}
    print("weights  ", *(f"{size:>7}" for size in sizes), "  worst", flush=True)
    for kind in options.weights or KINDS:
        model = lmstate.load("smollm2", weights=kind)
        rates = [rate(model, size, options.chunks or size, clock, options.rounds) for size in sizes]
        curves[kind] = rates
        worst = min(here / max(rates[: i + 1]) for i, here in enumerate(rates))
        print(f"{kind:9}", *(f"{each:7.0f}" for each in rates), f"{worst:7.2f}", flush=True)
    if options.plot is not None:
        plot(sizes, curves, options.plot)


if __name__ == "__main__":
    main()
