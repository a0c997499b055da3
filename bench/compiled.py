"""A compiled step on tensors beside eager with native bodies, on the processor: SmolLM2, one row, one token a step.

Both run in one process, a few steps of one and then of the other, round after round; a ratio is that of a round's two
times, and a row gives the median and the range. `python -m bench.compiled [--threads N]`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

LENGTHS = (64, 1000)
KINDS = ("float32", "bfloat16")
ROUNDS, STEPS = 7, 8


@dataclass(frozen=True)
class Result:
    """Medians over the rounds, in seconds a token. `ratio`: how many times faster eager is than compiled."""

    weights: str
    length: int
    eager: float
    compiled: float
    ratio: float
    low: float
    high: float
    compile_seconds: float  # of the first step
    threads: int


def run(kinds: tuple[str, ...] = KINDS, lengths: tuple[int, ...] = LENGTHS, threads: int = 2) -> list[Result]:
    torch.set_num_threads(threads)
    return [result for kind in kinds for result in _measured(kind, lengths, threads)]


def _measured(kind: str, lengths: tuple[int, ...], threads: int) -> list[Result]:
    import lmstate

    model = lmstate.load("smollm2", weights=kind)
    step = torch.compile(model.decode_step, fullgraph=True, dynamic=False)
    capacity = max(lengths) + 64
    growing, static = model.new_state(1), model.new_state(1, capacity=capacity, static=True)
    token = torch.tensor([[5]])

    def eager() -> Tensor:
        return _logits(model(token, growing))

    def compiled() -> Tensor:
        logits = step(token, static)
        static.commit()
        return logits

    results = []
    for length in sorted(lengths):
        ids = [(7 * at + 11) % 1000 for at in range(length)]
        for state in (growing, static):
            state.rewind(0, 0)
            model([ids], state, logits="none")
        begun = time.perf_counter()
        first = compiled()
        compile_seconds = time.perf_counter() - begun
        assert (first - eager()).abs().max() < (1e-3 if kind == "float32" else 1.0), "the two do not agree"
        pairs = []
        for _ in range(ROUNDS):
            pairs.append((_seconds(eager), _seconds(compiled)))
            for state in (growing, static):
                state.rewind(0, length)
        ratios = [slow / fast for fast, slow in pairs]
        mine, other = (statistics.median(side) for side in zip(*pairs))
        ratio = statistics.median(ratios)
        results.append(
            Result(kind, length, mine, other, ratio, min(ratios), max(ratios), compile_seconds, threads)
        )  # fmt: skip
    return results


def _logits(given: Tensor | None) -> Tensor:
    assert given is not None
    return given


def _seconds(step: Callable[[], Tensor]) -> float:
    begun = time.perf_counter()
    for _ in range(STEPS):
        step()
    return (time.perf_counter() - begun) / STEPS


def markdown(results: list[Result]) -> str:
    lines = [
        "| weights | after tokens | eager, native bodies | compiled | eager is faster by | first compiled step |",
        "|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {r.weights} | {r.length} | {1e3 * r.eager:.1f} ms | {1e3 * r.compiled:.1f} ms | "
        f"{r.ratio:.2f}x ({r.low:.2f} to {r.high:.2f}) | {r.compile_seconds:.1f} s |"
        for r in results
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.compiled", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    print(markdown(run(threads=options.threads)))


if __name__ == "__main__":
    main()
