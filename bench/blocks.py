"""Cost of rows, forks and snapshots that share blocks: `python -m bench.blocks [--threads N] [--tokens N]`.

On SmolLM2's real weights: milliseconds of a fork, a snapshot, a restore, a mark and a row that joins and leaves, and
the bytes that each adds; the first steps after a fork; and one long row beside seven short ones.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable

import torch

import lmstate
from bench.moves import seconds

FEW = 100


def text(count: int, seed: int = 0) -> list[int]:
    return [3 + (7919 * (i + seed)) % 40000 for i in range(count)]


def moves(model: lmstate.Model, tokens: int) -> float:
    """Print a table; bytes of a token."""
    pool = lmstate.BlockPool()
    state, other = model.new_state(pool=pool), model.new_state(pool=pool)
    model([text(tokens)], state, logits="none")
    alone, snapshot = pool.nbytes, state.snapshot(0)
    print(f"{tokens:,} tokens, {alone / 2**20:,.1f} MiB of keys and values")
    print("| operation | milliseconds | bytes added |\n|---|---|---|")
    operations: dict[str, Callable[[], object]] = {
        "snapshot": lambda: state.snapshot(0),
        "fork": lambda: state.select([0, 0]),
        "mark": lambda: state.mark(0),
        "restore": lambda: other.restore(0, snapshot),
        "add and remove": lambda: other.remove(other.add(snapshot)),
    }
    for name, run in operations.items():
        print(f"| {name} | {1e3 * seconds(run):.3f} | {(pool.nbytes - alone) / alone:.2%} |")
    forked = 1e3 * seconds(lambda: model([[5], [6]], state), before=lambda: state.select([0, 0]))
    print(f"| first step after a fork | {forked:.2f} | {(pool.nbytes - alone) / alone:.2%} |")
    print(f"| a step of two rows | {1e3 * seconds(lambda: model([[5], [6]], state)):.2f} | |")
    return alone / tokens


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--tokens", type=int, default=16_000)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = lmstate.load("smollm2")
    with torch.no_grad():
        each = moves(model, options.tokens)
        lengths = [options.tokens, *[FEW] * 7]
        ragged = model.new_state(8)
        model([text(length, row) for row, length in enumerate(lengths)], ragged, logits="none")
    held = sum(ragged.memory().values())
    print(
        f"{options.tokens:,} tokens beside seven rows of {FEW}: {held / 2**20:,.1f} MiB, "
        f"{held / (each * sum(lengths)):.3f} of what the lengths add up to"
    )


if __name__ == "__main__":
    main()
