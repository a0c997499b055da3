"""What it costs to move about in a state: `python -m bench.moves [--threads N] [--tokens N]`.

On random bfloat16 weights of the Qwen3.5-0.8B shape, the bars of the project beside each number; and on SmolLM2's real
weights, with llama-cpp-python's `save_state` and `load_state` where `--llama-python` has it. Medians of the rounds.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from time import perf_counter

import torch

import lmstate

ROUNDS = 7
LLAMA = """
import sys, time, statistics, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=4352, n_batch=512, n_threads=2, verbose=False)
model.eval([3 + (7919 * i) % 40000 for i in range(int(sys.argv[2]))])
saves, loads = [], []
for _ in range(5):
    begin = time.perf_counter(); kept = model.save_state(); saves.append(time.perf_counter() - begin)
    begin = time.perf_counter(); model.load_state(kept); loads.append(time.perf_counter() - begin)
print(statistics.median(saves), statistics.median(loads))
"""


def seconds(run: Callable[[], object], before: Callable[[], object] = lambda: None, rounds: int = ROUNDS) -> float:
    """Median seconds of `run`, each after an untimed `before`."""
    times = []
    for number in range(rounds + 1):
        before()
        begin = perf_counter()
        run()
        if number:  # the first one warms up
            times.append(perf_counter() - begin)
    return statistics.median(times)


def state_costs(model: lmstate.Model, tokens: int) -> dict[str, float]:
    """Seconds of each operation on a row of `tokens` tokens, and bytes."""
    vocab = model.config.vocab_size
    ids = [3 + (7919 * i) % (vocab - 8) for i in range(tokens)]
    prefill = seconds(lambda: model([ids], model.new_state(rewind=64)), rounds=1)
    state, plain = model.new_state(rewind=64), model.new_state(rewind=0)
    model([ids], state)
    model([ids], plain)
    draft = ids[:8]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "row.lmstate"
        snapshot = state.snapshot(0)
        return {
            "prefill": prefill,
            "decode, rewind=64": seconds(lambda: model([[5]], state), rounds=40),
            "decode, rewind=0": seconds(lambda: model([[5]], plain), rounds=40),
            "commit 3 of 8": seconds(
                lambda: state.commit([3]), lambda: model([draft], state, logits="all", commit=False)
            ),
            "commit 8 of 8": seconds(
                lambda: state.commit([8]), lambda: model([draft], state, logits="all", commit=False)
            ),
            "rewind by 30": seconds(
                lambda: state.rewind(0, state.lengths[0] - 30), lambda: model([ids[:70]], state, logits="none")
            ),
            "snapshot": seconds(lambda: state.snapshot(0)),
            "restore": seconds(lambda: state.restore(0, snapshot)),
            "save": seconds(lambda: snapshot.save(path)),
            "load": seconds(lambda: lmstate.Snapshot.load(path)),
            "snapshot bytes": float(snapshot.nbytes),
        }


def alternating_decode(model: lmstate.Model, tokens: int, rounds: int = 60) -> float:
    """Seconds of a decode step with rewind=64 over those with rewind=0, step by step in turn."""
    ids = [3 + (7919 * i) % 40000 for i in range(tokens)]
    states = [model.new_state(rewind=64), model.new_state(rewind=0)]
    for state in states:
        model([ids], state)
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(rounds + 4):
        for state, kept in zip(states, times):
            begin = perf_counter()
            model([[5]], state)
            if number >= 4:
                kept.append(perf_counter() - begin)
    return statistics.median(times[0]) / statistics.median(times[1])


def rows(costs: dict[str, float], ratio: float) -> list[tuple[str, str, str]]:
    """What, measured, and the project's bar."""
    step, prefill = costs["decode, rewind=0"], costs["prefill"]
    through_disk = costs["save"] + costs["load"]
    return [
        ("`commit` of 3 of 8 drafted tokens, over a decode step", f"{costs['commit 3 of 8'] / step:.2f}", "0.25"),
        ("`commit` of all 8, over a decode step", f"{costs['commit 8 of 8'] / step:.2f}", ""),
        ("`rewind` by 30 inside the window, over a decode step", f"{costs['rewind by 30'] / step:.2f}", "0.5"),
        ("decode with `rewind=64`, over `rewind=0`", f"{ratio:.3f}", "1.05"),
        (
            "`snapshot` + `restore`, over prefilling the tokens",
            f"1/{prefill / (costs['snapshot'] + costs['restore']):.0f}",
            "1/100",
        ),
        ("`save` + `load`, over prefilling the tokens", f"1/{prefill / through_disk:.0f}", "1/20"),
    ]


def added_bytes(model: lmstate.Model) -> int:
    """Bytes that rewind=64 adds to a fresh state of one row."""
    sizes = [sum(model.new_state(rewind=rewind).memory().values()) for rewind in (64, 0)]
    return sizes[0] - sizes[1]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.moves", description=__doc__)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--llama-python", default=sys.executable)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)

    from bench.hybrids import checkpoint
    from lmstate.checkpoints.hub import resolve

    with checkpoint("qwen3.5-0.8b") as folder:
        hybrid = lmstate.load(folder, weights="bfloat16")
    for name, model, tokens in (
        ("Qwen3.5-0.8B shape, random bfloat16 weights", hybrid, options.tokens),
        ("SmolLM2-135M Q4_1", lmstate.load("smollm2"), 3500),
    ):
        costs = state_costs(model, tokens)
        print(f"\n{name}, {tokens:,} tokens, {options.threads} threads\n\n| what | measured | at most |\n|---|---|---|")
        for row in rows(costs, alternating_decode(model, tokens)):
            print("| " + " | ".join(row) + " |")
        added, held = added_bytes(model) / 2**20, costs["snapshot bytes"] / 2**20
        print(f"\nrewind=64 adds {added:.1f} MiB; a snapshot is {held:.1f} MiB")
        print("; ".join(f"{what} {cost * 1e3:.1f} ms" for what, cost in costs.items() if "bytes" not in what))
    command = [options.llama_python, "-c", LLAMA, str(resolve("smollm2")), "3500"]
    peer = subprocess.run(command, capture_output=True, text=True, check=False)
    if peer.returncode == 0:
        save, load = map(float, peer.stdout.split())
        print(f"\nllama-cpp-python at 3,500 tokens: save_state {save * 1e3:.0f} ms, load_state {load * 1e3:.0f} ms")


if __name__ == "__main__":
    main()
