"""A load generator's view of servers: throughput, TTFT, TPOT and ITL at several numbers of clients.

    python -m bench.load                                      lmstate serve with SmolLM2
    python -m bench.load --serve "--max-itl 50" --serve "--stall 20"    with other options, each a server of its own
    python -m bench.load --llama-server PATH                  llama-server on the same file, beside it
    python -m bench.load --vllm PATH --vllm-folder FOLDER     vLLM on the same weights as a folder
    python -m bench.load --url http://127.0.0.1:8000/v1       another server of completions, beside it

random    prompts of `--prompt` random tokens, answers of `--answer`
prefixes  as `vllm bench serve --dataset-name prefix_repetition`: one of 4 prefixes of 512 tokens, then 64 of its own;
          answers of 32

Every client sends one request after the other. TTFT is the time to the first text, TPOT the time of an answer after it
by token, ITL the time between two texts. Servers take turns, in `--rounds` rounds with prompts of their own each, which
differ from run to run: a server of `--url` may still have those of the last one. With `--apart` a server runs only in
its turns: vLLM's threads keep a processor busy while it has nothing to do.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import re
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import mean, median
from time import perf_counter, time_ns

from bench.server import llama_served, served, streamed, vllm_served

CLIENTS = (1, 4, 8, 16, 32)
PREFIXES, PREFIX, SUFFIX, SUFFIX_ANSWER = 4, 512, 64, 32

Complete = Callable[[list[int], int], AsyncIterator[int]]


@dataclass
class Load:
    """What the requests of some rounds took, in seconds."""

    rates: list[float] = field(default_factory=list)  # tokens of answers a second, of each round
    first: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)

    def row(self) -> dict[str, float]:
        """Tokens a second at the median of the rounds, and milliseconds."""
        return {
            "tokens_per_second": round(median(self.rates), 1),
            "ttft_mean": milliseconds(mean(self.first)),
            "ttft_p99": milliseconds(percentile(self.first, 0.99)),
            "tpot_mean": milliseconds(mean(self.per_token)),
            "itl_median": milliseconds(median(self.gaps)),
            "itl_p99": milliseconds(percentile(self.gaps, 0.99)),
        }


def milliseconds(seconds: float) -> float:
    return round(seconds * 1000, 1)


def percentile(values: list[float], part: float) -> float:
    return sorted(values)[min(int(part * len(values)), len(values) - 1)]


def random_prompts(count: int, length: int, vocab: int, dice: random.Random) -> list[list[int]]:
    return [[dice.randrange(vocab) for _ in range(length)] for _ in range(count)]


def prefixed_prompts(count: int, vocab: int, dice: random.Random) -> list[list[int]]:
    prefixes = random_prompts(PREFIXES, PREFIX, vocab, dice)
    return [prefixes[i % PREFIXES] + random_prompts(1, SUFFIX, vocab, dice)[0] for i in range(count)]


async def play(complete: Complete, clients: int, prompts: list[list[int]], answer: int, load: Load) -> None:
    """One round."""
    waiting = iter(prompts)

    async def client() -> None:
        for prompt in waiting:
            begin = last = perf_counter()
            seen = False
            async for _ in complete(prompt, answer):
                now = perf_counter()
                (load.gaps if seen else load.first).append(now - last)
                if not seen:
                    begin, seen = now, True
                last = now
            load.per_token.append((last - begin) / max(answer - 1, 1))

    begin = perf_counter()
    await asyncio.gather(*(client() for _ in range(clients)))
    load.rates.append(len(prompts) * answer / (perf_counter() - begin))


def completions(url: str, model: str) -> Complete:
    def complete(prompt: list[int], answer: int) -> AsyncIterator[int]:
        return streamed(
            f"{url}/completions", {"model": model, "prompt": prompt, "max_tokens": answer}, "(?:text|content)"
        )

    return complete


def another(url: str) -> AbstractContextManager[str]:
    """A server that runs already."""
    return nullcontext(url)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench.load", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument(
        "--serve", action="append", default=[], metavar="ARGUMENTS", help="of lmstate serve; repeatable"
    )
    parser.add_argument("--llama-server", metavar="PATH", help="the program, to be run on the same file")
    parser.add_argument("--vllm", metavar="PATH", help="the program, to be run on the weights of --vllm-folder")
    parser.add_argument("--vllm-folder", type=Path, metavar="FOLDER", help="the model as safetensors")
    parser.add_argument("--url", action="append", default=[], help="another server; repeatable")
    parser.add_argument("--apart", action="store_true", help="a server runs only in its turns")
    parser.add_argument("--threads", type=int, help="of each server")
    parser.add_argument("--clients", type=int, nargs="+", default=CLIENTS)
    parser.add_argument("--requests", type=int, default=32, help="of a round")
    parser.add_argument("--prompt", type=int, default=256, help="tokens of a random prompt")
    parser.add_argument("--answer", type=int, default=64, help="tokens of an answer to it")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seed", type=int, default=time_ns(), help="of the prompts; by default the time")
    parser.add_argument("--only", choices=("random", "prefixes"), help="one of the two kinds of prompts")
    parser.add_argument("--out", type=Path, metavar="FILE", help="write the table as JSON")
    options = parser.parse_args()

    from lmstate.checkpoints.hub import resolve
    from lmstate.loading import load as load_model

    vocab = load_model(options.model).config.vocab_size
    rows = max(options.clients)
    servers: dict[str, Callable[[], AbstractContextManager[str]]] = {}
    for arguments in options.serve or [""]:
        more = arguments.split()
        servers[f"lmstate {arguments}".strip()] = partial(served, options.model, options.threads, rows, "auto", more)
    if options.llama_server:
        file = Path(resolve(options.model))
        servers["llama-server"] = partial(llama_served, options.llama_server, file, options.threads, rows)
    if options.vllm:
        if options.vllm_folder is None:
            raise SystemExit("--vllm needs --vllm-folder FOLDER: vLLM does not read the file of the model")
        servers["vllm"] = partial(vllm_served, options.vllm, options.vllm_folder, options.model, options.threads)
    for url in options.url:
        servers[re.sub(r"^https?://", "", url)] = partial(another, url)

    kinds = (options.only,) if options.only else ("random", "prefixes")
    loads = {(kind, clients, name): Load() for kind in kinds for clients in options.clients for name in servers}

    def turn(name: str, complete: Complete, kind: str, clients: int, number: int) -> None:
        dice = random.Random(f"{options.seed} {kind} {clients} {number}")
        if kind == "random":
            prompts = random_prompts(options.requests, options.prompt, vocab, dice)
        else:
            prompts = prefixed_prompts(options.requests, vocab, dice)
        answer = options.answer if kind == "random" else SUFFIX_ANSWER
        asyncio.run(play(complete, clients, prompts, answer, loads[kind, clients, name]))

    def begin(name: str, stack: ExitStack) -> Complete:
        complete = completions(stack.enter_context(servers[name]()), options.model)
        # the first answers of a process come later than the others
        asyncio.run(play(complete, 1, random_prompts(2, 64, vocab, random.Random(0)), 8, Load()))
        return complete

    if options.apart:
        for number in range(options.rounds):
            for name in list(servers)[:: 1 if number % 2 else -1]:
                with ExitStack() as stack:
                    complete = begin(name, stack)
                    for kind in kinds:
                        for clients in options.clients:
                            turn(name, complete, kind, clients, number)
    else:
        with ExitStack() as stack:
            running = {name: begin(name, stack) for name in servers}
            for kind in kinds:
                for clients in options.clients:
                    for number in range(options.rounds):
                        for name in list(servers)[:: 1 if number % 2 else -1]:
                            turn(name, running[name], kind, clients, number)

    table: list[dict[str, object]] = []
    for (kind, clients, name), load in loads.items():
        table.append({"server": name, "prompts": kind, "clients": clients, **load.row()})
        print("  ".join(f"{key} {value}" for key, value in table[-1].items()), flush=True)
    if options.out:
        options.out.write_text(json.dumps(table, indent=2))


if __name__ == "__main__":
    main()
