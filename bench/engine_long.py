"""`python -m bench.engine_long`: long prompts through the engine, on a hybrid of random weights.

stall     rows decode without drafts, a long prompt arrives: the gaps between two tokens of a stream over its usual one
restart   a session with a long text is found again in a folder, by another process: seconds to its first token over
          those of its prefill
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Thread
from time import perf_counter
from typing import Any

import torch

import lmstate
from bench.traces.run import words


def hybrid(folder: Path) -> lmstate.Model:
    """Eight layers, one in four of them attention, the rest gated delta rules, of random weights in bfloat16."""
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    config: Any = Qwen3_5TextConfig(
        vocab_size=32000, hidden_size=512, intermediate_size=1792, num_hidden_layers=8, num_attention_heads=8,
        num_key_value_heads=2, head_dim=64, linear_num_key_heads=8, linear_num_value_heads=8,
        linear_key_head_dim=64, linear_value_head_dim=64, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
        max_position_embeddings=32768,
    )  # fmt: skip
    torch.manual_seed(0)
    Qwen3_5ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return lmstate.load(folder, weights="bfloat16")


@dataclass(frozen=True)
class Stall:
    """Seconds, but for the ratios: of gaps while the prompt was read over the usual one before and after it."""

    usual: float
    largest: float
    ratio: float  # of the largest
    median: float
    p99: float
    high: float  # 99.9 of 100 are smaller
    gaps: int
    prefill: float


def stall(model: lmstate.Model, prompt: int, streams: int, bound: float) -> Stall:
    dice = random.Random(0)
    times: list[list[float]] = [[] for _ in range(streams)]
    with lmstate.Engine(model, rows=streams + 1, stall=bound, draft=None) as engine:
        requests = [
            engine.submit(words(64, model.config.vocab_size, dice), max_new_tokens=10**6, ignore_eos=True)
            for _ in range(streams)
        ]

        def follow(request: lmstate.engine.Request, seen: list[float]) -> None:
            for _ in request:
                seen += [perf_counter()]

        threads = [Thread(target=follow, args=pair) for pair in zip(requests, times)]
        for thread in threads:
            thread.start()
        ids = words(prompt, model.config.vocab_size, dice)

        def run_on(tokens: int) -> None:
            wanted = [len(seen) + tokens for seen in times]
            while any(len(seen) < enough for seen, enough in zip(times, wanted)):
                threads[0].join(0.01)

        run_on(64)
        begin = perf_counter()
        engine.submit(ids, max_new_tokens=1).result()
        end = perf_counter()
        run_on(64)  # a machine that others use is not as fast now as it was then
        for request in requests:
            request.cancel()
        for thread in threads:
            thread.join()
    every = [pair for seen in times for pair in pairwise(seen[8:])]
    usual = median(after - before for before, after in every if after < begin or before > end)
    gaps = sorted(after - before for before, after in every if begin < after <= end)
    p99, high = (gaps[int(part * (len(gaps) - 1))] for part in (0.99, 0.999))
    largest, middle, p99, high = (seconds / usual for seconds in (gaps[-1], median(gaps), p99, high))
    return Stall(usual, gaps[-1], largest, middle, p99, high, len(gaps), end - begin)


@dataclass(frozen=True)
class Restart:
    """Seconds, but for `ratio`: the first token after a restart over the prefill of the same text."""

    prefill: float
    first: float
    ratio: float
    reused: int


def restart(model: lmstate.Model, prompt: int, made: Path, folder: Path) -> Restart:
    """`made`: the checkpoint that the model was loaded from."""
    ids = words(prompt, model.config.vocab_size, random.Random(1))
    with lmstate.Engine(model, store=folder) as engine:
        done = engine.session("long").send(ids, max_new_tokens=1, ignore_eos=True).result()
    command = [sys.executable, "-m", "bench.engine_long", "--threads", str(torch.get_num_threads())]
    told = subprocess.run([*command, "--resume", made, folder], stdout=subprocess.PIPE, check=True).stdout
    first, reused = json.loads(told)
    return Restart(done.usage.prefill, first, first / done.usage.prefill, reused)


def resume(made: Path, folder: Path) -> tuple[float, int]:
    """(seconds to the first token of the session in a folder, how many tokens were not computed for it)."""
    with lmstate.Engine(lmstate.load(made, weights="bfloat16"), store=folder) as engine:
        begin = perf_counter()
        request = engine.session("long").send([17], max_new_tokens=1, ignore_eos=True)
        next(iter(request))
        first = perf_counter() - begin
        return first, request.result().usage.reused


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.engine_long", description=__doc__)
    parser.add_argument("--prompt", type=int, default=16000, help="tokens")
    parser.add_argument("--streams", type=int, default=7)
    parser.add_argument("--stall", type=float, default=3.0, help="the bound")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--restarts", type=int, default=1, help="and no stall, where there are several")
    parser.add_argument("--resume", nargs=2, type=Path, help=argparse.SUPPRESS)  # what the other process does
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.resume is not None:
        print(json.dumps(resume(*options.resume)))
        return
    with tempfile.TemporaryDirectory() as folder:
        model = hybrid(made := Path(folder, "model"))
        stores = [Path(folder, f"store{number}") for number in range(options.restarts)]
        found = [restart(model, options.prompt, made, store) for store in stores]
        print(*found, sep="\n", flush=True)
        if len(found) > 1:
            print(f"median of the ratios: {median(each.ratio for each in found):.4f}")
        else:
            print(stall(model, options.prompt, options.streams, options.stall), flush=True)


if __name__ == "__main__":
    main()
