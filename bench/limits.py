"""What decoding cannot be faster than: a step reads every weight and every stored key and value once.

`python -m bench.limits [ROUNDS]`: what one thread reads, and what all of torch's threads do, by turns.
"""

from __future__ import annotations

import sys
from time import perf_counter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lmstate import Model, State

READ = 1 << 29  # bytes: more than a cache holds


def bandwidth(threads: int) -> float:
    """Bytes a second that so many threads read now: the best of three sums."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    numbers, best = torch.ones(READ // 4), 0.0
    for _ in range(3):
        start = perf_counter()
        numbers.sum()
        best = max(best, READ / (perf_counter() - start))
    torch.set_num_threads(before)
    return best


def step_bytes(model: Model, state: State) -> int:
    """Bytes that a decode step of all rows reads at least: the weights, and what its tokens attend to."""
    from lmstate.models.reads import state_reads, weight_reads

    return weight_reads(model.network, state.rows) + state_reads(model.network, state.layers, state.lengths).total


def main(rounds: int) -> None:
    import torch

    threads = torch.get_num_threads()
    for _ in range(rounds):
        alone, together = bandwidth(1) / 1e9, bandwidth(threads) / 1e9
        print(
            f"one thread {alone:5.1f} GB/s   {threads} threads {together:5.1f} GB/s   {together / alone:4.2f}",
            flush=True,
        )


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
