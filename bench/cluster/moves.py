"""`python -m bench.cluster.moves`: a replica is lost in the middle of a long session's answer; its next turn follows.

The model is the hybrid of `bench.engine_long`, with random weights. Two engines of this process are the replicas, and
their store is a folder. Seconds are also given as a part of those that reading the first prompt took.
"""

from __future__ import annotations

import argparse
import random
import tempfile
from pathlib import Path
from time import perf_counter, sleep
from typing import Any

import torch

from bench.engine_long import hybrid
from bench.traces.run import words
from lmstate.cluster.front import Front
from lmstate.cluster.handle import LocalReplica
from lmstate.engine import Engine

STILL = 2.0  # seconds without a write after which the store has all
MOVED, NEXT = 0.25, 0.05  # the bars: parts of a prefill


def written(engine: Engine) -> None:
    """Wait until it writes nothing more to the store: states follow the end of a turn."""
    before, count = -1.0, 0.0
    while before != count:
        sleep(STILL)
        before, count = count, engine.stats()["shared_written"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.cluster.moves", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16000, help="of the session before it moves")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory() as folder:
        (store := Path(folder, "store")).mkdir()
        model = hybrid(Path(folder, "model"))
        vocab, dice = model.config.vocab_size, random.Random(1)
        engines = [Engine(model, store=f"file://{store}", draft=None) for _ in range(2)]
        with Front([LocalReplica(engine, rank) for rank, engine in enumerate(engines)], model) as front:
            given: dict[str, Any] = {"session": "long", "ignore_eos": True, "temperature": 1.0, "seed": 3}
            begin = perf_counter()
            request = front.submit(words(options.tokens, vocab, dice), max_new_tokens=8, **given)
            next(iter(request))
            prefill = perf_counter() - begin
            request.result()
            (home,) = (one for one in front.replicas if one.stats()["requests"])
            assert isinstance(home, LocalReplica)
            written(home.engine)

            request = front.submit(words(16, vocab, dice), max_new_tokens=64, **given)
            pieces = iter(request)
            for _ in range(20):
                next(pieces)
            home.lose()
            begin, longest = perf_counter(), 0.0
            for _ in pieces:
                now = perf_counter()
                begin, longest = now, max(longest, now - begin)
            assert request.generated == 64

            begin = perf_counter()
            request = front.submit(words(16, vocab, dice), max_new_tokens=8, **given)
            next(iter(request))
            after = perf_counter() - begin
            usage = request.result().usage
        for engine in engines:
            engine.close()
    print(f"{options.tokens:,} tokens, {options.threads} threads: {prefill:.3f} s to the first token")
    print(f"pause of the answer that moved: {longest:.3f} s, {longest / prefill:.4f} of that; at most {MOVED}")
    print(f"first token of the next turn: {after:.3f} s, {after / prefill:.4f} of that; at most {NEXT}")
    print(f"tokens that the next turn computed: {usage.prompt - usage.reused} of {usage.prompt:,}")


if __name__ == "__main__":
    main()
