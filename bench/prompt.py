"""A long prompt: peak memory and time a token, `python -m bench.prompt [--tokens N] [--weights KIND]`."""

from __future__ import annotations

import argparse
import resource
from time import perf_counter

import torch

import lmstate


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.prompt", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_000)
    parser.add_argument("--weights", default="auto")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    model = lmstate.load("smollm2", weights=options.weights)
    ids = [3 + (7919 * i) % 40000 for i in range(options.tokens)]
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    state = model.new_state()
    begin = perf_counter()
    model([ids], state)
    seconds = perf_counter() - begin
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    begin = perf_counter()
    for _ in range(8):
        model([[5]], state)
    step = (perf_counter() - begin) / 8
    held = sum(state.memory().values())
    print(f"{options.tokens:,} tokens, weights={options.weights}, {options.threads} threads")
    print(f"prefill {seconds:.1f} s, {seconds / options.tokens * 1e3:.2f} ms a token; then {step * 1e3:.1f} ms a token")
    sizes = [size / 2**10 for size in (held / 2**10, before, peak)]
    print("state {:.0f} MiB; peak of the process {:.0f} MiB before, {:.0f} MiB after".format(*sizes))


if __name__ == "__main__":
    main()
