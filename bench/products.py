"""Our products beside torch's of float32, by turns.

`python -m bench.products [--threads N] [--rows N ...] [--kinds int4 int8 bfloat16 float32]`.

GFLOP/s, the best of the rounds. Ours sum in one order at every number of rows; torch's does not.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from itertools import product
from time import perf_counter

import torch
from torch.nn import functional as F

from lmstate import ops

SHAPES = ((3072, 576), (960, 576), (576, 1536), (2048, 2048), (2048, 8192))  # outputs, inputs
ROUNDS, LEAST = 12, 0.05  # seconds that a round of one takes, at least


def speed(run: Callable[[], object], operations: int) -> float:
    """Operations a second of one round."""
    begin, times = perf_counter(), 0
    while perf_counter() - begin < LEAST:
        run()
        times += 1
    return operations * times / (perf_counter() - begin)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.products", description=__doc__)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 512])
    parser.add_argument("--kinds", nargs="+", default=["float32"], choices=("int4", "int8", "bfloat16", "float32"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| weights | rows | outputs x inputs | ours | torch's | ratio |\n|---|---|---|---|---|---|")
    for kind, rows in product(options.kinds, options.rows):
        for outputs, inputs in SHAPES:
            matrix, x = torch.randn(outputs, inputs), torch.randn(rows, inputs)
            weight, operations = ops.quantize(matrix, kind), 2 * rows * outputs * inputs
            ours = theirs = 0.0
            for _ in range(ROUNDS):
                ours = max(ours, speed(lambda: ops.linear(x, weight), operations))  # noqa: B023
                theirs = max(theirs, speed(lambda: F.linear(x, matrix), operations))  # noqa: B023
            speeds = f"{ours / 1e9:.0f} | {theirs / 1e9:.0f} | {ours / theirs:.2f}"
            print(f"| {kind} | {rows} | {outputs} x {inputs} | {speeds} |", flush=True)


if __name__ == "__main__":
    main()
