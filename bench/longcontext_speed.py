"""Decode steps over small states against dense ones, `python -m bench.longcontext --speed [--only WORD ...]`.

Two bars. At 8,000 tokens, steps over 8 and 4 bits cost no more than over bfloat16. At 16,000, steps over a budget
of 1,024 cost at most 1.15 times what dense ones cost at 1,024. The states of a bar take turns, 16 steps each, so that
what else the machine does falls on all of them; policies that evict many slots at a time do so in the time they pay
for: each takes 1,024 steps. Times are of the wall, means over all steps and medians over the turns.
"""

from __future__ import annotations

import sys
from statistics import median
from time import perf_counter

import torch

import lmstate
from lmstate import kv

TURN = 16
BF16 = kv.Dense(torch.bfloat16)

BARS: list[tuple[str, int, int, dict[str, tuple[kv.Policy, int]], float]] = [
    # what, steps of each, the first is compared with: (policy, tokens before)
    (
        "at 8,000 tokens, against bfloat16",
        256,
        0,
        {
            "bfloat16": (BF16, 8000),
            "quantized 8": (kv.Quantized(8), 8000),
            "quantized 4": (kv.Quantized(4), 8000),
        },
        1.0,
    ),
    (
        "a budget of 1,024 at 16,000 tokens, against bfloat16 at 1,024",
        1024,
        1024,
        {
            "bfloat16": (BF16, 1024),
            "recent": (kv.Recent(budget=1024), 16_000),
            "h2o": (kv.H2O(budget=1024), 16_000),
            "snapkv": (kv.SnapKV(budget=1024), 16_000),
            "expected": (kv.ExpectedAttention(budget=1024), 16_000),
        },
        1.15,
    ),
]


def run(model: lmstate.Model, only: list[str] | None) -> None:
    """Measure and print each bar, of the states whose names have a word of `only` in them."""
    for title, steps, back, states, bar in BARS:
        names = [name for name in states if name == "bfloat16" or not only or any(word in name for word in only)]
        made = {name: filled(model, *states[name]) for name in names}
        taken: dict[str, list[float]] = {name: [] for name in names}
        for first in range(0, steps, TURN):
            for name, state in made.items():
                begin = perf_counter()
                for i in range(TURN):
                    model([[token(first + i)]], state)
                taken[name].append((perf_counter() - begin) / TURN)
                if back and name == "bfloat16":
                    state.rewind(0, back)  # it stays where it is compared
            print(f"\r{first + TURN} of {steps} steps ", end="", file=sys.stderr, flush=True)
        print(f"\r\n{title} (at most {bar:.2f}x), {torch.get_num_threads()} threads\n")
        print("| state | ms a step, mean | median | mean against bfloat16 | median |\n|---|---|---|---|---|")
        dense = taken["bfloat16"]
        for name, times in taken.items():
            mean, middle = sum(times) / len(times), median(times)
            print(
                f"| {name} | {mean * 1e3:.2f} | {middle * 1e3:.2f} | {mean / (sum(dense) / len(dense)):.3f}x "
                f"| {middle / median(dense):.3f}x |",
                flush=True,
            )


def filled(model: lmstate.Model, policy: kv.Policy, tokens: int) -> lmstate.State:
    state = model.new_state(kv=policy)
    for first in range(0, tokens, 512):
        model([[token(i) for i in range(first, min(first + 512, tokens))]], state, logits="none")
        print(f"\r{type(policy).__name__}: {first} of {tokens} tokens ", end="", file=sys.stderr, flush=True)
    return state


def token(index: int) -> int:
    return 3 + (7919 * index) % 40_000
