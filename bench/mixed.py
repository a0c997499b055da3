"""One forward over rows that decode and a chunk of a prompt, beside two forwards: `python -m bench.mixed`.

    python -m bench.mixed --weights bfloat16 --chunk 16 64 128 --rows 8

Both read the same tokens, by turns; the logits are those of the rows that decode. Milliseconds, the median of the
rounds, and how many times as long two forwards take.
"""

from __future__ import annotations

import argparse
import random
from statistics import median
from time import perf_counter

import torch

import lmstate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.mixed", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--chunk", type=int, nargs="+", default=[16, 64, 128], help="tokens of the prompt in a step")
    parser.add_argument("--context", type=int, default=250, help="tokens that each row has, no multiple of a block")
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    model = lmstate.load(options.model, weights=options.weights)
    dice = random.Random(0)
    print("| rows | chunk | two forwards, ms | of them decoding | one forward, ms | ratio |")
    print("|---|---|---|---|---|---|")
    for chunk in options.chunk:
        two, decoding, one = measured(model, options.rows, chunk, options.context, options.rounds, dice)
        times = [f"{1000 * seconds:.1f}" for seconds in (two, decoding, one)]
        print(f"| {options.rows} | {chunk} | {times[0]} | {times[1]} | {times[2]} | {two / one:.2f} |", flush=True)


@torch.no_grad()
def measured(
    model: lmstate.Model, rows: int, chunk: int, context: int, rounds: int, dice: random.Random
) -> tuple[float, float, float]:
    """Seconds of two forwards, of the first of them, and of one forward."""

    def tokens(count: int) -> list[int]:
        return [dice.randrange(model.config.vocab_size) for _ in range(count)]

    held = [tokens(context) for _ in range(rows + 1)]
    apart, alone, together = model.new_state(rows), model.new_state(), model.new_state(rows + 1)
    for state, texts in ((apart, held[:-1]), (alone, held[-1:]), (together, held)):
        model(texts, state, logits="none")
        for row in range(state.rows):
            state.mark(row)
    times: list[tuple[float, float, float]] = []
    for _ in range(rounds):
        decoded, read = [tokens(1) for _ in range(rows)], tokens(chunk)
        begin = perf_counter()
        model(decoded, apart)
        middle = perf_counter()
        model([read], alone, logits="none", rewindable=False)
        end = perf_counter()
        model([*decoded, read], together, logits=[1] * rows + [0], rewindable=[True] * rows + [False])
        times.append((end - begin, middle - begin, perf_counter() - end))
        for state in (apart, alone, together):
            for row in range(state.rows):
                state.rewind(row, context)
    two, first, one = (median(column) for column in zip(*times[rounds // 5 :]))
    return two, first, one


if __name__ == "__main__":
    main()
